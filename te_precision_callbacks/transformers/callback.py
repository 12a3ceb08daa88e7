"""The callback for the Hugging Face Trainer."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import Unpack

from te_precision_callbacks.accelerate import scales_loss, warn_of_unconverted, warn_of_unheld
from te_precision_callbacks.accelerate.unconverted import expects_low_precision
from te_precision_callbacks.base.debug_values import TE_PRECISION
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.options import SessionKeywords, SessionOptions
from te_precision_callbacks.session import InspectSession, SessionError, running_session
from te_precision_callbacks.session.resume import loss_after_resume, losses_before
from te_precision_callbacks.sinks import MetricSelection
from te_precision_callbacks.transformers.closing import DebugCallback, close_with, refuse_data_parallel
from te_precision_callbacks.transformers.log_history import HistorySummary
from te_precision_callbacks.transformers.loop import find_handler, find_loop
from te_precision_callbacks.transformers.reporting import Reporting, TrainerEvent
from te_precision_callbacks.transformers.restoring import restore_states
from te_precision_callbacks.transformers.training import Training, close_abandoned

logger = logging.getLogger(__name__)


class PrecisionDebugTrainerCallback(DebugCallback):
    """Runs Transformer Engine's precision debugging during ``trainer.train()``, also in the unmodified Trainer.

    Logged to the reporting integrations of ``report_to``, on the main process, at ``state.global_step``:

    - ``te.<layer>/<tensor>/<statistic>`` for each statistic that the config asks for, such as
      ``te.model.layers.0.self_attn.q_proj/activation/max`` (in MLflow with ``_pct`` for ``%``).
      Units are those of the tensor; a statistic whose name ends in ``%`` is in percent.
    - ``te/worst_underflows%`` and its kin, ``te/all/<tensor>/<statistic>/max`` and its kin: of the whole model, see
      :mod:`te_precision_callbacks.sinks.metrics`.

    Added to the entries of ``state.log_history`` that have the training loss: the worst values since the previous
    entry, at most twelve keys: ``te/worst_underflows%``, ``te/worst_overflows%``, ``te/worst_sqnr_db``,
    ``te/nonfinite_num``, each with ``_layer`` and ``_tensor``.

    Written below ``log_dir``, by default ``args.output_dir``: ``nvdlfw_inspect_logs`` (which features acted where, a
    file a rank) and ``nvdlfw_inspect_statistics_logs`` (every statistic, from rank 0).

    Evaluation and prediction are not observed. Features that change precision act there as in training. The Trainer
    does not notify callbacks when a training fails: with :class:`te_precision_callbacks.transformers.Trainer`, or with
    ``trainer=``, the session is closed at once; otherwise at the next forward of the model or the next training, when
    the callback is collected, or when the process ends.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        trainer: the trainer that the callback is added to with ``trainer.add_callback``.
        **keywords: the options of every front door, see :class:`te_precision_callbacks.options.SessionOptions`.

    Raises:
        ConfigError: the config cannot be used. Problems that need the model (a section that matches no layer) are
            raised when training begins.
        OptionError: an option is unknown, or its value is invalid.
        TransformerEngineUnavailableError: when training begins, Transformer Engine cannot be imported.
        DataParallelError: when training begins, ``args.n_gpu`` is above 1.

    Example::

        callback = PrecisionDebugTrainerCallback("config.yaml")
        transformers.Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        print(callback.session.precision)
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        trainer: transformers.Trainer | None = None,
        **keywords: Unpack[SessionKeywords],
    ) -> None:
        self._options = SessionOptions.from_keywords(config, **keywords)
        self._training: Training | None = None
        self._finalizer: Any = None
        self._resumed_at: int | None = None
        self._trainer: weakref.ref[transformers.Trainer] | None = None
        if trainer is not None:
            if not isinstance(trainer, transformers.Trainer):
                raise OptionError(f"trainer= must be a transformers.Trainer, not {trainer!r}.")
            self._trainer = weakref.ref(trainer)
            close_with(trainer, self)

    @property
    def session(self) -> InspectSession:
        """The session of the current or last training.

        Raises:
            SessionError: nothing was trained yet.
        """
        if self._training is None:
            raise SessionError("The callback has no session yet: it starts one when trainer.train() begins.")
        return self._training.session

    @property
    def watches(self) -> tuple[str, ...]:
        """The debug options that the callback acts on."""
        return TE_PRECISION, *self._options.debug

    def release(self) -> None:
        """Remove the features that ``keep_precision=True`` has left acting on the model after the training."""
        if self._training is not None:
            self._training.session.release()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: a hyperparameter search pickles the trainer."""
        return {**self.__dict__, "_training": None, "_finalizer": None, "_trainer": None}

    # ------------------------------------------------------------------ start

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **keywords: Any,
    ) -> None:
        """Start the session: ``accelerator.prepare`` has replaced layers and wrapped the model by now."""
        self._close(SessionError("Another training began."), at_once=False)
        close_abandoned()
        if model is None:
            raise SessionError("on_train_begin: the event has no model. Pass model=, as transformers' Trainer does.")
        refuse_data_parallel(args)
        handler = self._find_handler()
        if running_session() is not None:
            _say_observed_already([] if handler is None else handler.callbacks)
            return
        reporting = None
        if handler is None:
            logger.warning(
                "The callback handler that called PrecisionDebugTrainerCallback could not be found, so no integration"
                " of report_to gets statistics; the statistics log and sinks= do. Give the callback trainer=."
            )
        elif state.is_world_process_zero:
            reporting = Reporting(handler, MetricSelection(self._options.prefix, self._options.log_filter))
        session = InspectSession.from_options(self._options)
        session.start(
            log_dir=Path(args.output_dir or "."),
            sinks=reporting.sinks if reporting else (),
            counts_from=1,
            front_door="transformers",
            trainer_steps=True,
        )
        try:
            if self._options.start_step is None:
                session.iteration = state.global_step
            session.attach(model)
            session.observing = False
            loop = find_loop(handler, state) if handler is not None else None
            resumes = loop is not None and loop.checkpoint is not None
            self._resumed_at = state.global_step if resumes and state.is_world_process_zero else None
            if loop is not None and loop.checkpoint is not None:
                session.resumed_loss.restored = losses_before(state.log_history, state.global_step)
                if loop.accelerator is not None:
                    restore_states(loop.accelerator, model, loop.checkpoint)
                session.load_fingerprint(loop.checkpoint)
            if loop is not None and loop.accelerator is not None:
                session.expect_low_precision(expects_low_precision(loop.accelerator))
                session.unconverted = warn_of_unconverted(loop.accelerator, model)
                warn_of_unheld(loop.accelerator, model)
                if session.overflow is not None:
                    session.overflow.loss_scaled = scales_loss(loop.accelerator)
            history = HistorySummary(self._options.prefix)
            self._training = Training(session, reporting, history, loop, model)
            if args.logging_nan_inf_filter:
                session.note_filtered_loss()
            if loop is not None and loop.accelerator is not None and args.logging_nan_inf_filter:
                self._training.follow(loop.accelerator)
        except BaseException as error:
            session.stop(error)
            raise
        gone = SessionError("The callback was collected while its session was running.")
        self._finalizer = weakref.finalize(self, self._training.close, gone, at_once=False)
        self._finalizer.atexit = False  # the session ends with the process by itself

    def _find_handler(self) -> CallbackHandler | None:
        trainer = None if self._trainer is None else self._trainer()
        return trainer.callback_handler if trainer is not None else find_handler()

    # ------------------------------------------------------------------ step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Observe the micro-batches of a step."""
        if self._training is not None and self._training.running:
            self._training.begin_step(TrainerEvent(args, state, control, keywords))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Stop observing: all micro-batches are done, and other callbacks may run the model from here on."""
        if self._training is not None and self._training.running:
            self._training.pause()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """End a debug iteration, which holds all micro-batches of an accumulation."""
        if self._training is not None and self._training.running:
            self._training.end_step(TrainerEvent(args, state, control, keywords))

    on_epoch_end = on_pre_optimizer_step  # of an epoch that is stopped inside an accumulation

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Warn if the features that changed precision in training no longer act."""
        if self._training is not None:
            self._training.session.tell_of_evaluation("An evaluation after the training")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any) -> None:
        """Add the summary to the entry that the trainer has just appended to its history."""
        if self._training is None or not self._training.running or not state.log_history:
            return
        entry: dict[str, Any] = state.log_history[-1]
        numbers = _numbers(keywords.get("logs") or {})
        if not self._training.has_stepped:
            numbers.pop("train_loss", None)  # the Trainer's mean over no steps, 0, which is no loss of the training
        self._training.session.log(numbers, state.global_step)
        if entry.get("step") == state.global_step:
            self._training.history.update(entry)
        self._tell_of_loss(state)

    def _tell_of_loss(self, state: TrainerState) -> None:
        """Log once what the resume did to the loss, if it has not restored everything."""
        report = None if self._resumed_at is None else self.session.resume_report
        if self._resumed_at is None or report is None:
            return
        told = loss_after_resume(state.log_history, self._resumed_at)
        if told is not None:
            self._resumed_at = None
            if report.findings:
                logger.warning("%s", told)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any) -> None:
        """Write the fingerprint of the state of low precision into the checkpoint, on each process."""
        folder = Path(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self._training is not None and self._training.running and folder.is_dir():
            self._training.session.save_fingerprint(folder)

    # ------------------------------------------------------------------ end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """End the session. The integrations got their last event before, and may be closed."""
        self._close(None, at_once=False)

    def close(self, error: BaseException | None = None) -> None:
        """End the session of a training that has just failed, if the callback does not know the trainer.

        Args:
            error: what ended the training. None: the exception that is handled now, as in an ``except`` block.
        """
        failed = SessionError("callback.close() was called before the training had ended.")
        self._close(error or sys.exc_info()[1] or failed, at_once=True)

    def _close(self, error: BaseException | None, *, at_once: bool) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._training is not None:
            self._training.close(error, at_once=at_once)


def _say_observed_already(callbacks: Sequence[TrainerCallback]) -> None:
    """Warn that a training has no session of this callback, since another one is running.

    Args:
        callbacks: of the trainer.
    """
    if sum(isinstance(callback, PrecisionDebugTrainerCallback) for callback in callbacks) > 1:
        logger.warning(
            "The trainer has several PrecisionDebugTrainerCallback. The first one observes the training, and the others"
            " do nothing. Give one callback all options."
        )
    else:
        logger.warning(
            "A session of another trainer or of the script is running, and a process can have only one at a time."
            " This training goes on without precision debugging."
        )


def _numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainer logs, without what only counts or measures time."""
    skipped = ("epoch", "step", "total_flos")
    known = {"learning_rate": "lr"}
    return {known.get(name, name): value for name, value in logs.items() if name not in skipped}
