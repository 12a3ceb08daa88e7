"""The debugger for Accelerate, and its sink for Accelerate's trackers."""

from __future__ import annotations

import itertools
import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from typing_extensions import Self, Unpack

from te_precision_callbacks.accelerate.unconverted import (
    expects_low_precision,
    roots_of,
    scales_loss,
    warn_of_unconverted,
)
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.optimizers import held_ids
from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.layers.naming import Model, modules_of, parameters_of
from te_precision_callbacks.options import SessionKeywords, SessionOptions, StepOn, read_step_on, step_number
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.sinks import MetricSelection, StepRecords
from te_precision_callbacks.sinks.metrics import (
    LoggerSink,
    add_to_tensorboard,
    names_for_mlflow,
    wandb_histogram,
)

logger = logging.getLogger(__name__)


class TrackerSink(LoggerSink):
    """Sends a step's metrics to each tracker, in one call."""

    def __init__(self, accelerator: Accelerator, select: MetricSelection) -> None:
        super().__init__(select)
        self._accelerator = accelerator
        self._notices = Notices()

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log at the script's step, like ``accelerator.log``, with names that each tracker accepts."""
        trackers = self._accelerator.trackers
        if not trackers and self._notices.first("no tracker"):
            missing = (
                "call accelerator.init_trackers('my_project') before the loop"
                if self._accelerator.log_with
                else "pass log_with='tensorboard' (or another tracker) and project_dir=... to Accelerator, and call"
                " accelerator.init_trackers('my_project')"
            )
            logger.warning(
                "The accelerator has no running tracker, so statistics go only to the files in log_dir. To send them"
                " to a tracker, %s.",
                missing,
            )
        for tracker in trackers:
            if metrics:
                tracker.log(names_for_mlflow(metrics) if tracker.name == "mlflow" else metrics, step=step)
            if histograms and tracker.name == "tensorboard":
                for name, counts in histograms.items():
                    add_to_tensorboard(tracker.tracker, name, counts, step)
                tracker.tracker.flush()
            elif histograms and tracker.name == "wandb":
                tracker.log({name: wandb_histogram(counts) for name, counts in histograms.items()}, step=step)


STATE_FILE = "te_precision_debugger.json"
"""The file with the debug iteration, in the folder of ``accelerator.save_state``."""


class PrecisionDebugger:
    """Runs Transformer Engine's precision debugging in a training loop with Accelerate.

    Create the debugger after ``accelerator.prepare``, on every process. As a context manager it observes until the end
    of the block; otherwise call :meth:`start` and :meth:`stop`.

    Logged on the main process, in one ``accelerator.log`` call per step, to every tracker:

    - ``te.<layer>/<tensor>/<statistic>`` for each statistic of the config, such as
      ``te.model.layers.0.mlp.up_proj/activation/max``. Units are the tensor's; a name that ends in ``%`` is in percent
      (in MLflow with ``_pct`` for ``%``).
    - metrics of the whole model, such as ``te/worst_underflows%``: see :mod:`te_precision_callbacks.sinks.metrics`.
    - exponent histograms, as histograms, to the TensorBoard and W&B trackers.

    Written below ``log_dir``: ``nvdlfw_inspect_logs`` (which features acted where, a file per rank) and
    ``nvdlfw_inspect_statistics_logs`` (every statistic, from rank 0).

    ``accelerator.save_state`` saves the debug iteration, and on each process the fingerprint of the low-precision state
    for the audit of a resume, in separate files. ``load_state`` restores them, also before :meth:`start` and after
    :meth:`stop`. The files are optional: checkpoints load with and without them, and with and without a debugger.

    Modules in eval mode and forwards without gradients are not observed; features that change precision act there as in
    training. After an exception the statistics since the last step are written, without a collective.

    Args:
        accelerator: the :class:`accelerate.Accelerator` that has prepared the model.
        model: the model that ``accelerator.prepare`` returned, or a list of such models, or a mapping with prefixes of
            the layer names as keys.
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        step_on: the length of a debug iteration: ``"optimizer_step"`` (a call of :meth:`step` counts if gradients were
            synchronized, so the batches of an accumulation are one iteration) or ``"batch"`` (every call counts).
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`. ``log_dir`` defaults to the
            accelerator's ``logging_dir`` or ``project_dir``.

    Raises:
        ConfigError: the config cannot be used. Problems that need the model (a section that matches no layer) are
            raised by :meth:`start`.
        OptionError: an option is unknown, or its value is invalid; no accelerator; no model.
        SessionError: ``accelerator.prepare`` has not seen the model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Model,
        config: ConfigSource = None,
        *,
        step_on: StepOn = "optimizer_step",
        **keywords: Unpack[SessionKeywords],
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise OptionError(
                f"accelerator= must be an accelerate.Accelerator, not a {type(accelerator).__name__}. The order is"
                " PrecisionDebugger(accelerator, model, config)."
            )
        self._step_on = read_step_on(step_on)
        for _, root in roots_of(model):
            # Accelerate would replace the layers of an unprepared model later, or never.
            if set(modules_of(accelerator._models)).isdisjoint(root.modules()):
                other = "" if not accelerator._models else ", but another one"
                raise SessionError(
                    f"accelerator.prepare() was not given this {type(root).__name__}{other}. Create the debugger after"
                    " 'model, optimizer = accelerator.prepare(model, optimizer)', and pass the returned model."
                )
        self._accelerator = accelerator
        self._model = model
        self._options = SessionOptions.from_keywords(config, **keywords)
        self._session = InspectSession.from_options(self._options)
        self._next_iteration: int | None = None
        self._checkpoint: Path | None = None
        self._stopped = False
        self._logged: BeforeCalls | None = None
        self._notices = Notices()
        self._hook_checkpoints()

    @property
    def session(self) -> InspectSession:
        """The session; also available before :meth:`start` and after :meth:`stop`."""
        return self._session

    @property
    def unconverted(self) -> dict[str, str]:
        """Layer that Accelerate did not convert to Transformer Engine, and that runs without FP8 -> the reason.

        Available after :meth:`start`; empty if Accelerate does not convert layers.
        """
        return dict(self._session.unconverted)

    # ------------------------------------------------------------------ start, step, stop

    def start(self) -> Self:
        """Start observing; call this on every process.

        Raises:
            ConfigError: a section matches no layer, or another problem that needs the model; on all processes.
            SessionError: the debugger, or another session, is already running.
            TransformerEngineUnavailableError: Transformer Engine cannot be imported.
        """
        session = self._session
        if session.running:
            raise SessionError("start(): the debugger is already running. Call stop() first.")
        self._notices = Notices()
        folder = self._accelerator.logging_dir or self._accelerator.project_dir or "."
        select = MetricSelection(self._options.prefix, self._options.log_filter)
        try:
            session.start(
                log_dir=Path(folder),
                sinks=[TrackerSink(self._accelerator, select)] if self._accelerator.is_main_process else (),
                counts_from=1,
                integration="accelerate",
            )
            self._logged = BeforeCalls(self._accelerator, "log", self._note_logged)
            if self._next_iteration is not None:
                session.iteration = self._next_iteration
            elif self._options.start_step is None and _has_stepped(self._accelerator, self._model):
                logger.warning(
                    "The optimizer has already stepped, but the debug iteration starts at 0. To continue the count,"
                    " create the PrecisionDebugger before accelerator.load_state(), use one PrecisionDebugger for all"
                    " blocks, or set start_step=."
                )
            if self._checkpoint is not None:
                session.load_fingerprint(self._checkpoint)
                self._checkpoint = None
            session.expect_low_precision(expects_low_precision(self._accelerator))
            session.follow(self._accelerator)
            session.attach(self._model)
            if session.overflow is not None:
                session.overflow.loss_scaled = scales_loss(self._accelerator)
            session.unconverted = warn_of_unconverted(self._accelerator, self._model)
        except BaseException as error:
            self.stop(error)
            raise
        return self

    def step(self, step: int | None = None) -> StepRecords | None:
        """End the debug iteration if it is complete. Call this once per batch, on every process, after the optimizer.

        Args:
            step: the logging step of the statistics. The default is the debug iteration + 1: the number of optimizer
                steps.

        Returns:
            The records of the iteration; None without records, or if it has not ended.

        Raises:
            OptionError: ``step`` is not a nonnegative integer.
            SessionError: the debugger was not started, or with ``strict=True`` was stopped; otherwise a stopped
                debugger warns once.
            ActivationOverflowError: with ``debug="activation_overflow"``, an inf or nan since the last check.
        """
        if step is not None:
            step = step_number("step=", step)
        if not self._session.running:
            if not self._stopped or self._options.strict:
                raise SessionError(
                    "step(): the debugger is not running. Call start() before the loop, or use"
                    " 'with PrecisionDebugger(accelerator, model, config) as debugger' around it."
                )
            if self._notices.first("stopped"):
                logger.warning("step(): the debugger was stopped, so nothing more is observed. Training continues.")
            return None
        if self._step_on == "optimizer_step" and not self._accelerator.sync_gradients:
            return None
        return self._session.step(step)

    def stop(self, error: BaseException | None = None) -> None:
        """End the session, after an ``error`` if there was one, and undo everything that it changed; a no-op if it is
        not running.

        The statistics since the last step are written, from this process's own data, without a collective.
        """
        session = self._session
        was_running = session.running
        try:
            if was_running:
                session.stop(error)
        finally:
            if self._logged is not None:
                self._logged.remove()
                self._logged = None
            if was_running:
                self._stopped = True
                self._next_iteration = session.iteration

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop(error)

    # ------------------------------------------------------------------ checkpoints

    def _hook_checkpoints(self) -> None:
        """Hook into ``save_state`` and ``load_state`` during the debugger's lifetime, also after :meth:`stop`.

        ``register_for_checkpointing`` is not used: it requires the same number of registered objects to load a
        checkpoint, so checkpoints saved without the debugger would not load with it, and vice versa.
        """
        debugger: Any = weakref.proxy(self)  # keeps the debugger and the model collectable
        accelerator = self._accelerator
        for hook in (
            accelerator.register_save_state_pre_hook(lambda *arguments: debugger._save(Path(arguments[-1]))),
            accelerator.register_load_state_pre_hook(lambda *arguments: debugger._load(Path(arguments[-1]))),
        ):
            weakref.finalize(self, hook.remove)

    def _save(self, folder: Path) -> None:
        """Write the fingerprint on each process, and the iteration on processes where Accelerate writes the model."""
        self._session.save_fingerprint(folder)
        accelerator = self._accelerator
        iteration = self._session.iteration if self._session.running else self._next_iteration
        on_each_node = accelerator.project_configuration.save_on_each_node
        if iteration is None or not (
            accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
        ):
            return
        path = folder / STATE_FILE
        try:
            state = {"iteration": iteration, "step_on": self._step_on, **self._session.resumed_loss.saved()}
            path.write_text(json.dumps(state), encoding="utf-8")
        except OSError as error:
            logger.warning(
                "The debug iteration cannot be saved: %s. Training continues. A resume from this checkpoint starts"
                " at iteration 0 unless start_step= is set.",
                error,
            )

    def _load(self, folder: Path) -> None:
        """Continue at the iteration of a checkpoint, and audit the resume.

        An iteration that was counted with a different ``step_on`` is ignored.
        """
        if self._session.running:
            self._session.load_fingerprint(folder)
        else:
            self._checkpoint = folder
        path = folder / STATE_FILE
        if self._options.start_step is not None or not path.exists():
            return
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            iteration = int(state["iteration"])
            step_on = state["step_on"]
            self._session.resumed_loss.restore(state)
            if step_on != self._step_on:
                raise ValueError(
                    f"it was counted with {step_on=}, so it is not restored with step_on={self._step_on!r}"
                )
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning(
                "%s has no debug iteration (%s: %s). The current count continues; set start_step= to change it.",
                path,
                type(error).__name__,
                error,
            )
            return
        if self._session.running:
            self._session.iteration = iteration
        else:
            self._next_iteration = iteration

    # ------------------------------------------------------------------ inside

    def _note_logged(self, values: Any, step: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(values, Mapping):
            self._session.log(values, step if isinstance(step, int) else None)


def _has_stepped(accelerator: Accelerator, model: Model) -> bool:
    """Return whether an optimizer of the model has a state. The accelerator also keeps optimizers of earlier models."""
    parameter_ids = set(map(id, parameters_of(model)))
    optimizers = [other for other in accelerator._optimizers if not parameter_ids.isdisjoint(held_ids(other))]
    entries = itertools.chain.from_iterable(getattr(other, "state", {}).values() for other in optimizers)
    # Most optimizers count steps in their state; some, such as Adagrad, create the state at step 0.
    return any(not isinstance(entry, Mapping) or float(entry.get("step", 1)) > 0 for entry in entries if entry)
