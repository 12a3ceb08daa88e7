"""The inspect session."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from te_precision_callbacks.base.errors import OptionError, SessionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.gemm_precision import Precision
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.options import SessionKeywords, SessionOptions, step_number
from te_precision_callbacks.overflow import DebugActivationOverflow
from te_precision_callbacks.runs.fingerprints import ResumeReport
from te_precision_callbacks.session.context import RunResults
from te_precision_callbacks.session.endings import stop_at_exit
from te_precision_callbacks.session.resume import ResumeAudit, ResumedLoss
from te_precision_callbacks.sinks.metrics import Worst
from te_precision_callbacks.sinks.step_records import LayerInfo, Row, Sink, StepRecords
from te_precision_callbacks.te.package import import_transformer_engine, warn_unless_supported

if TYPE_CHECKING:
    from te_precision_callbacks.session.run import Run

logger = logging.getLogger(__name__)

_SAVED = frozenset({"iteration", "fingerprint", "losses"})
"""Possible keys of :meth:`InspectSession.state_dict`."""

_live: InspectSession | None = None
"""The running session of this process; only one runs at a time."""


def running_session() -> InspectSession | None:
    """Return the running session of this process, or None.

    In a notebook, ``running_session().stop()`` ends a session that no variable refers to.
    """
    return _live


class InspectSession:
    """Precision debugging for a training loop.

    As a context manager, the session starts at once and observes until the end of the block::

        with InspectSession("config.yaml", model=model, log_dir="run") as session:
            for batch in loader:
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                session.step()

    Or call :meth:`start`, :meth:`attach` (when the model is complete), :meth:`step` and :meth:`stop`. Statistics go to
    the log file and to ``sinks``. After an error or an interrupt, so do this rank's statistics since the last step.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics of every Transformer Engine layer.
        model: the model; or several, as a list or as a mapping with prefixes of the layer names as keys.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`.

    Raises:
        ConfigError: the config cannot be used.
        OptionError: a keyword is unknown, or its value is invalid.
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        model: Model | None = None,
        **keywords: Unpack[SessionKeywords],
    ) -> None:
        self._begin(SessionOptions.from_keywords(config, **keywords), model)

    @classmethod
    def from_options(cls, options: SessionOptions, model: Model | None = None) -> InspectSession:
        """Create a session from options that were already checked."""
        session = cls.__new__(cls)
        session._begin(options, model)
        return session

    def _begin(self, options: SessionOptions, model: Model | None) -> None:
        if model is not None and named_roots(model) is None:
            raise OptionError(f"model= must be a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        self._options = options
        self._model = model
        self._run: Run | None = None
        self._resume_audit: ResumeAudit | None = None
        self._results = self._new_results(None)
        self._notices = Notices()
        self._resumed_loss = ResumedLoss()
        self._classify = ForwardClassifier(precision_features_in_eval=options.precision_features_in_eval)

    def _new_results(self, log_dir: Path | None) -> RunResults:
        folder = self._options.log_dir or log_dir or Path()
        # Absolute, since the script may change its directory. Only resolve() removes ".." after a link.
        folder = folder.resolve() if ".." in folder.parts else folder.absolute()
        return RunResults(folder, self._options.start_step or 0)

    # ------------------------------------------------------------------ state

    def __repr__(self) -> str:
        state = "not started"
        if self._results.started_at:
            state = "running" if self.running else "stopped"
        details = f"{self.iteration}, {len(self.layers)} layers, log_dir={str(self.log_dir)!r}"
        return f"<{type(self).__name__}: {state}, iteration {details}>"

    @property
    def running(self) -> bool:
        """True between start and stop."""
        return self._run is not None

    @property
    def iteration(self) -> int:
        """The current debug iteration, counted from 0; after the end, the first iteration that did not run."""
        if self._run is None:
            return self._results.iteration
        return self._run.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._running("iteration").count_from(step_number("The iteration of a session", value))

    @property
    def observing(self) -> bool:
        """True if forwards are observed; set it to False during evaluation.

        Forwards without gradients, or in eval mode, are never observed.
        """
        return not self._classify.paused

    @observing.setter
    def observing(self, value: bool) -> None:
        self._classify.paused = not value

    @property
    def overflow(self) -> DebugActivationOverflow | None:
        """The detector of ``debug="activation_overflow"``, from :meth:`attach` to :meth:`stop`; otherwise None."""
        if self._run is None:
            return None
        return self._run.overflow.detector

    @property
    def resumed_loss(self) -> ResumedLoss:
        """The last training losses, for a checkpoint without :meth:`state_dict`."""
        return self._resumed_loss

    @property
    def unconverted(self) -> Mapping[str, str]:
        """Name of a layer that a trainer did not convert to Transformer Engine -> reason; set by integrations."""
        return self._results.coverage.unconverted

    @unconverted.setter
    def unconverted(self, value: Mapping[str, str]) -> None:
        self._results.coverage.unconverted = dict(value)

    def expect_low_precision(self, why: str) -> None:
        """Record the setting that selects low precision, such as "Accelerate's mixed_precision is 'fp8'"."""
        self._results.expects_low = why

    def note_unobserved(self, text: str) -> None:
        """Record a part of the training that is not observed, for the verdict."""
        if self._run is not None:
            self._run.context.note_unobserved(text)

    def note_filtered_loss(self) -> None:
        """Record that the trainer filters inf and nan from the loss that it logs."""
        self._results.filters_loss = True

    # ------------------------------------------------------------------ results, during the run and after it

    @property
    def log_dir(self) -> Path:
        """The folder of the session's files."""
        return self._results.log_dir

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """All observable layers of the model, with their features."""
        return self._results.layers

    @property
    def precision(self) -> Precision:
        """The precision of each GEMM so far.

        ``session.precision(at=120)`` is for one iteration, and raises a LookupError if it has not run.
        """
        history = self._results.table.history
        return Precision(history.whole_run(), history.at)

    def coverage(self, at: int | None = None) -> Coverage:
        """Return all matrix products of a step: multiply-adds, precision, and the reason for high precision.

        If ranks reduce together, layers of other ranks, as in a pipeline, come last, as they ran in the first step.

        Args:
            at: a debug iteration; None for the last one.

        Raises:
            IterationError: a LookupError: the iteration has not run in this session.
        """
        return self._results.coverage_with_other_ranks(at)

    @property
    def resume_report(self) -> ResumeReport | None:
        """Differences of a resumed run from its checkpoint; None before the first step, and without a fingerprint."""
        return self._results.resume

    @property
    def findings(self) -> Verdict:
        """The findings so far, root causes first; ``te-precision rules`` explains them.

        After the end of a resumed run, they cover the whole recorded run.
        """
        return self._results.findings

    @property
    def healthy(self) -> bool:
        """Return whether no problems were found and enough was checked; ``findings.state`` has three states."""
        return self.findings.healthy

    @property
    def problem_count(self) -> int:
        """The number of errors and warnings among the findings so far, cheap enough for every step."""
        return sum(self._results.diagnosis.problems.values())

    @property
    def last_statistics(self) -> tuple[Row, ...]:
        """The last value of each statistic."""
        return tuple(self._results.statistics.last())

    @property
    def worst_statistics(self) -> tuple[Worst, ...]:
        """The worst value of each statistic that has a worse direction (docs/statistics.md), with its iteration.

        Excludes the first step of delayed scaling, see ``StepRecords.unscaled``.
        """
        return tuple(self._results.statistics.worst())

    # ------------------------------------------------------------------ start, attach, step, stop

    def start(
        self,
        *,
        log_dir: Path | None = None,
        sinks: Iterable[Sink] = (),
        counts_from: int = 0,
        integration: str = "session",
        eval_mode_counts: bool = True,
        gives_way: bool = False,
    ) -> InspectSession:
        """Start nvidia-dlfw-inspect with all features; nothing is observed before :meth:`attach`.

        Args:
            log_dir: the folder for logs, unless the options have one.
            sinks: receivers of records, called before the sinks of the options.
            counts_from: the logging step of iteration 0, unless :meth:`step` is called with a logging step.
            integration: the integration that starts the session, for the records.
            eval_mode_counts: whether modules in eval mode count as evaluation.
            gives_way: whether the start of another session stops this one, instead of raising an error.

        Raises:
            SessionError: a session already runs in this process, or the log folder is not writable.
            TransformerEngineUnavailableError: Transformer Engine cannot be imported.
            FeatureLoadError: a feature could not be loaded.
        """
        global _live
        if self.running:
            raise SessionError("This session is already running. Call stop() first, or create a new session.")
        other = _live
        if other is not None and other._results.gives_way:
            other.stop()
        elif other is not None:
            raise SessionError(
                f"Another session is running, started at {other._results.started_at}, but a process can have only"
                " one. Stop it first, for example with te_precision_callbacks.session.running_session().stop()."
            )
        import_transformer_engine()
        warn_unless_supported()
        from te_precision_callbacks.session.run import Run  # imports what it replaces

        results = self._new_results(log_dir)
        results.started_at = _place_in_script()
        results.counts_from = counts_from
        results.integration = integration
        results.gives_way = gives_way
        self._results = results
        self._classify.eval_mode_counts = eval_mode_counts
        run = Run(self._options, sinks, results, self._classify)
        self._run = run
        self._resume_audit = run.resume_audit
        _live = self
        try:
            run.start(stop_at_exit(self.stop))
            if self._model is not None:
                self.attach(self._model)
        except BaseException as error:
            self.stop(error)
            raise
        return self

    def attach(self, model: Model) -> None:
        """Name the Transformer Engine modules of ``model`` and start observing them.

        Call this when the model is complete, and again if modules were added or replaced. If statistics are reduced,
        call it on all ranks, at a point where no rank waits for another (in a pipeline: before the first schedule).
        Ranks may have different layers; a section must match a layer on at least one rank.

        Raises:
            ConfigError: a section matches no layer, a feature is unknown, a layer gets the same feature from two
                sections, or the ranks have different configs. Raised on all ranks.
            SessionError: the session is not running, attaching failed on another rank, or iterations differ.
        """
        self._running("attach()").attach(model)

    def step(self, logging_step: int | None = None) -> StepRecords | None:
        """End a debug iteration: reduce its statistics, and send them to the sinks.

        Call this after the optimizer's step, on all ranks. Ctrl-C is handled after the step; a second one
        interrupts it, for example while it waits for other ranks. A no-op in a forked process.

        Args:
            logging_step: the logging step of the records. None: the debug iteration plus ``counts_from``.

        Returns:
            The records of the iteration, if any.

        Raises:
            SessionError: the session is not running, or has no model.
            OptionError: ``logging_step`` is not a whole number from 0 on.
            ObservationError: with ``strict=True``, a statistic or a sink failed; otherwise reported once.
            ResumeAuditError: with ``strict=True``, a resume has not restored the state of the checkpoint.
            PrecisionContractError: the contract of ``require=`` is broken, whose ``on_broken`` is "raise".
            ActivationOverflowError: with ``debug="activation_overflow"``, an inf or nan occurred since the last check.
            DetectionFailedError: with ``debug="activation_overflow"``, the detection has failed.
        """
        run = self._running("step()")
        if logging_step is not None:
            logging_step = step_number("logging_step=", logging_step)
        if not run.model.attached:
            raise SessionError("step(): the session has no model. Call attach(model) first, or pass model=.")
        return run.step(logging_step)

    def log(self, scalars: Mapping[str, Any], logging_step: int | None = None) -> None:
        """Record scalars of the training, such as loss, gradient norm, learning rate and loss scale.

        Call this before :meth:`step`, or after it with the ``logging_step`` of that step. The scalars are not sent to
        the trainer's loggers. Without a running session, it only warns, once.

        Args:
            scalars: name -> number or one-element tensor, which is copied to the host later; others are skipped, with
                a warning. Reports and comparisons use ``loss``, ``grad_norm``, ``lr`` and ``loss_scale``.
            logging_step: the logging step of the scalars. None: the step of the current iteration.

        Raises:
            OptionError: ``logging_step`` is not a whole number from 0 on, or ``scalars`` is not a mapping.
        """
        if logging_step is not None:
            logging_step = step_number("logging_step=", logging_step)
        if not isinstance(scalars, Mapping):
            raise OptionError(f"log() takes a mapping of names to numbers, such as {{'loss': loss}}, not {scalars!r}.")
        run = self._run
        if run is None:
            if self._notices.first("log"):
                logger.warning("log(): the session is not running, so nothing is recorded. Call it before stop().")
        elif not run.is_forked:
            run.log(scalars, logging_step)
            self._resumed_loss.note(scalars)
            run.restore_losses(self._resumed_loss.take_restored(scalars))

    def follow(self, owner: Any, name: str = "loss", *, total: bool = False) -> None:
        """Record the loss that is passed to ``owner.backward(loss)``, averaged over the micro-batches of a step.

        Ends at :meth:`stop`. If the script passes ``name`` to :meth:`log`, only that value is recorded.

        Args:
            owner: the Accelerator, or Fabric.
            name: the name of the recorded loss.
            total: record the sum over the micro-batches instead of the mean.
        """
        self._running("follow()").trainer_scalars.follow(owner, name, total=total)

    def stop(self, error: BaseException | None = None, logging_step: int | None = None) -> None:
        """End the session, and undo all of its changes. A no-op if the session is not running.

        This rank's statistics since the last step are written as local values, without a collective.

        Args:
            error: the exception that ended the run.
            logging_step: the logging step of these statistics. None: the step after the last one; in a run without a
                step, the default of :meth:`step`.
        """
        global _live
        run = self._run
        if run is None or run.is_forked:
            return
        try:
            run.stop(error, logging_step)
        finally:
            if not run.live:  # otherwise Ctrl-C came before anything was undone, and stop() may be called again
                self._run = _live = None

    def flush(self, seconds: float = 3.0) -> bool:
        """Write the statistics log and the records of all complete steps now, instead of every two seconds.

        Signal handlers may call this: it runs no collective, and does not copy from a device.

        Args:
            seconds: the timeout.

        Returns:
            Whether everything was written in time; True without a running session, and in a forked process.
        """
        run = self._run
        return run is None or run.is_forked or run.flush(seconds)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, *, file: str = "") -> dict[str, Any]:
        """Return the session's state for a checkpoint. Call this when the model's state is saved.

        Keys: ``iteration``; ``fingerprint``, a text about this rank's training state, unless no Transformer Engine
        layer is attached; and ``losses``, the last 20 training losses. May be called on any rank, also after
        :meth:`stop`.

        Args:
            file: the file or folder of the checkpoint, so that findings do not name a checkpoint that was deleted.

        Raises:
            ObservationError: with ``strict=True``, the fingerprint could not be taken.
        """
        state: dict[str, Any] = {"iteration": self.iteration, **self._resumed_loss.saved()}
        self._note_checkpoint(file)
        fingerprint = None if self._resume_audit is None else self._resume_audit.take(self.iteration)
        if fingerprint is not None:
            state["fingerprint"] = fingerprint.to_text()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the iteration of a checkpoint, and audit the resume in the first step.

        Call this before the first forward, and before or after the model is restored. ``start_step=`` overrides the
        iteration. Missing keys change nothing.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            SessionError: the session is not running, or ``state`` is not from :meth:`state_dict`.
            OptionError: the iteration in ``state`` is not a whole number from 0 on.
            FingerprintError: with ``strict=True``, the fingerprint cannot be read.
        """
        run = self._running("load_state_dict()")
        if not isinstance(state, Mapping) or (state and not state.keys() & _SAVED):
            found_instead = f"keys {', '.join(map(repr, state))}" if isinstance(state, Mapping) else repr(state)
            raise SessionError(f"load_state_dict() takes a result of state_dict(), not {found_instead}.")
        if "iteration" in state and self._options.start_step is None:
            run.count_from(step_number("load_state_dict(): the iteration", state["iteration"]))
        self._resumed_loss.restore(state)
        if "fingerprint" in state:
            run.resume_audit.expect(str(state["fingerprint"]))

    def save_fingerprint(self, folder: Path) -> None:
        """Write this rank's fingerprint into the folder of a checkpoint. Call this on every rank.

        Raises:
            ObservationError: with ``strict=True``, the fingerprint could not be taken or written.
        """
        if self._resume_audit is not None:
            self._note_checkpoint(str(folder))
            self._resume_audit.save(folder, self.iteration)

    def load_fingerprint(self, folder: Path) -> None:
        """Audit a resume, as :meth:`load_state_dict` does, if the folder of the checkpoint has a fingerprint.

        Raises:
            SessionError: the session is not running.
            FingerprintError: with ``strict=True``, a fingerprint cannot be read.
        """
        self._running("load_fingerprint()").resume_audit.expect(folder)

    def _note_checkpoint(self, file: str) -> None:
        if self._run is not None:
            self._run.note_checkpoint(os.path.abspath(file) if file and "://" not in file else file)

    def __enter__(self) -> InspectSession:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    # ------------------------------------------------------------------ internals

    def _running(self, what: str) -> Run:
        if self._run is None:
            raise SessionError(
                f"{what}: the session is not running. Call start() first, or use 'with InspectSession(...)'."
            )
        return self._run


def _place_in_script() -> str:
    """Return file and line of the innermost frame outside this package and installed packages."""
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(package) and "site-packages" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
