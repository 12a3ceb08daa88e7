"""The inspect session."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import sys
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import Unpack

from te_precision_callbacks.config.comparing import flat_config
from te_precision_callbacks.config.dumping import check_conditions
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.config.planning import NamespacedFeatures, Plan, Section, resolve_features
from te_precision_callbacks.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.dumps.files import SAFETENSORS
from te_precision_callbacks.dumps.recording import RECORDER
from te_precision_callbacks.engine.reduction import is_distributed
from te_precision_callbacks.forwards import ForwardClassifier
from te_precision_callbacks.naming import (
    Layer,
    Model,
    ModuleTree,
    NamedModule,
    by_given_name,
    different_at_one_path,
    named_roots,
    named_te_modules,
)
from te_precision_callbacks.options import SessionKeywords, SessionOptions
from te_precision_callbacks.records.model import LayerInfo, Row, RunInfo, Sink, StepRecords
from te_precision_callbacks.records.precision import GemmPrecision
from te_precision_callbacks.records.statistics_log import StatisticsLog
from te_precision_callbacks.records.worst import RunStatistics, Worst
from te_precision_callbacks.session.delayed_scaling import DelayedScalingLayers
from te_precision_callbacks.session.errors import ObservationError, SessionError
from te_precision_callbacks.session.failures import ObservationFailures
from te_precision_callbacks.session.forward import MOST_FORWARDS, ForwardHooks
from te_precision_callbacks.session.parallel import OptimizerSteps, Ranks, placements
from te_precision_callbacks.session.precision import PrecisionAudit
from te_precision_callbacks.session.refusals import DebugRefusal, RefusedLayers
from te_precision_callbacks.session.shapes import explain_shape
from te_precision_callbacks.session.signals import Termination, Uninterrupted
from te_precision_callbacks.session.sinks import Sinks
from te_precision_callbacks.session.uncaught import Uncaught
from te_precision_callbacks.session.upstream import (
    Inspector,
    import_transformer_engine,
    warn_unless_supported,
)
from te_precision_callbacks.statistics.series import Measured, SeriesTable, parsed_log_name

if TYPE_CHECKING:
    from te_precision_callbacks.debug_utils import DebugActivationOverflow

logger = logging.getLogger(__name__)

_VERSIONED = ("torch", "transformer_engine", "nvdlfw_inspect", "te-precision-callbacks")


_last_started: weakref.ref[InspectSession] | None = None
_kept: InspectSession | None = None
"""The session that has ended and left its features that change precision in place; there is one at a time."""


def running_session() -> InspectSession | None:
    """The session that is running in this process, of whichever front door; there is one at a time.

    In a notebook, ``running_session().stop()`` ends one that nothing else refers to any more.
    """
    session = None if _last_started is None else _last_started()
    return session if session is not None and session.running else None


class InspectSession:
    """Precision debugging for a training loop.

    As a context manager, it starts at once and observes from there to the end of the block::

        with InspectSession("config.yaml", model=model, log_dir="run") as session:
            for batch in loader:
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                session.step()

    Or in pieces: :meth:`start`, :meth:`attach` (when the model is complete), :meth:`step`, :meth:`stop`. The modules
    may be built before or after the start. Statistics go to the log file and to ``sinks``; after an error or an
    interrupt, what was gathered since the last step is written too, from this rank's own data.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        model: the model; or several, as a list or as a mapping whose keys their layers' names begin with. None: give it
            to :meth:`attach` later.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`.

    Raises:
        ConfigError: the config cannot be used.
        OptionError: an unknown keyword, or a value that it does not take.
    """

    def __init__(
        self,
        config: ConfigSource = None,
        *,
        model: Model | None = None,
        **keywords: Unpack[SessionKeywords],
    ) -> None:
        self._setup(SessionOptions.from_keywords(config, **keywords), model)

    @classmethod
    def from_options(cls, options: SessionOptions, model: Model | None = None) -> InspectSession:
        """A session with options that were checked before."""
        session = cls.__new__(cls)
        session._setup(options, model)
        return session

    def _setup(self, options: SessionOptions, model: Model | None) -> None:
        self._options = options
        self._model = model
        self._log_dir = options.log_dir or Path()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._world_size = torch.distributed.get_world_size() if distributed else 1
        self._reduces = options.reduce and is_distributed(options.process_group)
        self._failures = ObservationFailures(strict=options.strict, rank=self._rank)
        self._audit = PrecisionAudit()
        self._classify = ForwardClassifier(precision_features_in_eval=options.precision_features_in_eval)
        self._hooks = ForwardHooks(self._classify, self._failures, self._audit)
        self._inspector: Inspector | None = None
        self._left_in_place: Inspector | None = None
        self._changed_precision = False
        self._modules: tuple[NamedModule, ...] = ()
        self._layer_names: frozenset[str] = frozenset()
        self._by_number = False
        self._refused = RefusedLayers(strict=options.strict)
        self._sinks = Sinks((), self._failures)
        self._at_exit: Finalize | None = None
        self._overflow: DebugActivationOverflow | None = None
        self._overflow_reports = 0
        self._watched_model: object = None
        self._model_attached: Model = ()
        self._tree: ModuleTree | None = None
        self._layers_of_all: tuple[Layer, ...] = ()
        self._given_names: dict[str, str] = {}
        self._trainer_steps = False
        self._said: set[str] = set()
        self._optimizer_steps: OptimizerSteps | None = None
        self._attached = False
        self._gathered = _Gathered()
        self._ending: _Ending | None = None
        self._layers: tuple[LayerInfo, ...] = ()
        self._unconverted: Mapping[str, str] = {}
        self._series = SeriesTable()
        self._statistics = RunStatistics(self._series)
        self._delayed_scaling = DelayedScalingLayers()
        self._final_iteration = options.start_step or 0
        self._last_logging_step: int | None = None
        self._owner_has_left: Callable[[], bool] | None = None
        self._started_at = ""
        self._process = os.getpid()
        self._termination: Termination | None = None
        self._uncaught: Uncaught | None = None
        self._classify.abandoned = self._is_abandoned
        self._hooks.on_many_forwards = self._say_forgotten
        self._hooks.on_renamed = self._say_renamed
        self._hooks.on_refusal = self._note_refusal

    # ------------------------------------------------------------------ what a session is, for those who look at it

    def __repr__(self) -> str:
        ended = "stopped" if self._left_in_place is None else "stopped with its precision kept"
        state = "running" if self.running else ended if self._started_at else "not started"
        at = f"{self.iteration}, {len(self._layers)} layers, log_dir={str(self._log_dir)!r}"
        return f"<{type(self).__name__}: {state}, iteration {at}>"

    @property
    def running(self) -> bool:
        """Whether the session was started and not stopped."""
        return self._inspector is not None

    @property
    def iteration(self) -> int:
        """The debug iteration: 0-based, the one that is gathering now. After the end, the first that was not run."""
        return self._final_iteration if self._inspector is None else self._inspector.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        inspector = self._running("iteration")
        inspector.iteration = value
        self._hooks.arm()

    @property
    def observing(self) -> bool:
        """Whether forwards are observed at all. A loop sets it to False for an evaluation; forwards without gradients,
        or of modules in eval mode, are not observed in any case."""
        return not self._classify.paused

    @observing.setter
    def observing(self, value: bool) -> None:
        self._classify.paused = not value

    @property
    def eval_mode_counts(self) -> bool:
        """Whether modules in eval mode are taken as being evaluated. A loop that sets ``observing`` may turn it off."""
        return self._classify.eval_mode_counts

    @eval_mode_counts.setter
    def eval_mode_counts(self, value: bool) -> None:
        self._classify.eval_mode_counts = value

    @property
    def trainer_steps(self) -> bool:
        """Whether a trainer calls :meth:`step`, so that nobody can forget it. Where a loop calls it, 100 training
        forwards of one module without a step get one warning."""
        return self._trainer_steps

    @trainer_steps.setter
    def trainer_steps(self, value: bool) -> None:
        self._trainer_steps = value

    @property
    def abandoned(self) -> Callable[[], bool] | None:
        """Tells whether the loop that started the session has ended without stopping it: then forwards run as without a
        session. It is asked in each forward of a watched module; None where a loop stops its session in any case."""
        return self._owner_has_left

    @abandoned.setter
    def abandoned(self, value: Callable[[], bool] | None) -> None:
        self._owner_has_left = value
        if self._overflow is not None:
            self._overflow.abandoned = value

    def _is_abandoned(self) -> bool:
        if self._left_in_place is not None:
            return self._left_in_place.ended
        inspector, has_left = self._inspector, self._owner_has_left
        return inspector is None or inspector.ended or self._is_forked or (has_left is not None and has_left())

    @property
    def overflow(self) -> DebugActivationOverflow | None:
        """What looks for inf and nan with ``debug="activation_overflow"``, from :meth:`attach` to :meth:`stop`."""
        return self._overflow

    @property
    def log_dir(self) -> Path:
        """Where the session writes."""
        return self._log_dir

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """Every layer of the model that can be observed, and what the config does with it."""
        return self._layers

    @property
    def unconverted(self) -> Mapping[str, str]:
        """Layers that a trainer left without Transformer Engine, name -> why. A front door sets it after the start."""
        return self._unconverted

    @unconverted.setter
    def unconverted(self, value: Mapping[str, str]) -> None:
        self._unconverted = dict(value)

    @property
    def precision(self) -> tuple[GemmPrecision, ...]:
        """The precision that each GEMM really ran in, so far."""
        return tuple(self._audit)

    @property
    def last_statistics(self) -> tuple[Row, ...]:
        """The last value of each statistic."""
        return tuple(self._statistics.last())

    @property
    def worst_statistics(self) -> tuple[Worst, ...]:
        """The worst value of each statistic so far, and the iteration in which it was: of those with a worse direction
        in the table of docs/statistics.md. Delayed scaling's first step is left out, see ``StepRecords.unscaled``."""
        return tuple(self._statistics.worst())

    # ------------------------------------------------------------------ the life of a session

    def start(
        self, *, log_dir: Path | None = None, sinks: Iterable[Sink] = (), stop_at_sigterm: bool = True
    ) -> InspectSession:
        """Start nvidia-dlfw-inspect with all features; nothing is observed before :meth:`attach`.

        Args:
            log_dir: where logs go, where the options name no folder.
            sinks: receivers of records, before those of the options.
            stop_at_sigterm: stop before SIGTERM ends the process, where the script has set no handler for it.

        Raises:
            SessionError: a session is running already in this process, or nothing can be written to the log folder.
            TransformerEngineUnavailableError: Transformer Engine cannot be imported.
            FeatureLoadError: a feature could not be loaded.
        """
        if self._inspector is not None:
            raise SessionError("This session is running already. Call stop() before start(), or make another one.")
        if _kept is not None:
            _kept.release()
        other = running_session()
        if other is not None:
            raise SessionError(
                f"Another session is running, started at {other._started_at}; in a process there is one at a time. Stop"
                " that one first; where nothing refers to it any more, with"
                " te_precision_callbacks.session.running_session().stop()."
            )
        model = self._model
        self._setup(self._options, model)  # afresh: with the rank of now, and nothing of an earlier run
        import_transformer_engine()
        warn_unless_supported()
        self._log_dir = self._options.log_dir or log_dir or Path()
        inspector = Inspector(
            log_dir=self._log_dir,
            feature_dirs=self._options.feature_dirs,
            features=self._options.features,
            process_group=self._options.process_group,
            reduce=self._options.reduce,
            receive=self._receive,
            receive_statistics=self._receive_statistics,
            series=self._series,
            report=self._failures.report,
            before_end=self._before_script_ends,
        )
        global _last_started
        _last_started = weakref.ref(self)
        self._started_at = _place_in_script()
        self._inspector = inspector
        self._sinks = Sinks([*self._statistics_logs(), *sinks, *self._options.sinks], self._failures)
        try:
            inspector.start(self._rank)
            self._hooks.install()
            RECORDER.start(
                self._log_dir,
                file_format=SAFETENSORS,
                report=self._failures.report,
                detects_overflow=ACTIVATION_OVERFLOW in self._options.debug,
            )
            # Runs also at the end of a spawned process, which calls no atexit function, and whose trainer no hook.
            self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=100)
            if stop_at_sigterm:
                self._termination = Termination(
                    lambda: self._stop_before_the_end(
                        SessionError("The process was ended by SIGTERM while the session was running.")
                    )
                )
            self._uncaught = Uncaught(self._stop_before_the_end)
            inspector.iteration = self._options.start_step or 0
            if model is not None:
                self.attach(model)
        except BaseException as error:
            self.stop(error)
            raise
        return self

    def attach(self, model: Model) -> None:
        """Name the Transformer Engine modules of ``model`` and begin to observe them.

        Call it when the model is complete, and again if modules were replaced since; where statistics are reduced, on
        all ranks, at a place where none waits for another (in a pipeline: before the first schedule). They may have
        different layers, and a section must match one on any of them.

        Raises:
            ConfigError: a section that matches no layer, an unknown feature, one feature from two sections in a layer;
                on all ranks, if on one. The ranks have different configs.
            SessionError: the session is not running, attaching failed on another rank, or the ranks are in different
                iterations.
        """
        inspector = self._running("attach()")
        options = self._options
        ranks = Ranks(options.process_group, reduce=options.reduce)
        self._reduces = ranks.several
        with ranks.meeting():
            layers = ranks.together(lambda: self._find_layers(inspector, model))
        layers_of_all = ranks.pool(layers)
        if alike := different_at_one_path(layers_of_all):
            self._name_by_number(alike)
            layers = ranks.together(lambda: self._find_layers(inspector, model))
            layers_of_all = ranks.pool(layers)
        plan, sections = ranks.together(lambda: self._plan(inspector, model, layers, layers_of_all))
        config = {"layer_names": repr(options.layer_names), **flat_config(options.config.enabled_sections, sections)}
        ranks.require_alike(config, inspector.iteration)
        self._take_names(layers_of_all, plan)
        if ranks.several and self._optimizer_steps is None:
            self._optimizer_steps = OptimizerSteps()
            inspector.count_optimizer_steps(self._optimizer_steps)
        if not options.config.enabled_sections:
            logger.warning("The config (%s) has no enabled section, so nothing is done.", self._config_source)
        for section, features in zip(options.config.enabled_sections, sections, strict=True):
            _warn_if_idle(section, features)
        if not layers_of_all:
            watched = ACTIVATION_OVERFLOW in options.debug
            logger.warning(
                "The model has no Transformer Engine layer with GEMMs (Linear, LayerNormLinear, LayerNormMLP,"
                " GroupedLinear), so there are no statistics. Training goes on %s.",
                "with activation overflow detection alone" if watched else "without precision debugging",
            )
        self._observe(inspector, layers, plan, sections)
        self._model_attached, self._tree = model, ModuleTree(model)
        self._attached = True
        self._watch_for_overflow(model)

    def step(self, logging_step: int | None = None) -> StepRecords | None:
        """End a debug iteration: after the optimizer's step, on all ranks. Statistics are reduced and handed to sinks.

        A step that is interrupted, by Ctrl-C, is completed by the next one or by :meth:`stop`, with the numbers of this
        rank where it had not reduced them. In a process that was forked from the session's it does nothing.

        Args:
            logging_step: the step under which the records are logged; the debug iteration where None.

        Returns:
            The records of the iteration, None where there are none.

        Raises:
            SessionError: the session is not running, or has no model.
            ObservationError: with ``strict=True``, a failure in a statistic or a sink.
            ActivationOverflowError: with ``debug="activation_overflow"``, an inf or nan since the last look.
        """
        inspector = self._running("step()")
        if not self._attached:
            raise SessionError("step(): the session has no model. Call attach(model) first, or give it model=.")
        if self._overflow is not None:
            self._overflow.look()
        if self._is_forked:
            self._say_forked()
            return None
        if inspector.ended:
            self._say_ended()
            return None
        if self._ending is not None:
            self._hand_over(self._ending)
        iteration = inspector.iteration
        self._ending = ending = _Ending(iteration, iteration if logging_step is None else logging_step)
        try:
            return self._end(inspector, ending)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the step counts, and the sinks get what is left of it in the next call
            inspector.iteration = ending.iteration + 1
            self._hooks.arm()
            self._take(inspector, ending)
            raise

    def _end(self, inspector: Inspector, ending: _Ending) -> StepRecords | None:
        self._say_refused(inspector)
        self._start_sinks()  # with the iteration at which the run begins
        try:
            inspector.step()
        except Exception as error:
            self._failures.report("gathering the statistics of", f"iteration {ending.iteration}", error)
            self._gather_local(inspector, ending)
        self._hooks.begin(inspector.iteration)
        self._follow_model(inspector)
        try:
            return self._hand_over(ending)
        finally:
            self._note_overflow(self._overflow)
            RECORDER.end_step()

    def stop(self, error: BaseException | None = None, logging_step: int | None = None) -> None:
        """End the session and put back everything that it changed. Does nothing where it is not running.

        With ``keep_precision=True`` and no error the features that change precision stay: see :meth:`release`.

        Args:
            error: what ended the run. What was gathered since the last step is written from this rank's own data in
                any case, without a collective.
            logging_step: the step under which that is logged. None: the one after the last, or the debug iteration.
        """
        inspector = self._inspector
        if inspector is None or self._is_forked:
            return
        explain_shape(error or sys.exc_info()[1], self._modules)
        keeps = self._options.keep_precision and error is None and self._changed_precision and not inspector.ended
        with Uninterrupted(self._termination) as guard, ExitStack() as then:
            # What is in the stack runs from its end, whatever fails.
            then.callback(self._failures.summarize)
            then.callback(self._close_dumps, self._overflow, error, guard)
            then.callback(self._put_back, inspector, keeps=keeps)
            then.callback(self._write_summary)
            then.callback(self._close_sinks, error, guard)
            if self._attached:
                self._say_refused(inspector)
                self._write_remainder(inspector, logging_step, guard)

    def _put_back(self, inspector: Inspector, *, keeps: bool) -> None:
        """Everything that the session changed in the process; with ``keeps``, but for the features that stay."""
        with ExitStack() as then:
            if keeps:
                then.callback(self._keep, inspector)
            else:
                then.callback(inspector.stop)
                then.callback(self._hooks.remove)
                if self._at_exit is not None:
                    then.callback(self._at_exit.cancel)
            if self._uncaught is not None:
                then.callback(self._uncaught.remove)
            if self._optimizer_steps is not None:
                then.callback(self._optimizer_steps.remove)
            self._final_iteration = self._completed(inspector)
            self._overflow = self._watched_model = None
            self._modules = ()
            self._model_attached, self._tree = (), None
            self._inspector = None

    def release(self) -> None:
        """End what ``keep_precision=True`` has left in place after :meth:`stop`: the model runs as without a session.

        Does nothing where nothing was left. The next session, of whatever front door, does it when it starts, and so
        does the end of the process.
        """
        global _kept
        inspector, self._left_in_place = self._left_in_place, None
        if inspector is None:
            return
        if _kept is self:
            _kept = None
        try:
            if self._at_exit is not None:
                self._at_exit.cancel()
            self._hooks.remove()
        finally:
            inspector.stop()

    def _keep(self, inspector: Inspector) -> None:
        global _kept
        _kept, self._left_in_place = self, inspector
        self._hooks.keep()

    def tell_of_evaluation(self, what: str) -> None:
        """Say once, where the session has ended, that the features that changed precision do not act any more.

        Args:
            what: the evaluation that begins now.
        """
        ended = not self.running and self._left_in_place is None
        if ended and self._changed_precision and self._rank == 0 and self._first_time("evaluation"):
            logger.warning(
                "%s runs without the features that changed precision in training: they ended with its session, so that"
                " an evaluation during training gives something else. keep_precision=True keeps them until release().",
                what,
            )

    def __enter__(self) -> InspectSession:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    # ------------------------------------------------------------------ inside

    def _statistics_logs(self) -> list[StatisticsLog]:
        """The statistics log of this rank, if it has one."""
        which, group = self._options.statistics_log, self._options.process_group
        if which == "off":
            return []
        another_writes = which == "rank0" and self._reduces and torch.distributed.get_rank(group) != 0
        return [StatisticsLog(own_only=another_writes, given_names=self._given_names)]

    @property
    def _is_forked(self) -> bool:
        """Whether this is another process than the one that the session was started in, whose files are that one's."""
        return os.getpid() != self._process

    def _say_forked(self) -> None:
        if self._first_time("forked"):
            logger.warning(
                "step(): this process was forked from the one that the session was started in. Nothing is observed"
                " here: its logs are that process's. Start a session of its own after the fork."
            )

    def _stop_before_the_end(self, error: BaseException) -> None:
        """Stop where the process is going to end of something: what fails here must not hide it."""
        try:
            self.stop(error)
        except Exception as failure:
            logger.error("The session could not be stopped after %s.", type(error).__name__, exc_info=failure)

    def _stop_at_exit(self) -> None:
        self.release()
        self.stop(SessionError("The process ended while the session was running."))

    def _close_sinks(self, error: BaseException | None, guard: Uninterrupted) -> None:
        try:
            with guard.interruptible():
                self._sinks.close(error)
        except KeyboardInterrupt:  # once more for those that are left, so that it takes two to leave a file open
            with guard.interruptible():
                self._sinks.close(error)
            raise

    def _close_dumps(
        self, overflow: DebugActivationOverflow | None, error: BaseException | None, guard: Uninterrupted
    ) -> None:
        """Take the detector's last look, which may find one more overflow and raise it, and have all dumps written."""
        try:
            if overflow is not None:
                overflow.close(error)
        finally:
            self._note_overflow(overflow)
            with guard.interruptible():
                RECORDER.close()

    def _write_summary(self) -> None:
        """Write what a terminal is shown into the log folder, on one rank."""
        if self._rank != 0 or not self._attached:
            return
        from te_precision_callbacks.summary import write_summary

        try:
            write_summary(self)
        except Exception as error:
            with suppress(ObservationError):
                self._failures.report("writing", "the summary", error)

    def _note_overflow(self, overflow: DebugActivationOverflow | None) -> None:
        """Tell the recorder of dumps whether the detector has reported since it was told last."""
        if overflow is not None:
            RECORDER.overflowed = overflow.reports > self._overflow_reports
            self._overflow_reports = overflow.reports

    def _before_script_ends(self) -> None:
        """Take what was gathered since the last step, which ends with upstream; :meth:`stop` writes it."""
        if self._inspector is not None and not self._is_forked:
            self._say_ended()
            self._inspector.log_local_statistics()

    def _say_renamed(self, name: str, other: str) -> None:
        if self._rank == 0 and self._first_time("renamed"):
            logger.warning(
                "The script has given another name to a layer while the session is running: %s was %r. It has the"
                " session's name again, and nothing of it was lost. Names that are given before attach() select layers,"
                " and layer_names='upstream' gives those of nvidia-dlfw-inspect's infer_and_assign_layer_names.",
                name,
                other,
            )

    def _say_ended(self) -> None:
        if self._first_time("ended"):
            logger.error(
                "The script has called debug_api.end_debug() while the session was running, so nothing is observed any"
                " more. Training goes on. Leave initialize, step and end_debug to the session."
            )

    def _first_time(self, what: str) -> bool:
        """Whether something has not been said yet in this run."""
        first = what not in self._said
        self._said.add(what)
        return first

    def _say_forgotten(self, module: torch.nn.Module) -> None:
        if not self._trainer_steps and self._rank == 0 and self._first_time("forgotten"):
            logger.warning(
                "%s has run %d forwards in training without a step(). A debug iteration lasts from step() to step(),"
                " called after each step of the optimizer: without it every forward belongs to iteration %d, and no"
                " statistics are logged. Where so many micro-batches are accumulated for one step of the optimizer,"
                " nothing is wrong.",
                module.name,
                MOST_FORWARDS,
                self.iteration,
            )

    def in_accumulation(self) -> None:
        """Say that a batch has ended which is no step of its own, for a loop that will call :meth:`step` later."""
        self._hooks.forget_forwards()

    def _observe(
        self, inspector: Inspector, layers: Sequence[Layer], plan: Plan, sections: Sequence[NamespacedFeatures]
    ) -> None:
        """Name and watch this rank's modules; without a collective."""
        self._layers = _layer_infos(layers, plan, self._given_names, self._refused)
        inspector.configure(plan.as_inspect_config(), self._config_source, sections)
        self._changed_precision |= any(inspector.changes_precision(entry.features) for entry in plan.layers)
        inspector.place(placements(self._modules, self._options.process_group), self._failures.report)
        for module in self._modules:
            inspector.name_module(module.module, module.name)
            inspector.log(f"Assigned layer name: {module.name}")
        self._hooks.watch(self._modules, self._refused.modules)
        self._say_refused(inspector)

    def _note_refusal(self, module: torch.nn.Module, refusal: DebugRefusal) -> None:
        """Take note of a forward that is left as it is."""
        names = {layer.name for named in self._modules if named.module is module for layer in named.layers}
        self._refused.note([info.name for info in self._layers if info.name in names and info.features], refusal)

    def _say_refused(self, inspector: Inspector) -> None:
        """Name the layers that are left as they are since the last call."""
        if self._refused.say(inspector.log):
            self._layers = tuple(replace(info, refused=self._refused.why(info.name)) for info in self._layers)

    def _follow_model(self, inspector: Inspector) -> None:
        """Watch what has come into the model since the last step, and say what trains outside of it.

        Without a collective, since other ranks may have nothing new: a section matches if it did when all attached.
        """
        if self._tree is not None and self._tree.changed():
            before = {id(module.module): module.name for module in self._modules}
            try:
                layers = self._find_layers(inspector, self._model_attached)
                layers_of_all = [*dict.fromkeys([*self._layers_of_all, *layers])]
                plan, sections = self._plan(inspector, self._model_attached, layers, layers_of_all)
                self._take_names(layers_of_all, plan)
                self._observe(inspector, layers, plan, sections)
            except ObservationError:
                raise
            except Exception as error:
                self._failures.report("following", "the changed model", error)
            self._tree = ModuleTree(self._model_attached)
            self._say_changed(before, inspector.iteration)
        elif self._hooks.unwatched and self._first_time("unwatched"):
            logger.warning(
                "%s trains outside of the model that the session was given, so nothing watches it. A module is found"
                " as an attribute of another one or in a torch.nn.ModuleList or ModuleDict, not in a plain list or"
                " dict. model= also takes several models.",
                ", ".join(sorted(f"{type(module).__name__} {module.name!r}" for module in self._hooks.unwatched)),
            )

    def _say_changed(self, before: dict[int, str], iteration: int) -> None:
        now = {id(module.module): module.name for module in self._modules}
        news = [f"{name} is new" for key, name in now.items() if key not in before]
        news += [f"{before[key]} is now {name}" for key, name in now.items() if before.get(key, name) != name]
        news += [f"{name} has left" for key, name in before.items() if key not in now and name not in now.values()]
        if news:
            logger.log(
                logging.WARNING if self._first_time("changed") else logging.INFO,
                "The model has changed: %s. The session follows from iteration %d on; what ran before is not observed"
                " under these names.",
                ", ".join(news),
                iteration,
            )

    def _running(self, what: str) -> Inspector:
        if self._inspector is None:
            raise SessionError(
                f"{what}: the session is not running. Call start() first, or use 'with InspectSession(...)'."
            )
        return self._inspector

    def _watch_for_overflow(self, model: Model) -> None:
        if ACTIVATION_OVERFLOW not in self._options.debug:
            return
        from te_precision_callbacks.debug_utils import DebugActivationOverflow

        former = self._overflow
        if former is not None:
            if _same(model, self._watched_model):
                return  # it follows what is replaced inside
            former.close(SessionError("Another model was attached."))
        options, self._watched_model = self._options, model
        self._overflow = DebugActivationOverflow(model, distributed=options.reduce, process_group=options.process_group)
        self._overflow_reports = 0
        self._overflow.abandoned = self._owner_has_left
        if former is not None:
            self._overflow.loss_scaled = former.loss_scaled

    def _find_layers(self, inspector: Inspector, model: Model) -> list[Layer]:
        if named_roots(model) is None:
            raise SessionError(f"The model is a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        inspector.forget_names()
        names = self._options.layer_names or "path"
        self._modules = named_te_modules(model, names, by_number=self._by_number)
        layers = [layer for module in self._modules for layer in module.layers]
        self._layer_names = frozenset(layer.name for layer in layers)
        return layers

    def _name_by_number(self, alike: Mapping[str, Sequence[str]]) -> None:
        """Call layers by their number in the whole model: statistics of different ones would go under one name."""
        self._by_number = True
        if self._rank == 0:
            name, numbered = next(iter(alike.items()))
            logger.warning(
                "Ranks have different layers at one path, as in pipeline and expert parallelism, such as %r, which is"
                " %s. So layers are called by the layer_number of their block, counted from 0, and experts"
                " by the first and the last of their numbers.",
                name,
                " or ".join(map(repr, numbered)),
            )

    def _plan(
        self, inspector: Inspector, model: Model, layers: Sequence[Layer], layers_of_all: Sequence[Layer]
    ) -> tuple[Plan, list[NamespacedFeatures]]:
        """What happens in this rank's layers but those that are refused, and the features of all sections."""
        config, registered = self._options.config, inspector.registered
        plan = config.plan(
            layers_of_all,
            registered,
            allow_unmatched=self._options.allow_unmatched,
            layer_names=self._options.layer_names,
        )
        check_conditions(plan, config.enabled_sections, detects_overflow=ACTIVATION_OVERFLOW in self._options.debug)
        planned = {entry.layer: entry for entry in plan.layers}
        sections = [resolve_features(section, registered) for section in config.enabled_sections]
        own = tuple(planned[layer] for layer in layers if layer in planned)
        effects = {section.name: tuple(section.effects.values()) for section in config.enabled_sections}
        return self._refused.leave(replace(plan, layers=own), model, self._modules, effects), sections

    def _take_names(self, layers: Sequence[Layer], plan: Plan) -> None:
        """Know the layers of all ranks by the names that the script gave, and say what is ambiguous about names."""
        self._layers_of_all = tuple(layers)
        named = by_given_name(layers)
        self._given_names.clear()
        self._given_names.update((name, given) for given, (name, *more) in named.items() if not more and name != given)
        if self._rank != 0:
            return
        alike = {given: those for given, those in named.items() if len(those) > 1}
        if alike and self._first_time("alike"):
            given, those = next(iter(alike.items()))
            logger.warning(
                "%s the name of several layers, such as %r of %s. Here these layers are told apart, in records and in"
                " logs; a selector with such a name means all of them.",
                "One name is" if len(alike) == 1 else f"Each of {len(alike)} names is",
                given,
                ", ".join(those[:5]) + (f" and {len(those) - 5} more" if len(those) > 5 else ""),
            )
        if plan.otherwise_upstream and self._first_time("otherwise_upstream"):
            logger.warning("%s", plan.otherwise_upstream)

    def _receive(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            self._gathered.scalars.append((name, value))
            return
        try:
            self._gathered.scalars.append((name, float(value)))
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            self._failures.report("taking", f"the scalar {name!r}", TypeError(f"it is one number, not {what}"))

    def _receive_statistics(self, measured: Measured) -> None:
        if measured:
            self._gathered.measured.append(measured)

    def _hand_over(self, ending: _Ending) -> StepRecords | None:
        """Turn what was received into records, and give them to the sinks. It may be repeated after an interruption."""
        self._start_sinks()
        if not ending.is_read:
            ending.records = self._read(ending)
            ending.is_read = True
        self._gathered = _Gathered()
        try:
            if ending.records is not None:
                self._sinks.write(ending.records)
        except Exception:  # with strict=True
            self._last_logging_step, self._ending = ending.logging_step, None
            raise
        self._last_logging_step, self._ending = ending.logging_step, None
        return ending.records

    def _read(self, ending: _Ending) -> StepRecords | None:
        scalars, measured = self._gathered.scalars, self._gathered.measured
        if not scalars and not measured:
            return None
        try:
            values = _to_floats([value for _, value in scalars])
            table = self._series
            own = [table.intern(*parsed_log_name(name, self._layer_names)) for name, _ in scalars]
            series = np.concatenate([*(found.series for found in measured), np.array(own, dtype=np.int32)])
            numbers = np.concatenate([*(found.values for found in measured), np.array(values)])
            histograms = {number: counts for found in measured for number, counts in found.histograms.items()}
        except Exception as error:
            self._gathered = _Gathered()
            self._failures.report("reading the statistics of", f"iteration {ending.iteration}", error)
            return None
        reduced = len(series) - len(own) if self._reduces and not ending.local else 0
        records = StepRecords(
            iteration=ending.iteration,
            logging_step=ending.logging_step,
            table=table,
            series=series,
            values=array("d", numbers.tobytes()),
            histograms=histograms,
            local=ending.local,
            own=[False] * reduced + [True] * (len(series) - reduced),
            unscaled=self._delayed_scaling.unscaled(
                ending.iteration, self._modules, {table[number].layer for number in series.tolist()}
            ),
        )
        self._statistics.add(records)
        return records

    def _gather_local(self, inspector: Inspector, ending: _Ending) -> None:
        """Take what this rank has, unless the step's statistics were handed over already."""
        received = list(self._gathered.measured)
        try:
            inspector.log_local_statistics()
        except Exception as error:
            logger.error("What was gathered since the last step cannot be had.", exc_info=error)
        if received and not inspector.ended:
            self._gathered.measured = received
        else:  # also what was taken when the script ended upstream
            ending.local = self._reduces

    def _take(self, inspector: Inspector, ending: _Ending) -> None:
        """Have the records of a step without the other ranks, where it has none yet."""
        if not ending.is_read:
            self._gather_local(inspector, ending)
            with suppress(ObservationError):  # something else has ended the step already
                ending.records = self._read(ending)
            ending.is_read = True
        self._gathered = _Gathered()

    def _write_remainder(self, inspector: Inspector, logging_step: int | None, guard: Uninterrupted) -> None:
        """Hand over what an interrupted step has left, and what was gathered since the last step."""
        try:
            if self._ending is not None:
                self._take(inspector, self._ending)
                with guard.interruptible():
                    self._hand_over(self._ending)
            iteration = inspector.iteration
            if logging_step is None:
                logging_step = iteration if self._last_logging_step is None else self._last_logging_step + 1
            self._ending = ending = _Ending(iteration, logging_step, is_remainder=True)
            self._take(inspector, ending)
            with guard.interruptible():
                self._hand_over(ending)
        except ObservationError as error:
            logger.error("What was gathered since the last step could not be written.", exc_info=error)

    def _completed(self, inspector: Inspector) -> int:
        """The first iteration that was not run to its end."""
        ending = self._ending
        return inspector.iteration if ending is None or ending.is_remainder else ending.iteration + 1

    @property
    def _config_source(self) -> str:
        source = self._options.config.source
        return str(source) if source else "a mapping"

    def _start_sinks(self) -> None:
        """Before the first step, when also a resumed run knows its iteration."""
        if self._sinks.started:
            return
        run = RunInfo(
            log_dir=self._log_dir,
            rank=self._rank,
            world_size=self._world_size,
            start_iteration=self.iteration,
            layers=self.layers,
            versions={name: importlib.metadata.version(name) for name in _VERSIONED},
            config=self._config_source,
        )
        self._sinks.start(run)


@dataclass
class _Gathered:
    """What was received since the last step."""

    scalars: list[tuple[str, Any]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)


@dataclass
class _Ending:
    """A step from its begin to the moment in which all sinks have its records.

    Attributes:
        iteration, logging_step: its numbers.
        is_remainder: whether it is what was gathered when the session was stopped, and no step.
        local: whether its numbers are this rank's alone although statistics are reduced.
        records: what the sinks get; None where there is nothing.
        is_read: whether ``records`` is known.
    """

    iteration: int
    logging_step: int
    is_remainder: bool = False
    local: bool = False
    records: StepRecords | None = None
    is_read: bool = False


def _place_in_script() -> str:
    """Where the user's code is: file and line of the innermost frame that is of no installed package."""
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(package) and "site-packages" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"


def _same(a: object, b: object) -> bool:
    """Whether both are the same model, or the same several under the same names."""
    first, second = ([(name, id(root)) for name, root in named_roots(model) or ()] for model in (a, b))
    return first == second


def _warn_if_idle(section: Section, features: NamespacedFeatures) -> None:
    """A warning for a section that changes nothing in a layer of Transformer Engine."""
    if features.get("base"):
        logger.warning(
            "%s: %s belongs to nvidia-dlfw-inspect itself, and no layer of Transformer Engine calls it. Put it below"
            " 'transformer_engine:' to have the feature of that name there.",
            section.place(),
            " and ".join(map(repr, features["base"])),
        )
    elif not any(features.values()):
        logger.warning("%s: the section has no enabled feature, so it does nothing.", section.place())


def _layer_infos(
    layers: Sequence[Layer], plan: Plan, given_names: Mapping[str, str], refused: RefusedLayers
) -> tuple[LayerInfo, ...]:
    planned = {entry.layer.name: entry for entry in plan.layers}
    return tuple(
        LayerInfo(
            name=layer.name,
            module_class=layer.types[0],
            sections=planned[layer.name].sections if layer.name in planned else (),
            features=planned[layer.name].features if layer.name in planned else {},
            given=given_names.get(layer.name, ""),
            refused=refused.why(layer.name),
        )
        for layer in layers
    )


def _to_floats(values: Sequence[Any]) -> list[float]:
    """Numbers and one-element tensors as float64, with one copy from each device."""
    tensors = [(index, value) for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
    floats = [math.nan if isinstance(value, torch.Tensor) else float(value) for value in values]
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in tensors:
        by_device.setdefault(tensor.device, []).append((index, tensor))
    for entries in by_device.values():
        stacked = torch.stack([tensor.detach().reshape(()).to(torch.float64) for _, tensor in entries])
        for (index, _), number in zip(entries, stacked.tolist(), strict=True):
            floats[index] = number
    return floats
