"""The callback for the Hugging Face Trainer, and its sinks.

The Trainer has no event for a failed training; the one in ``trainer.py`` closes debug callbacks then.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import safetensors
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import Unpack

from te_precision_callbacks.accelerate.unconverted import expects_low_precision, scales_loss, warn_of_unconverted
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.options import SessionKeywords, SessionOptions
from te_precision_callbacks.session import InspectSession, SessionError, running_session
from te_precision_callbacks.session.resume import losses_before
from te_precision_callbacks.sinks.metrics import (
    LoggerSink,
    MetricSelection,
    add_to_tensorboard,
    names_for_mlflow,
    wandb_histogram,
)
from te_precision_callbacks.te.state import delayed_states

logger = logging.getLogger(__name__)


class DataParallelError(OptionError, ValueError):
    """Debugging was requested under ``torch.nn.DataParallel``, where copies of the model cannot be observed."""


class RunningTraining(NamedTuple):
    """A call of ``trainer.train()``: the trainer, and the checkpoint that it resumes from, if any."""

    trainer: Trainer
    checkpoint: Path | None


def find_training() -> RunningTraining | None:
    """Find the Trainer and the checkpoint, which a callback does not receive, on the call stack.

    Read from transformers 4.57 to 5.23: ``Trainer.train`` runs the whole loop. By then it has replaced True in its
    parameter ``resume_from_checkpoint`` by the folder.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "train" else None
        if isinstance(owner, Trainer):
            resumed = frame.f_locals.get("resume_from_checkpoint")
            return RunningTraining(owner, Path(resumed) if isinstance(resumed, (str, os.PathLike)) else None)
        frame = frame.f_back
    return None


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Refuse to debug under DataParallel, which creates new copies of the model for each forward.

    Raises:
        DataParallelError: ``args.n_gpu`` is above 1.
    """
    if args.n_gpu > 1:
        raise DataParallelError(
            f"Precision debugging does not work under DataParallel (args.n_gpu is {args.n_gpu}). Launch one process"
            " per GPU with torchrun or accelerate launch, or make only one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )


class ReportingError(PrecisionDebugError, RuntimeError):
    """A reporting integration failed to log a step's statistics."""


class TrainerEvent(NamedTuple):
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    keywords: Mapping[str, Any]


class Reporting:
    """The sinks of a training on the main process, one for each reporting integration of a trainer (``report_to``).

    An integration is a callback of a class in transformers' ``INTEGRATION_TO_CALLBACK``. Its ``on_log`` is called, so
    steps and processes are the same as for the trainer's metrics; no other callback gets statistics. Most integrations
    prefix every name with ``train/``, which would add thousands of charts to the group of the loss; statistics keep
    their names, ``te.<layer>/...``. Closed integrations do not receive statistics.
    """

    def __init__(self, handler: CallbackHandler, event: TrainerEvent, select: MetricSelection) -> None:
        classes: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
        integrations = [callback for callback in handler.callbacks if isinstance(callback, classes)]
        self.is_open = True
        self.event = event
        self.sinks = [_IntegrationSink(integration, self, select) for integration in integrations]


class _OwnName(str):
    """A metric's name that ignores the prefix ``train/`` of an integration.

    transformers 5.23.0, ``integrations/integration_utils.py: rewrite_logs``, computes ``"train/" + name``; ``__radd__``
    of a subclass of str takes precedence. Other ways of renaming still work.
    """

    def __radd__(self, other: str) -> str:
        return str(self)


class _IntegrationSink(LoggerSink):
    """Sends metrics to an integration of the Trainer, such as TensorBoard or W&B."""

    def __init__(self, integration: TrainerCallback, reporting: Reporting, select: MetricSelection) -> None:
        super().__init__(select)
        self._integration = integration
        self._reporting = reporting
        self._known: set[str] = set()

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log at the step of the trainer's metrics; a no-op after the training."""
        if not self._reporting.is_open:
            return
        event = self._reporting.event
        integration = self._integration
        try:
            if isinstance(integration, MLflowCallback):
                metrics = names_for_mlflow(metrics)
            if metrics:
                state = event.state
                if state.global_step != step:  # the current step was not completed
                    state = copy.copy(state)
                    state.global_step = step
                named = {_OwnName(name): value for name, value in metrics.items()}
                integration.on_log(event.args, state, event.control, logs=named, **event.keywords)
            if isinstance(integration, MLflowCallback) and not metrics.keys() <= self._known:
                # The integration logs from several threads, which create a folder for each name in a store of local
                # files. If two threads create the same folder, MLflow 3.17 loses the step of one.
                self._known |= metrics.keys()
                integration._ml_flow.flush_async_logging()
            for name, counts in histograms.items():
                if isinstance(integration, TensorBoardCallback) and integration.tb_writer is not None:
                    add_to_tensorboard(integration.tb_writer, name, counts, step)
                elif isinstance(integration, WandbCallback):
                    # Like the integration: wandb's step counts calls, and train/global_step is the x axis.
                    integration._wandb.log({name: wandb_histogram(counts), "train/global_step": step})
        except Exception as error:
            name = type(integration).__name__
            raise ReportingError(f"{name} could not log statistics: {type(error).__name__}: {error}") from error


_SKIPPED = ("epoch", "step", "total_flos")
_NUMBERS = {"learning_rate": "lr"}
"""Names in the Trainer's logs that are no numbers of the training, and the session's name of another."""

_TRAININGS: weakref.WeakKeyDictionary[InspectSession, tuple[TrainerState, Reporting | None]]
_TRAININGS = weakref.WeakKeyDictionary()
"""The session of each training -> its state, which is new in each training, and its reporting."""


class PrecisionDebugTrainerCallback(TrainerCallback):
    """Runs Transformer Engine's precision debugging during ``trainer.train()``, also in the unmodified Trainer.

    Logged to the reporting integrations of ``report_to``, on the main process, at ``state.global_step``:

    - ``te.<layer>/<tensor>/<statistic>`` for each statistic of the config, such as
      ``te.model.layers.0.self_attn.q_proj/activation/max`` (in MLflow with ``_pct`` for ``%``). Units are the tensor's;
      a name that ends in ``%`` is in percent.
    - metrics of the whole model, such as ``te/worst_underflows%``: see :mod:`te_precision_callbacks.sinks.metrics`.

    Written below ``log_dir``, by default ``args.output_dir``: ``nvdlfw_inspect_logs`` (which features acted where, a
    file per rank) and ``nvdlfw_inspect_statistics_logs`` (every statistic, from rank 0).

    Evaluation and prediction are not observed; features that change precision act there as in training. transformers'
    Trainer does not notify callbacks when a training fails. The session is then closed by :meth:`close`, by the next
    training, or at the end of the process; :class:`te_precision_callbacks.transformers.Trainer` closes it immediately.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`.

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

    def __init__(self, config: ConfigSource = None, **keywords: Unpack[SessionKeywords]) -> None:
        self._options = SessionOptions.from_keywords(config, **keywords)
        self._session: InspectSession | None = None
        self._reporting: Reporting | None = None
        self._finalizer: Any = None
        self._has_stepped = False

    @property
    def session(self) -> InspectSession:
        """The session of the current or last training.

        Raises:
            SessionError: no training has started yet.
        """
        if self._session is None:
            raise SessionError("The callback has no session yet: trainer.train() starts it.")
        return self._session

    @property
    def _running(self) -> InspectSession | None:
        if self._session is not None and self._session.running:
            return self._session
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_reporting": None, "_finalizer": None}

    # ------------------------------------------------------------------ start

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **keywords: Any,
    ) -> None:
        """Start the session, after ``accelerator.prepare`` has replaced layers and wrapped the model."""
        if model is None:
            raise SessionError("on_train_begin: model= is missing. Pass it, like transformers' Trainer.")
        refuse_data_parallel(args)
        former = running_session()
        if former is not None and not _end_former_training(former, state):
            return
        training = find_training()
        self._reporting = None
        self._has_stepped = False
        if training is None:
            logger.warning(
                "PrecisionDebugTrainerCallback was not called by transformers' Trainer.train(), so only the"
                " statistics log and sinks= get statistics, not the integrations of report_to."
            )
        elif state.is_world_process_zero:
            select = MetricSelection(self._options.prefix, self._options.log_filter)
            event = TrainerEvent(args, state, control, {"model": model, **keywords})
            self._reporting = Reporting(training.trainer.callback_handler, event, select)
        session = InspectSession.from_options(self._options)
        self._session = session
        session.start(
            log_dir=Path(args.output_dir or "."),
            sinks=self._reporting.sinks if self._reporting else (),
            counts_from=1,
            integration="transformers",
        )
        _TRAININGS[session] = state, self._reporting
        try:
            if self._options.start_step is None:
                session.iteration = state.global_step
            session.attach(model)
            session.observing = False
            if training is not None:
                accelerator = training.trainer.accelerator
                if training.checkpoint is not None:
                    session.resumed_loss.restored = losses_before(state.log_history, state.global_step)
                    restore_states(accelerator, model, training.checkpoint)
                    session.load_fingerprint(training.checkpoint)
                session.expect_low_precision(expects_low_precision(accelerator))
                session.unconverted = warn_of_unconverted(accelerator, model)
                if session.overflow is not None:
                    session.overflow.loss_scaled = scales_loss(accelerator)
                if args.logging_nan_inf_filter:  # the Trainer logs only finite losses
                    session.note_filtered_loss()
                    session.follow(accelerator, "loss_step", total=True)
        except BaseException as error:
            session.stop(error)
            raise
        collected = SessionError("The callback was collected while its session was running.")
        self._finalizer = weakref.finalize(self, session.stop, collected)
        self._finalizer.atexit = False  # the session itself handles the end of the process

    # ------------------------------------------------------------------ step

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._running is not None:
            self._running.observing = True

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop observing: other callbacks may run the model from here on."""
        if self._running is not None:
            self._running.observing = False

    on_epoch_end = on_pre_optimizer_step
    """An epoch may be stopped during an accumulation."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """End a debug iteration, which holds all micro-batches of an accumulation."""
        session = self._running
        if session is None:
            return
        self._has_stepped = True
        try:
            session.step(state.global_step)
        except BaseException as error:  # the Trainer has no event for a failure
            self.close(error)
            raise

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any
    ) -> None:
        if self._running is None:
            return
        numbers = {_NUMBERS.get(name, name): value for name, value in (logs or {}).items() if name not in _SKIPPED}
        if not self._has_stepped:
            numbers.pop("train_loss", None)  # the mean over zero steps, which the Trainer logs as 0
        self._running.log(numbers, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the fingerprint of the low-precision state to the checkpoint, on each process."""
        folder = Path(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self._running is not None and folder.is_dir():
            self._running.save_fingerprint(folder)

    # ------------------------------------------------------------------ end

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._reporting is not None:
            self._reporting.is_open = False
        self._close(None)

    def close(self, error: BaseException | None = None) -> None:
        """End the session of a training that has just failed, if the Trainer does not close it.

        Args:
            error: the error that ended the training; by default the exception being handled, as in an ``except`` block.
        """
        failed = SessionError("callback.close() was called before the training ended.")
        self._close(error or sys.exc_info()[1] or failed)

    def _close(self, error: BaseException | None) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._session is not None:
            self._session.stop(error)


def _end_former_training(former: InspectSession, state: TrainerState) -> bool:
    """End the session of another training; return False for a session of the script, or of another callback."""
    former_state, reporting = _TRAININGS.get(former, (state, None))
    if former_state is state:
        logger.warning(
            "This callback has no effect, because the script or another callback already runs a session, and a"
            " process can have only one. Use one callback with all options."
        )
        return False
    logger.warning("Another training starts, so the session of a training that did not end normally is closed.")
    if reporting is not None:
        reporting.is_open = False  # its integrations may already log the new training
    former.stop(SessionError("Another training started before this one ended."))
    return True


def restore_states(accelerator: Accelerator, model: torch.nn.Module, checkpoint: Path) -> None:
    """Load the FP8 state of converted layers from a checkpoint's folder, before the first forward.

    Read from transformers 4.57 to 5.23: ``Trainer.train`` loads the weights of a checkpoint before
    ``accelerator.prepare`` replaces layers by layers of Transformer Engine, and skips their ``_extra_state`` as
    "unexpected". It can be loaded after ``prepare``.

    Layers that already have a state are skipped. The state of delayed scaling is a pickle, which Transformer Engine
    loads only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. A warning lists state that was not restored.
    """
    if accelerator.fp8_backend != "TE":
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    stateless: dict[str, torch.nn.Module] = {}
    for name, module in plain.named_modules():
        keeps_state = type(module).set_extra_state is not torch.nn.Module.set_extra_state
        if keeps_state and not any(delayed_states(module)):
            stateless[f"{name}._extra_state"] = module
    restored = 0
    try:
        for path in checkpoint.glob("model*.safetensors"):  # in one file, or in parts
            with safetensors.safe_open(path, framework="pt") as file:
                for key in stateless.keys() & set(file.keys()):
                    state = file.get_tensor(key)
                    if state.numel():
                        stateless[key].set_extra_state(state)
                        restored += 1
    except Exception as error:
        logger.warning(
            "The scales and amax histories of %d of %d converted layers were not restored from %s: %s. Training"
            " continues with new scales for these layers.",
            len(stateless) - restored,
            len(stateless),
            checkpoint,
            error,
        )
        return
    if restored:
        logger.info("Restored the scales and amax histories of %d converted layers from %s.", restored, checkpoint)
