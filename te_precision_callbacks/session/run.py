"""A run of a session, from its start to its stop."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError, RaisedInTraining, SessionError, is_failure
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.ranks.together import Ranks, leads
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.config.steps import describe_never_due
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.shapes import explain_failure
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.instrumentation.clipping import ClippingWatch
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.naming import Model
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.overflow.grad_scalers import call_before_scaled_steps
from te_precision_callbacks.runs.summary import ended_by
from te_precision_callbacks.session.checks import (
    LEFT_FOR_PROBLEMS,
    ContractCheck,
    EveryStepCheck,
    OverflowCheck,
    ParameterChecks,
    RuleChecks,
)
from te_precision_callbacks.session.context import RunContext, RunResults
from te_precision_callbacks.session.delivery import EndingStep, Sinks, StepCollector, dump_events
from te_precision_callbacks.session.endings import ClosingReport, call_on_request, forget_request, uninterrupted
from te_precision_callbacks.session.facts import RunFacts
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.session.resume import ResumeAudit
from te_precision_callbacks.session.training_loop import (
    LoopChecks,
    TrainerScalars,
    has_gradients,
    hook_optimizers,
    is_in_evaluation,
)
from te_precision_callbacks.sinks.step_records import Event, Scalars, Sink, StepRecords, end_of

logger = logging.getLogger(__name__)


class Run:
    """Observes a model from the start of a session to its stop, and then undoes all changes.

    Attributes:
        live: True between start and stop.
        observation: the engine, and the recorder of dumps.
    """

    def __init__(
        self,
        options: SessionOptions,
        sinks: Iterable[Sink],
        results: RunResults,
        classify: ForwardClassifier,
    ) -> None:
        self.live = False
        self._process = os.getpid()
        self._is_in_step = False
        self.last_logging_step: int | None = None
        # A method of the run's ranks would keep the model alive as long as the results.
        leading = functools.partial(leads, options.process_group, reduce=options.reduce)
        failures = ObservationFailures(strict=options.strict, rank=own_rank(), leads=leading)
        ranks = Ranks(options.process_group, reduce=options.reduce, report=failures.report)
        inspector = Inspector(results.log_dir, options, failures)
        context = RunContext(options, results, failures, ranks, inspector)
        self.context = context
        self._results = results
        self._failures = failures
        self._ranks = ranks
        classify.begin(abandoned=self._is_abandoned)
        scalars = ScalarBuffer(failures)
        self._scalars = scalars
        engine = StatisticsEngine(results.series, failures.report)
        self._logs_updates = options.config.is_default
        engine.reports_quantized_only = not self._logs_updates
        self.observation = Observation(engine, Recorder(results.log_dir, report=failures.report))
        self.hooks = ForwardHooks(
            classify, failures, results.table, scalars, engine, strict=options.strict, every_step=options.every_step
        )
        model = ObservedModel(context, self.hooks, engine)
        self.model = model
        self._loop_checks = LoopChecks(context, model)
        self._is_hooked = False
        self._updated_at: int | None = None  # the last iteration in which an optimizer has stepped with gradients
        self._collector = StepCollector(context, self.observation, scalars, model)
        self.trainer_scalars = TrainerScalars(context)
        self._every_step = EveryStepCheck(context, self.hooks.every_step)
        self._rules = RuleChecks(context, self._every_step)
        self._contract = ContractCheck(context)
        self._parameters = ParameterChecks(context, model, scalars, self._every_step)
        self.hooks.products.around_backward = self._parameters.watch.clearing.around_backward
        self._clipping = ClippingWatch(self._parameters.watch.before_clipping, failures)
        self.overflow = OverflowCheck(context)
        self._facts = RunFacts(context, model)
        self._sinks = Sinks(context, model.layers.given, [*sinks, *options.sinks])
        self.resume_audit = ResumeAudit(context, model, self._parameters.watch.listed, self._sinks.records)
        self._closing = ClosingReport(context, self._sinks)
        self._undo = ExitStack()
        for undo in (
            classify.end,
            inspector.stop,
            self.hooks.remove,
            self._parameters.watch.remove,
            self._clipping.remove,
            self.resume_audit.end,
            self.trainer_scalars.remove,
        ):
            self._undo.callback(undo)

    @property
    def iteration(self) -> int:
        return self.context.inspector.iteration

    # ------------------------------------------------------------------ start and attach

    def start(self, at_exit: Finalize) -> None:
        self.live = True
        self._undo.callback(at_exit.cancel)
        self.context.inspector.start(self.observation, self._scalars)
        self.hooks.install()
        self.count_from(self.context.options.start_step or 0)

    def count_from(self, iteration: int) -> None:
        self.context.inspector.iteration = iteration
        self._failures.iteration = iteration
        self.last_logging_step = None
        self.hooks.query_all()

    def attach(self, model: Model) -> None:
        ranks = self._ranks
        ranks.meet()
        with ranks.together("attaching a session", SessionError, ConfigError, agree=ranks.several):
            self.observation.engine.reduce_over(ranks.messages)
            self.context.inspector.events.begin(in_full=self._sinks.writes_all)
            self._sinks.attach()
            self.model.attach(model)
            self._contract.attach(self.model)
            self._parameters.watch.begin(self.iteration)
            if not self._is_hooked:
                self._is_hooked = True
                for hook in hook_optimizers(self._before_optimizer_step, self._after_optimizer_step):
                    self._undo.callback(hook.remove)
                self._undo.callback(call_before_scaled_steps(self._before_scaled_step))
            self._clipping.begin()
            self.overflow.attach(model)
        ranks.settle()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        order = len(self.hooks.every_step.ring.order)
        is_collected = self._logs_updates and bool(self.hooks.answers.watched.due)
        self._parameters.before_optimizer_step(optimizer, self.iteration, order, is_collected=is_collected)
        self.resume_audit.before_step(optimizer)
        if self._rules.stops_for_nonfinite and not self._results.scales_loss and not is_capturing():
            self._stop_before_step(optimizer)

    def _stop_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop the run on all ranks if inf or nan would reach weights. A GradScaler skips such a step by itself."""
        ranks = self._ranks
        gradients = self._parameters.watch.sizes
        if not self.model.is_trained_by(optimizer) or not self._parameters.watch.had_gradients:
            return
        is_broken = False
        with self._failures.guard("looking for", "inf and nan"):
            is_broken = self.hooks.every_step.ring.is_broken() or gradients.is_broken()
        is_broken = ranks.any("inf and nan", "looking for inf and nan", own=is_broken)
        if is_broken and (ranks.are_connected or not ranks.several):  # a rank alone would let the others wait
            with self._failures.guard("stopping before", "the step of an optimizer"):
                self._every_step.end_step(self.iteration, waits=True)
                if gradients.is_broken():
                    self._parameters.end(self.iteration)
                self._send()
            self._rules.stop_if_wanted(at_once=True)

    def _before_scaled_step(self, optimizer: Any) -> None:
        with self._failures.guard("observing", "a GradScaler"):
            if not self._results.scales_loss:
                self._results.scales_loss = self.model.is_trained_by(optimizer)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._loop_checks.note(optimizer)
        self.hooks.products.note_optimizer_step(optimizer)
        self._parameters.watch.after_step(optimizer)
        if self._parameters.watch.last_update == self.iteration and self._parameters.watch.had_gradients:
            self._updated_at = self.iteration
            self.hooks.every_step.note_update()
        # A backward that was not seen has left gradients. They are read from the device only if no backward was seen.
        table = self._results.table
        if table.lacks_backward and has_gradients(self.model.parameters()):
            table.note_backward()

    # ------------------------------------------------------------------ a step

    def step(self, logging_step: int | None) -> StepRecords | None:
        try:
            if is_capturing():
                self._warn_once(
                    "step() has no effect during the capture of a CUDA graph. Call step() after each replay.",
                )
                return None
            if not self._loop_checks.has_stepped:
                call_on_request(self._record_on_request)
                self._undo.callback(forget_request, self._record_on_request)
            self._is_in_step = True
            with uninterrupted(), without_collections():
                try:
                    return self._end_step(logging_step)
                finally:
                    for thread in self._sinks.threads:
                        thread.catch_up()
        except RaisedInTraining:
            raise
        except Exception as error:  # a bug of this package must neither end the training nor block the other ranks
            self._ranks.leave(error)
            self._failures.report("ending", f"iteration {self._failures.iteration}", error)
            return None
        finally:
            self._is_in_step = False
            self._failures.iteration = self.iteration

    def _record_on_request(self, *_: Any) -> None:
        """Record the last steps that are on the host, between two steps at once: the next one may never end."""
        if not self.is_forked:
            self._every_step.is_requested = True
            if self.live and not self._is_in_step:
                self._every_step.record_requested(self.iteration)
                self._try("recording", "the last steps", self._send)

    def _end_step(self, logging_step: int | None) -> StepRecords | None:
        context = self.context
        ranks = self._ranks
        self.overflow.check()
        if self.is_forked:
            self._warn_once(
                "step(): this process was forked from the process of the session, so nothing is observed here. To"
                " observe this process, start a session after the fork.",
            )
            return None
        context.inspector.keep()
        iteration = self.iteration
        ending = EndingStep(iteration, context.logging_step(iteration) if logging_step is None else logging_step)
        try:
            with ranks.together(
                "step()",
                ObservationError,
                ConfigError,
                agree=context.options.strict and ranks.several,
                on_all=(PrecisionContractError, PrecisionFindingError),
            ):
                records = self._run_step(ending)
            # Reconnect ranks that were disconnected; all continue at the largest iteration.
            steps = -1 if self.observation.engine.optimizers_differ else self._loop_checks.optimizer_steps
            common = ranks.reconnect(self.iteration, steps)
            if common is not None and common != self.iteration:
                self.count_from(common)
            return records
        except BaseException:  # the failed step counts as an iteration
            context.inspector.iteration = iteration + 1
            self.hooks.query_all()
            self._deliver_local(ending)
            raise

    def _run_step(self, ending: EndingStep) -> StepRecords | None:
        """Run the parts of a step in order: collect, reduce, check, deliver, record."""
        iteration = ending.iteration
        if self._rules.stops_for_nonfinite and self._updated_at is not None:
            self._rules.begin_step(iteration - self._updated_at)
        # Collect what this rank has seen in the step.
        self.resume_audit.end_step()
        self.trainer_scalars.add(iteration, ending.logging_step, self._clipping.take())
        self.trainer_scalars.end_step(iteration, ending.logging_step)
        self._loop_checks.end_step(in_regions=self.hooks.has_entered_autocast)
        self.context.inspector.report_events()
        stepped = self._parameters.watch.stepped(iteration)
        self._every_step.end_step(iteration, waits=self.observation.engine.has_news, stepped=stepped)
        self.model.end_step()
        self._parameters.watch.updates.end_step()
        self._sinks.start(together=True)
        # Reduce the statistics over the ranks, and begin the next iteration.
        ranks = self._ranks
        optimizer_steps = self._loop_checks.optimizer_steps
        wants_losses = ranks.leads and optimizer_steps > 1 and not self.trainer_scalars.has_loss
        ranks.request(losses=wants_losses, origins=bool(self._every_step.unsent))
        self._contract.begin_step(iteration)
        self._collector.reduce(ending, optimizer_steps)
        self.hooks.begin(self.iteration)
        # Check the facts, on which the rules for events depend, and the statistics where they are delivered.
        self._check_facts(iteration)
        self._send_pending()
        self._exchange(losses=ranks.requested.losses, origins=ranks.requested.origins)
        try:
            records = self._deliver(ending)
        finally:
            self.observation.recorder.end_step()
        # Record the dumps and the results of checks over all ranks.
        self.context.events.extend(dump_events(self.observation.recorder.take_written()))
        self._parameters.end_step(iteration, stepped, self._clipping.norm)
        self._every_step.add_held(iteration, self._parameters.watch.sizes.broken)
        try:
            self._contract.end_step(iteration)
        finally:
            self._send()
        self._rules.stop_if_wanted()
        return records

    def _exchange(self, *, losses: bool, origins: bool) -> None:
        """Send losses and origins of inf and nan to the first rank; all ranks must call this."""
        origins_of_ranks = self._every_step.exchange_origins(self._ranks) if origins else []
        shared = self.trainer_scalars.exchange_losses() if losses else []
        if self._ranks.leads:
            for rank, event in origins_of_ranks:
                self._rules.event(event, rank)
            self._send(*shared)

    def _check_facts(self, iteration: int, *, at_last: bool = False, has_statistics: bool = False) -> None:
        records = self._sinks.records
        with self._failures.guard("gathering the facts of", f"iteration {iteration}"):
            adds_eps = self._parameters.adds_eps
            if adds_eps is not None:  # otherwise the optimizer may be gone
                self._results.adds_eps = adds_eps
            facts = self._facts.take(at_last=at_last, has_statistics=has_statistics)
            if facts is None:
                return
            if records is not None and records.writes_reduced:
                records.put_facts(facts)
            self._rules.facts(facts, iteration)
            self._send()

    def _deliver(self, ending: EndingStep) -> StepRecords | None:
        self._sinks.start(together=False)
        self.last_logging_step = ending.logging_step
        records = self._collector.read(ending)
        if records is None:
            return None
        if len(records.series):
            self._check_facts(ending.iteration, has_statistics=True)
        try:
            with self._failures.guard("checking", f"iteration {ending.iteration}"):
                records = self._rules.records(records)
                self._send()
        finally:
            self._sinks.write(records)
        return records

    def _deliver_local(self, ending: EndingStep) -> None:
        try:
            self._collector.collect_local()
            self._deliver(ending)
        except ObservationError as failure:
            logger.error(
                "The statistics collected since the last step could not be written and are lost.", exc_info=failure
            )

    # ------------------------------------------------------------------ events

    def _send(self, *items: Event | Scalars) -> None:
        """Send the queue, and more items, to the sinks and the rules. Findings go only to the sinks."""
        queue = self.context.events
        queue += items
        while queue:
            item = queue.pop(0)
            self._sinks.send(item)
            if isinstance(item, Scalars):
                self._rules.scalars(item)
            elif item.kind != "finding":
                self._rules.event(item)

    def _send_pending(self, *, at_last: bool = False) -> None:
        self._send(*(Event("observation_failed", text, step, "error") for step, text in self._failures.take()))
        self._send(*self.trainer_scalars.take(at_once=at_last))

    # ------------------------------------------------------------------ calls of the script

    def flush(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        waits = [thread.flush_soon() for thread in self._sinks.threads]
        written = [wait(until) for wait in waits]
        return all(written)

    def log(self, values: Mapping[str, Any], logging_step: int | None) -> None:
        iteration = self.iteration
        if logging_step is None:
            logging_step = self.context.logging_step(iteration)
        elif logging_step == self.last_logging_step and iteration:
            iteration -= 1
        self.trainer_scalars.log(iteration, logging_step, values)

    def note_checkpoint(self, file: str) -> None:
        """Report a checkpoint to the sinks; ``file`` is empty if unknown."""
        iteration = self.iteration
        self._results.diagnosis.note_checkpoint(iteration, file)
        self._parameters.watch.note_checkpoint()
        text = f"A checkpoint was saved before debug iteration {iteration}."
        self._send(Event("checkpoint_saved", text, iteration, phase="checkpoint", data={"file": file}))

    def restore_losses(self, losses: Sequence[float]) -> None:
        if losses:
            text = f"The run was resumed after a training loss of {losses[-1]:.6g}."
            self._send(Event("losses_restored", text, max(self.iteration - 1, 0), data={"losses": losses}))

    # ------------------------------------------------------------------ stop

    def stop(self, error: BaseException | None, logging_step: int | None) -> None:
        layers = self.model.layers
        ended_by = error or sys.exc_info()[1]
        explain_failure(ended_by, layers.modules, layers.other_names(self.model.model))
        attached = self.model.attached
        leads_all = own_rank() == 0
        with uninterrupted(), without_collections(), ExitStack() as stack:
            if ended_by is not None and not self._loop_checks.has_trained:
                self._results.table.abandon()
            if not attached and ended_by is None:
                logger.warning(
                    "The session ended without a model, so nothing was observed. Pass model=, or call attach(model)"
                    " before the training."
                )
            parts: list[tuple[str, str, bool, Callable[[], None]]] = [
                ("handing over", "the last statistics", attached, lambda: self._deliver_remainder(error, logging_step)),
                ("checking", "the parameters", attached, self._check_parameters),
                ("checking", "the precision contract", True, lambda: self._check_contract(ended_by)),
                ("stopping", "the run", ended_by is None, self._rules.stop_at_the_end),
                ("sending", "the end", attached, lambda: self._send_end(error)),
                ("checking", "what the run has not reached", attached, lambda: self._warn_never_due(ended_by)),
                ("closing", "the sinks", True, lambda: self._close_sinks(error)),
                ("checking", "the whole run", leads_all, self._closing.check_whole_run),
                ("logging", "the coverage", leads_all, self._closing.log_coverage),
                ("printing", "the verdict", attached and leads_all, lambda: self._closing.print_verdict(ended_by)),
                ("undoing", "the changes of the session", True, self._put_back),
                ("closing", "the dumps", True, lambda: self._close_dumps(error)),
                ("leaving", "the other ranks", True, self._ranks.end),
            ]
            stack.callback(self._failures.summarize)
            for doing, subject, is_due, call in reversed(parts):  # the stack runs all parts, even if some of them fail
                if is_due:
                    stack.callback(self._try, doing, subject, call)

    def _try(self, doing: str, subject: str, call: Callable[[], None]) -> None:
        try:
            call()
        except RaisedInTraining:
            raise
        except Exception as error:
            try:
                self._failures.report(doing, subject, error)
            except Exception:  # with strict=True, where the run has ended already
                logger.error("The end of the session failed in %s %s.", doing, subject, exc_info=error)

    def _deliver_remainder(self, error: BaseException | None, logging_step: int | None) -> None:
        iteration = self.iteration
        self._every_step.end_step(iteration, waits=True)
        self.trainer_scalars.record_loss()
        self.model.warn_of_refused()
        self._loop_checks.end(error)
        if not self._sinks.writes_all and (isinstance(error, KeyboardInterrupt) or not is_failure(error)):
            self._sinks.skips_files = True
        last = self.last_logging_step
        if logging_step is None:
            logging_step = self.context.logging_step(iteration) if last is None else last + 1
        self._deliver_local(EndingStep(iteration, logging_step, is_remainder=True))

    def _check_parameters(self) -> None:
        last = self._results.iterations.last
        if last is not None:  # an exception may have ended the run after a step of an optimizer
            self._parameters.end(max(last, self._parameters.watch.stepped_at))
            self._send()

    def _check_contract(self, error: BaseException | None) -> None:
        """Check the contract if it was not checked before, without hiding an error that ends the run."""
        attached = self.model.attached
        has_stepped = self._loop_checks.has_stepped
        has_step = has_stepped or error is None or self._loop_checks.has_trained  # False if the first step failed
        if attached and has_step and not has_stepped:
            former_changes = self._results.coverage.changes
            self.model.note_step()
            if self._results.coverage.changes != former_changes:
                self._results.table.leave(self.iteration)
        if self._contract.keeper is None or (error is not None and not attached):
            return
        why_not = "the model did not run a training forward and backward during the session"
        if not attached:
            why_not = "the session has no model. Call attach(model) before the training"
        elif not has_step:
            why_not = "the run ended before its first optimizer step"
        elif is_in_evaluation(self.model.layers.modules):
            why_not = "the model is in evaluation mode: call model.train() before the training"
        try:
            self._contract.end_run(self.iteration - has_stepped, why_not, has_step=has_step, raises=error is None)
        finally:
            self._send()

    def _send_end(self, error: BaseException | None) -> None:
        iteration = self.iteration
        with suppress(ObservationError):  # with strict=True; something else has ended the run already
            why = "the end of the run"
            if error is not None:
                self.overflow.note(error)
                self._send()
                name = type(error).__name__
                why = f"the run was ended by {ended_by(name) or name}"
            ends_all = error is None or isinstance(error, KeyboardInterrupt)
            reserve = LEFT_FOR_PROBLEMS if error is None else 0
            self._every_step.record(why, max(iteration - 1, 0), of_all=ends_all, reserve=reserve)
            self._every_step.note_last_nonfinite(iteration)
            self._send(*dump_events(self.observation.recorder.take_written()))
            self._send_pending(at_last=True)
            if error is None and self.trainer_scalars.are_shared:
                self._exchange(losses=True, origins=True)
            self._check_facts(iteration, at_last=True)
            self._send()
            if self._sinks.records is not None:
                self._sinks.records.step = iteration
                if self._results.iterations.last is not None:
                    self._sinks.records.last = self._results.iterations.last
            self._rules.event(end_of(error, max(iteration - 1, 0), iteration))

    def _warn_never_due(self, error: BaseException | None) -> None:
        last = self._results.iterations.last
        if own_rank() or error is not None or last is None:
            return
        if text := describe_never_due(self.context.options.config, last):
            logger.warning("%s", text)
            self._send(Event("never_due", text, last, "warning"))

    def _close_sinks(self, error: BaseException | None) -> None:
        self._send_pending()
        self._sinks.close(error)

    def _close_dumps(self, error: BaseException | None) -> None:
        try:
            if self.overflow.detector is not None:
                self.overflow.detector.close(error)
        finally:
            self.observation.recorder.close()

    def _put_back(self) -> None:
        self._results.iteration = self.iteration
        self.live = False
        self._undo.close()

    # ------------------------------------------------------------------ forks

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def _is_abandoned(self) -> bool:
        self.context.inspector.keep()  # before a forward reads it
        return self.live and os.getpid() != self._process  # each forward asks

    def _warn_once(self, text: str) -> None:
        if self.context.notices.first(text):
            logger.warning("%s", text)
