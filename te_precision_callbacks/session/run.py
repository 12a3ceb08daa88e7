"""One run of a session: made at its start, and dropped at its stop."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import NoneType
from typing import Any

import torch

from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError, SessionError
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank, world_size
from te_precision_callbacks.config.idle import never_due_in_words, steps_that_observe
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.parallel import OptimizerSteps, Ranks, leads
from te_precision_callbacks.diagnosis.reaction import PrecisionFindingError
from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.instrumentation.answers import ToldOfForwards
from te_precision_callbacks.instrumentation.failures import ASKED_FOR, ObservationFailures
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.refused_shapes import explain_checkpoint, explain_failure
from te_precision_callbacks.instrumentation.updates import UpdateWatch
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.naming import Model
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.options import SessionOptions, read_profile
from te_precision_callbacks.overflow.grad_scaler import LossScaling
from te_precision_callbacks.session.chronicle import Chronicle
from te_precision_callbacks.session.closing_lines import closing_lines, in_short, is_quiet
from te_precision_callbacks.session.delivery import Delivery, Ending
from te_precision_callbacks.session.endings import ProcessEnds, Terminated
from te_precision_callbacks.session.forgotten import ForgottenSteps, is_in_evaluation
from te_precision_callbacks.session.judgement import Judgement
from te_precision_callbacks.session.live_diagnosis import LiveDiagnosis
from te_precision_callbacks.session.log_and_records import LogAndRecords
from te_precision_callbacks.session.loop import Loop
from te_precision_callbacks.session.observed_model import ObservedModel
from te_precision_callbacks.session.overflow_watch import OverflowWatch
from te_precision_callbacks.session.parameter_checks import ParameterChecks
from te_precision_callbacks.session.profiling import Profiling
from te_precision_callbacks.session.results import Results, RunResults
from te_precision_callbacks.session.resume_audit import ResumeAudit, versions
from te_precision_callbacks.session.resumed_loss import ResumedLoss
from te_precision_callbacks.session.signals import Uninterrupted
from te_precision_callbacks.session.sinks import Sinks
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Sink, StepRecords
from te_precision_callbacks.sinks.writer_thread import all_within

logger = logging.getLogger(__name__)


class Run:
    """Observes a model from the start of a session to its stop, and undoes all changes then.

    Besides :attr:`live`, :attr:`kept` and what ends the process, each attribute is a part that is made with the run and
    never replaced. What a part remembers is in the part. The run only knows in which order the parts begin, step and
    end, so it has one attribute for each of them.

    Args:
        options: the session's options.
        sinks: receivers of records, before those of the options.
        results: get the results.
        classify: decides the kind of a forward.
        loop: the front door's facts about the training loop.
        notices: the messages that have been logged once.

    Attributes:
        live: whether the run was started and not stopped.
        kept: whether the run was stopped, and has left the features that change precision in place, until
            :meth:`release`.
        inspector: nvidia-dlfw-inspect.
        hooks: the session's part in Transformer Engine's forwards.
        model: the layers and their plan.
        observation: the engine, and the recorder of dumps.
        overflow: activation overflow detection.
        resume_audit: the fingerprints for checkpoints, and the audit of a resume.
        report: receives failures of observation.
    """

    def __init__(
        self,
        options: SessionOptions,
        sinks: Iterable[Sink],
        results: RunResults,
        classify: ForwardClassifier,
        loop: Loop,
        notices: Notices,
    ) -> None:
        self.live = self.kept = False
        self._options = options
        self._results = results
        self._loop = loop
        self._notices = notices
        self._process = os.getpid()
        # Not by the ranks of the run, which would keep the model as long as the results.
        leading = functools.partial(leads, options.process_group, reduce=options.reduce)
        self._failures = failures = ObservationFailures(strict=options.strict, rank=own_rank(), leads=leading)
        self.report = failures.report
        self.ranks = ranks = Ranks(options.process_group, reduce=options.reduce, report=failures.report)
        self._ends: ProcessEnds | None = None
        self.inspector = inspector = Inspector(
            log_dir=results.log_dir,
            feature_dirs=options.feature_dirs,
            features=options.features,
            process_group=options.process_group,
            report=failures.report,
            lose_folder=failures.lose_folder,
            strict=options.strict,
        )
        classify.begin(abandoned=self._is_abandoned)
        self._classify = classify
        told = ToldOfForwards(
            many_forwards=lambda module: self._forgotten.note_forwards(str(module.name)),
            refused=lambda module, refusal: self.model.note_refusal(module, refusal),
            number=lambda name, value: self._delivery.take_scalar(name, value),
        )
        engine = StatisticsEngine(results.series, failures.report)
        self.hooks = ForwardHooks(classify, failures, results.audit, told, engine, notices)
        recorder = Recorder(
            results.log_dir,
            report=failures.report,
            detects_overflow=ACTIVATION_OVERFLOW in options.debug,
        )
        self.model = model = ObservedModel(
            options, inspector, self.hooks, engine, results, failures, notices, loop.front_door
        )
        self._forgotten = ForgottenSteps(
            notices, loop, model.is_trained_by, model.parameters, lambda: inspector.iteration
        )
        self._written = LogAndRecords(options, results.log_dir, model.layers.given, ranks)
        self.resume_audit = ResumeAudit(
            model, results, self._written.records, failures, notices, loop.front_door, strict=options.strict
        )
        self._sinks = Sinks([*self._written.sinks, *sinks, *options.sinks], self._describe, failures)
        self.observation = Observation(engine, recorder)
        self._diagnosis = LiveDiagnosis(
            results.diagnosis, results.series, ranks, options.on_finding, self._sinks.tell, failures.report
        )
        self._updates = UpdateWatch(
            lambda: bool(self.hooks.answers.watched.armed),
            model.is_trained_by,
            lambda name, value: self._delivery.take_scalar(name, value),
            self._note_eps,
            failures.report,
        )
        self._scaling = LossScaling(model.is_trained_by, self._note_scaling, failures.report)
        self._optimizer_steps = OptimizerSteps(
            self._forgotten.note, self.hooks.products.note_optimizer_step, self._updates.after_step, self._note_backward
        )
        self._delivery = Delivery(
            inspector,
            self.observation,
            ranks,
            self._optimizer_steps,
            model.layers,
            results,
            self._sinks,
            failures,
            self.hooks.answers.notes.delayed_scaling,
            self._diagnosis.judge,
        )
        self._chronicle = Chronicle(
            options,
            model,
            results,
            self._sinks,
            self._written.records,
            failures,
            loop.front_door,
            self._diagnosis,
        )
        self._parameters = ParameterChecks(
            model, ranks, lambda: inspector.iteration, self._chronicle.tell, failures.report
        )
        failures.listen(self._say_failed)
        self._judgement = Judgement(options, results, ranks, self._chronicle)
        self.overflow = OverflowWatch(options, recorder, loop.was_left, self._step_in_words)
        self._profiling = Profiling(
            read_profile(options.profile),
            model.named_modules,
            lambda wanted: self.hooks.put_ranges(wanted=wanted),
            self._written.trace_file,
            notices,
            failures.report,
            lambda text: self._chronicle.tell(Event("profile", text, self.inspector.iteration, "warning")),
            lambda steps: steps_that_observe(options.config, steps),
        )

    # ------------------------------------------------------------------ its life

    def start(self, ends: ProcessEnds) -> None:
        """Start nvidia-dlfw-inspect, and act in Transformer Engine's forwards.

        Args:
            ends: stops the session before the process ends.

        Raises:
            SessionError, FeatureLoadError: as ``InspectSession.start``.
        """
        self.live = True
        self._ends = ends
        self.inspector.start(
            self.observation, self._delivery.take_scalar, self._before_script_ends, reduce=self._options.reduce
        )
        self.hooks.install()
        self.inspector.iteration = self._options.start_step or 0

    def count_from(self, iteration: int) -> None:
        """Gather for another iteration from now on."""
        self.inspector.iteration = iteration
        self._results.layers.go_to(iteration)
        self._delivery.forget_logging_step()
        self.hooks.arm()
        if self.model.attached:
            self._profiling.begin(iteration)

    def attach(self, model: Model) -> None:
        """As ``InspectSession.attach``."""
        ranks = self.ranks
        ranks.meet()
        with ranks.together("attaching a session", agree=ranks.several, error=SessionError):
            self.observation.engine.reduce_over(ranks.messages)
            self.inspector.events.begin(in_full=self._written.in_full)
            self._written.attach()
            self.model.attach(model, ranks)
            self._judgement.attach(self.model.all_names)
            if self._options.config.is_default:
                self._updates.begin()
            self._parameters.begin()
            self._optimizer_steps.begin()
            self._scaling.begin()
            self.overflow.attach(model, ranks.messages)
        ranks.settle()
        self._profiling.begin(self.inspector.iteration)

    def _step_in_words(self) -> str:
        iteration = self.inspector.iteration
        logged = "" if self._loop.front_door == "session" else f", step {iteration + self._loop.counts_from}"
        return f"debug iteration {iteration}{logged}"

    def _note_eps(self, adds: bool) -> None:
        self._results.adds_eps = adds or bool(self._results.adds_eps)

    def _note_scaling(self) -> None:
        self._results.scales_loss = True

    def _note_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a backward has run, by the gradients that the model has where an optimizer steps: its own one, or
        one of copies of the weights. Only of a step in which no backward was seen, they are read from the device."""
        if self._results.audit.lacks_backward and _has_gradients(self.model.parameters()):
            self._results.audit.note_backward()

    def step(self, logging_step: int | None) -> StepRecords | None:
        """As ``InspectSession.step``."""
        try:
            if is_capturing():
                self._say_captured()
                return None
            return self._step(logging_step)
        except ASKED_FOR:
            raise
        except Exception as error:  # of ours, which must not end the training; nor must the other ranks wait
            self.ranks.leave(error)
            self._failures.report("ending", f"iteration {self._iteration_at_its_end}", error)
            return None

    def _step(self, logging_step: int | None) -> StepRecords | None:
        inspector, delivery = self.inspector, self._delivery
        if self.overflow.detector is not None:
            try:
                self.overflow.detector.look()
            except Exception as error:
                self._chronicle.tell_error(error, inspector.iteration)
                raise
        if self.is_forked:
            if self._notices.first("forked"):
                logger.warning(
                    "step(): the session was started in the process that this one was forked from, which owns the logs."
                    " Nothing is observed here. To observe this process, start a session after the fork."
                )
            return None
        if inspector.ended:
            self._say_ended()
            return None
        iteration = inspector.iteration
        if logging_step is None:
            logging_step = iteration + self._loop.counts_from
        ending = Ending(iteration, logging_step)
        try:
            with self.ranks.together(
                "step()",
                agree=self._options.strict and self.ranks.several,
                error=ObservationError,
                on_all=(PrecisionContractError, PrecisionFindingError),
            ):
                delivery.begin(ending)
                self.resume_audit.end_step()
                records = self._end_step(ending)
            self._look_for_ranks()
            self._profiling.begin(inspector.iteration)
            return records
        except ASKED_FOR:
            raise
        except BaseException as error:  # the step counts, and the next call hands its remaining records to sinks
            if isinstance(error, Exception) or delivery.ending is ending:  # else Ctrl-C came before the step had begun
                self._complete(ending)
            raise

    def _complete(self, ending: Ending) -> None:
        """Count a step that was not finished, with this rank's own numbers."""
        if self._delivery.ending is not None:
            self.inspector.iteration = ending.iteration + 1
            self.hooks.arm()
            self._delivery.read_local(ending)

    def _look_for_ranks(self) -> None:
        """Meet the ranks again if they are apart; all go on at the largest iteration."""
        steps = -1
        if not self.observation.engine.optimizers_differ:
            steps = self._optimizer_steps()
        iteration = self.ranks.look(self.inspector.iteration, steps)
        if iteration is not None and iteration != self.inspector.iteration:
            self.count_from(iteration)

    def _end_step(self, ending: Ending) -> StepRecords | None:
        self._profiling.end(ending.iteration)
        self._forgotten.end_step(self.model.layers.modules, in_regions=self.hooks.has_entered_regions)
        self.inspector.report_events()
        self.model.say_refused()
        self.model.note_order()
        self.model.note_products()
        self._chronicle.begin(self.ranks)
        self._sinks.start()  # with the iteration at which the run begins
        self._profiling.write()  # where the run is recorded, which is known now
        self._judgement.begin_step(ending.iteration)
        try:
            self._delivery.take(ending)
            self.inspector.step()
        except ObservationError:
            raise
        except Exception as error:
            self.ranks.leave(error)
            self._failures.report("gathering the statistics of", f"iteration {ending.iteration}", error)
            self.inspector.iteration = ending.iteration + 1  # it may have failed before it counted
            self._delivery.take_local(ending)
        self.hooks.begin(self.inspector.iteration)
        self.model.follow()
        self._chronicle.tell_changes(ending.iteration)
        try:
            records = self._delivery.hand_over(ending)
        finally:
            self.overflow.tell_recorder()
            self.observation.recorder.end_step()
        self._chronicle.tell_dumps(self.observation.recorder.take_written())
        self._parameters.end_step(ending.iteration)
        self._judgement.end_step(ending.iteration)
        self._diagnosis.stop_if_wanted()
        return records

    def flush(self, seconds: float) -> bool:
        """As ``InspectSession.flush``."""
        return all_within(seconds, [*self._written.hurry(), self.inspector.events.hurry()])

    @property
    def last_logging_step(self) -> int | None:
        """The step under which the last iteration was logged; None before its end."""
        return self._delivery.last_logging_step

    def log(self, values: Mapping[str, Any], logging_step: int | None) -> int | None:
        """As ``InspectSession.log``; the step under which they are logged, None in a forked process."""
        if self.is_forked:
            return None
        iteration, last = self.inspector.iteration, self._delivery.last_logging_step
        if logging_step is None:
            logging_step = iteration + self._loop.counts_from
        elif logging_step == last and iteration:
            iteration -= 1
        self._chronicle.log(iteration, logging_step, values)
        return logging_step

    def tell_of_checkpoint(self, file: str) -> None:
        """Report to the sinks that a checkpoint has taken the state; its file is empty if it is not known."""
        iteration = self.inspector.iteration
        self._results.diagnosis.note_checkpoint(iteration, file)
        text = f"A checkpoint has taken the state before debug iteration {iteration}."
        self._chronicle.tell(Event("checkpoint_saved", text, iteration, phase="checkpoint", data={"file": file}))

    def restore_losses(self, losses: Sequence[float]) -> None:
        """Let the rules compare the first losses of a resumed run with those of its checkpoint."""
        if losses:
            text = f"The run was resumed after a training loss of {losses[-1]:.6g}."
            before = max(self.inspector.iteration - 1, 0)
            self._chronicle.tell(Event("losses_restored", text, before, data={"losses": losses}))

    def tell_of_loss(self, loss: ResumedLoss) -> None:
        """Tell of the training loss before and after a resume, on one rank; it may lie on a device.

        A failure is logged and never raised, since the other ranks would go on without this one.
        """
        try:
            if own_rank() == 0:
                loss.tell(self._results.resume)
        except Exception as error:
            try:
                self._failures.report("comparing", "the loss before and after the resume", error)
            except ObservationError as strict:
                logger.warning("%s", strict)

    def _say_failed(self, text: str) -> None:
        self._chronicle.tell(Event("observation_failed", text, self._iteration_at_its_end, "error"))

    @property
    def _iteration_at_its_end(self) -> int:
        """The iteration whose step has begun and is not handed over; else the current one."""
        ending = self._delivery.ending
        return self.inspector.iteration if ending is None else ending.iteration

    def stop(self, error: BaseException | None, logging_step: int | None) -> None:
        """Write the statistics gathered since the last step, and undo all changes.

        Args:
            error, logging_step: as in ``InspectSession.stop``.
        """
        explain_failure(error or sys.exc_info()[1], self.model.layers.modules, self.model.layers.other_names)
        explain_checkpoint(error or sys.exc_info()[1], self.model.layers.modules)
        keeps = self._options.keep_precision and self._results.changes_precision
        keeps = keeps and error is None and not self.inspector.ended
        ended_by = error or sys.exc_info()[1]
        termination = None if self._ends is None else self._ends.termination
        with Uninterrupted(termination) as guard, without_collections(), ExitStack() as stack:
            if ended_by is not None and not self._forgotten.has_trained:
                self._results.audit.abandon()
            # Callbacks in the stack run in reverse order, whatever fails.
            stack.callback(self._failures.summarize)

            def then(doing: str, of: str, call: Callable[[], None]) -> None:
                stack.callback(self._try, doing, of, call)

            then("leaving", "the other ranks", self.ranks.end)
            then("closing", "the dumps", lambda: self._close_dumps(error, guard))
            then("undoing", "what the session has changed", lambda: self._put_back(keeps=keeps))
            then("printing", "the verdict", lambda: self._print_verdict(ended_by))
            then("writing", "the summary", self._write_summary)
            then("writing", "the report", lambda: self._tell_report(error, guard))
            then("telling", "the coverage", self._tell_coverage)
            then("checking", "the whole run", self._check_whole_run)
            then("closing", "the sinks", lambda: self._close_sinks(error, guard))
            then("telling", "what the run has not reached", lambda: self._say_never_due(ended_by))
            if self.model.attached:
                then("telling", "the end", lambda: self._tell_the_end(error))
            elif ended_by is None:
                logger.warning(
                    "The session has ended without a model, so nothing was observed. Pass model=, or call attach(model)"
                    " before the training."
                )
            if ended_by is None:
                then("stopping", "the run", self._diagnosis.stop_at_the_end)
            then("judging", "the precision contract", lambda: self._judge_at_the_end(ended_by))
            if self.model.attached and not self._hurries and not self.inspector.ended:
                then("checking", "the parameters", self._check_at_the_end)
            if self.model.attached:
                then("handing over", "the last statistics", lambda: self._hand_over_rest(error, logging_step, guard))
            then("ending", "the profile", lambda: self._profiling.close(self.inspector.iteration))

    def _try(self, doing: str, of: str, call: Callable[[], None]) -> None:
        """Do a part of the end. What fails in it is reported, and not raised unless somebody has asked for that."""
        try:
            call()
        except ASKED_FOR:
            raise
        except Exception as error:
            try:
                self._failures.report(doing, of, error)
            except Exception:  # with strict=True, where the run has ended already
                logger.error("The end of the session failed in %s %s.", doing, of, exc_info=error)

    def _hand_over_rest(self, error: BaseException | None, logging_step: int | None, guard: Uninterrupted) -> None:
        self.model.say_refused()
        self._forgotten.end()
        if not self._written.in_full and isinstance(error, (NoneType, Terminated, KeyboardInterrupt, SystemExit)):
            # Nothing has failed on this rank, or all ranks stop.
            self._sinks.pass_over(self._written.sinks)
        self._delivery.hand_over_remainder(
            logging_step, guard, counts_from=self._loop.counts_from, from_device=self._asks_device
        )

    @property
    def _hurries(self) -> bool:
        """Whether a signal has come that ends the process: what would take time is left out."""
        return self._ends is not None and self._ends.termination.came

    @property
    def _asks_device(self) -> bool:
        """Whether a GPU may be asked for numbers: before a signal ends the process, it may be waiting for another rank,
        for ever."""
        return not (self._hurries and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _check_at_the_end(self) -> None:
        """Check the parameters as the last step has left them."""
        last = self._results.iterations.last
        if last is not None:
            self._parameters.end(last)

    def _tell_the_end(self, error: BaseException | None) -> None:
        """Hand the sinks the events that they do not have yet."""
        iteration = self.inspector.iteration
        with suppress(ObservationError):  # with strict=True; something else has ended the run already
            if error is not None:
                self._chronicle.tell_error(error, iteration)
            self._chronicle.tell_dumps(self.observation.recorder.take_written())
            self._chronicle.tell_changes(iteration, at_last=True, from_device=self._asks_device)
            self._chronicle.tell_end(error, max(iteration - 1, 0))

    def _note_unended(self) -> None:
        """Note the products of a run without any step, as where a loop never calls ``step()``."""
        results, before = self._results, self._results.coverage.changes
        self.model.note_order()
        self.model.note_products()
        if results.coverage.changes != before:
            results.audit.leave(self.inspector.iteration)

    def _judge_at_the_end(self, error: BaseException | None) -> None:
        """Judge the contract if that has not been done yet. An error that ends the run is not hidden."""
        attached, has_stepped = self.model.attached, self._forgotten.has_stepped
        has_step = has_stepped or error is None or self._forgotten.has_trained  # an error may have left half a step
        if attached and has_step and not has_stepped and not self.inspector.ended:
            self._note_unended()
        if not self._judgement.demands or self._hurries or (error is not None and not attached):
            return
        why_not = "the model did not run forward and backward in training while the session was watching"
        if not attached:
            why_not = "the session has no model. Call attach(model) before the training"
        elif self.inspector.ended:
            why_not = "the script has called debug_api.end_debug()"
        elif not has_step:
            why_not = "the run has ended in its first step, before the optimizer's"
        elif is_in_evaluation(self.model.layers.modules):
            why_not = (
                "the model is in evaluation mode, so its forwards count as evaluations. Call model.train() before the"
                " training"
            )
        iteration = self.inspector.iteration - has_stepped
        self._judgement.end_run(iteration, why_not, has_step=has_step, raises=error is None)

    def _check_whole_run(self) -> None:
        """Check a resumed run with its earlier starts, as ``te-precision diagnose`` does."""
        place = self._written.place
        if own_rank() == 0 and not self._hurries and place is not None and place.segment:
            from te_precision_callbacks.diagnosis.replay import diagnose
            from te_precision_callbacks.runs import open_run

            self._results.whole_run = diagnose(open_run(self._results.log_dir, run=place.run_id))

    def _tell_coverage(self) -> None:
        """Tell how much ran in low precision: in a line for the last step, and in others for steps that differ."""
        if own_rank() == 0:
            for text in self._judgement.end_coverage():
                logger.info("%s.", text)
                self.inspector.log(text)

    def _say_never_due(self, error: BaseException | None) -> None:
        """Warn of features whose steps the whole run has not reached."""
        last = self._results.iterations.last
        if own_rank() or not self.model.attached or error is not None or self._hurries or last is None:
            return
        if text := never_due_in_words(self._options.config, last):
            logger.warning("%s", text)
            self._results.never_due = text
            self._chronicle.tell(Event("never_due", text, last, "warning"))

    def _tell_report(self, error: BaseException | None, guard: Uninterrupted) -> None:
        """Name the command that makes a page of the recorded run, and write the page if that is wanted.

        It takes its time, so a run that an error or a signal has ended only gets the command named.
        """
        if own_rank() == 0 and (run_id := self._written.tell_command()) and self._options.report and error is None:
            with guard.interruptible():
                self._written.write_page(run_id, self._sinks)

    def _put_back(self, *, keeps: bool) -> None:
        """Undo everything that the run changed in the process; with ``keeps``, all but the features that stay."""
        with ExitStack() as then:
            if keeps:
                then.callback(self.hooks.keep)
            else:
                then.callback(self.release)
            if self._ends is not None:
                then.callback(self._ends.forget_exceptions)
            then.callback(self._optimizer_steps.remove)
            then.callback(self._updates.remove)
            then.callback(self._parameters.remove)
            then.callback(self._scaling.remove)
            then.callback(self.resume_audit.end)
            then.callback(self.model.release)
            self._results.iteration = self._delivery.completed
            self.live, self.kept = False, keeps

    def release(self) -> None:
        """End nvidia-dlfw-inspect, and leave Transformer Engine's forwards as they were."""
        self.kept = False
        with ExitStack() as then:
            then.callback(self._classify.end)
            then.callback(self.inspector.stop)
            then.callback(self.hooks.remove)
            if self._ends is not None:
                then.callback(self._ends.forget_exit)

    # ------------------------------------------------------------------ whether it still observes

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process that started the run and that owns its files."""
        return os.getpid() != self._process

    def _is_abandoned(self) -> bool:
        """Whether forwards run as without a session."""
        return self.inspector.ended or (self.live and (self.is_forked or self._loop.was_left()))

    def _before_script_ends(self) -> None:
        """Take the statistics gathered since the last step before upstream ends; :meth:`stop` writes them."""
        if self.live and not self.is_forked:
            self._say_ended()
            self._delivery.take_own()

    def _say_ended(self) -> None:
        if self._notices.first("ended"):
            logger.error(
                "The script has called debug_api.end_debug() while the session was running, so nothing more is"
                " observed. Training goes on. Leave initialize, step and end_debug to the session."
            )

    def _say_captured(self) -> None:
        if self._notices.first("captured step"):
            logger.warning(
                "step() was called while a CUDA graph is being captured, and does nothing there: a replay would not"
                " call it. Call step() after each replay."
            )

    # ------------------------------------------------------------------ what it writes

    def _describe(self) -> RunInfo:
        return RunInfo(
            log_dir=self._results.log_dir,
            rank=own_rank(),
            world_size=world_size(),
            start_iteration=self.inspector.iteration,
            layers=tuple(self._results.layers.now),
            versions=dict(versions()),
            config=self._options.config.name,
        )

    def _close_sinks(self, error: BaseException | None, guard: Uninterrupted) -> None:
        try:
            with guard.interruptible():
                self._sinks.close(error)
        except KeyboardInterrupt:  # try the others once more: only a second Ctrl-C leaves a file open
            with guard.interruptible():
                self._sinks.close(error)
            raise
        finally:
            self._failures.listen(None)

    def _write_summary(self) -> None:
        """Write the summary into the log folder, on one rank."""
        if own_rank() == 0 and self.model.attached:
            from te_precision_callbacks.session.summary import write_summary

            self._results.iteration = self.inspector.iteration
            write_summary(Results(self._results), self._judgement.coverage, self._judgement.other_steps)

    def _print_verdict(self, error: BaseException | None) -> None:
        """Print what came out of the run, on one rank."""
        if own_rank() == 0 and self.model.attached and not is_quiet(self._options.quiet):
            verdict, coverage = Results(self._results).findings, self._judgement.coverage
            written = self._written
            has_folder = not self._failures.has_lost_folder and self._results.log_dir.is_dir()
            trace = self._profiling.trace if has_folder else None
            lines = closing_lines(
                verdict,
                coverage,
                self._results.log_dir if has_folder else None,
                written.page,
                other_steps=self._judgement.other_steps,
                trace="" if trace is None else str(trace),
                speed="" if trace is None else written.speed_command(trace),
                ended_by="" if error is None else in_short(error),
            )
            sys.stderr.write("".join(f"{line}\n" for line in lines))

    def _close_dumps(self, error: BaseException | None, guard: Uninterrupted) -> None:
        """Close the detector, whose last look may raise, and write all dumps; before a signal ends the process, those
        that are on their way."""
        try:
            if self._asks_device:
                self.overflow.close(error)
        finally:
            with guard.interruptible():
                self.observation.recorder.close(decides=self._asks_device)


def _has_gradients(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether a backward has given one of the parameters a gradient; ``zero_grad(set_to_none=False)`` leaves zeros.
    Each device is waited for once."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout != torch.strided for gradient in gradients) or is_capturing():
        return bool(gradients)
    found: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # DTensor: this rank's part
        found.setdefault(own.device, []).append(own.any())
    return any(bool(torch.stack(flags).any()) for flags in found.values())
