"""Checks at the end of each step: the rules, the precision contract, the parameters, and activation overflow."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from te_precision_callbacks.base.counts import group_by_key, many, some_of
from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import OptionError, SessionError
from te_precision_callbacks.base.ranks import own_rank, world_size
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.coverage.contract_keeper import (
    ContractKeeper,
    PrecisionContractError,
    require_layers,
    shared_products,
)
from te_precision_callbacks.coverage.coverage import MOST_WITHOUT_BACKWARD, NOTHING, Coverage
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError, read_on_finding, read_reactions
from te_precision_callbacks.diagnosis.facts import Facts, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.rules.parameters import RULE_OF, ParameterProblems, layers_of
from te_precision_callbacks.flight.changes import ABSENCES, LEAST_HISTORY, Change, Changes, Kind
from te_precision_callbacks.flight.rows import FINITE_AGAIN, StepRow, TensorSlot
from te_precision_callbacks.flight.steps import LastSteps, Origin
from te_precision_callbacks.flight.updates import UpdateSizes
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from te_precision_callbacks.parameters.parameter import Parameter, Problem
from te_precision_callbacks.parameters.replicas import Replicas
from te_precision_callbacks.parameters.watch import ParameterWatch
from te_precision_callbacks.runs.sink import FactTables
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event, Scalars, Severity, StepRecords

logger = logging.getLogger(__name__)

_NOT_REPORTED = ("parameters", "first_nonfinite", "changed")
"""The kinds of events that their sources do not report."""

MOST_RECORDS = 8
"""The most times that the last steps of a run are recorded."""

LEFT_FOR_PROBLEMS = 4
"""How many of them are for problems."""

MOST_CHANGES = 32
"""The most events of a kind of change."""

MOST_NAMES = 1000
"""Maximum number of parameters that an event names per problem."""


class RuleChecks:
    """Applies the rules during a run, warns of each finding once, and stops the run if ``on_finding=`` demands it.

    Findings are added to the events of the context.
    """

    def __init__(self, context: RunContext, every_step: EveryStepCheck) -> None:
        self._context = context
        self._every_step = every_step
        self._diagnosis = context.results.diagnosis
        self._splitter = Splitter(context.results.series.__getitem__)
        self._on_finding = read_on_finding(context.options.on_finding)
        reactions = read_reactions(context.options.on_finding)
        self.stops_for_nonfinite = "stop" in map(reactions.get, ("nonfinite", *SEVERITIES))
        self._stopping: list[Finding] = []
        self._may_drop = False  # whether the script may drop the batch of this step
        self._held: list[Finding] = []  # of inf and nan in steps without an update

    def begin_step(self, without_update: int) -> None:
        """Begin the checks of a step, given the number of steps since the last update.

        A script that drops bad batches by itself is not stopped: the next update is checked before it is made. One that
        drops batch after batch is.
        """
        self._may_drop = 0 < without_update <= FINITE_AGAIN
        if without_update > FINITE_AGAIN:
            self._stopping += self._held
        if not self._may_drop:
            self._held.clear()

    def facts(self, facts: FactTables, iteration: int) -> None:
        checked = Facts.from_tables(facts.tables, iteration, Settings.from_run(facts.run))
        self._react(self._diagnosis.set_facts(checked, iteration), iteration)

    def scalars(self, scalars: Scalars) -> None:
        """Check the trainer's scalars; findings of other ranks than 0 name the rank."""
        findings = self._diagnosis.scalars(scalars.iteration, scalars.values, own_rank() or None)
        self._react(findings, scalars.iteration)

    def event(self, event: Event, rank: int | None = None) -> None:
        """Check an event, and report its findings, unless its source has reported it; ``rank``: if of another rank."""
        if rank is None and not event.data.get("of_all"):
            rank = own_rank() or None
        findings = self._diagnosis.event(event, rank)
        if event.kind in _NOT_REPORTED:
            self._react(findings, event.iteration)

    def records(self, records: StepRecords) -> StepRecords:
        """Check the statistics of a step, and return its records with the number of findings so far."""
        values = np.frombuffer(records.values)
        rank = own_rank() if world_size() > 1 and all(records.own) else None
        numbers = self._splitter.step(records.iteration, records.series, values, records.unscaled, rank)
        self._react(self._diagnosis.step(numbers), records.iteration)
        problems = self._diagnosis.problems
        return replace(records, findings=problems) if problems else records

    def stop_if_wanted(self, *, at_once: bool = False) -> None:
        """Stop the run on all ranks if a finding of one rank demands it; all ranks report the same first finding.

        Args:
            at_once: send a message for it, instead of a request with the next values.
        """
        ranks = self._context.ranks
        is_stopping = bool(self._stopping)
        if at_once:
            stops = ranks.any("findings that stop", "stopping the run", own=is_stopping)
        else:
            stops = ranks.request_stop(own=is_stopping)
        if stops:
            rank_findings = [finding for finding in self._stopping if finding.ranks][:1]
            first = sorted(ranks.pool(rank_findings, "findings", Finding), key=lambda finding: finding.since or 0)[:1]
            self._stopping += [finding for finding in first if finding not in self._stopping]
            for finding in first:
                if own_rank() not in finding.ranks:
                    self._diagnosis.adopt(finding)
            self._stop()

    def stop_at_the_end(self) -> None:
        """Raise a finding that would have stopped the run in another step."""
        if self._stopping:
            self._stop()

    def _stop(self) -> None:
        findings = self._stopping
        self._stopping = []
        text = "; ".join(map(str, findings)) or "found on another rank, see the error of that rank"
        remedies: dict[str, str] = {}
        for finding in findings:
            remedy = f" For {finding.rule}: {finding.remedy}."
            remedies[finding.title] = max(remedies.get(finding.title, ""), remedy, key=len)
        advice = "".join(remedies.values())
        if len(remedies) == 1:
            advice = f" {advice.partition(': ')[2]}"
        raise PrecisionFindingError(f"A finding stops the training (on_finding=): {text}.{advice}", findings)

    def _react(self, findings: Sequence[Finding], iteration: int) -> None:
        for finding in findings:
            data = finding.as_json()
            severity = "info" if finding.severity == "note" else finding.severity
            if severity == "error":
                self._every_step.record(finding.in_short, iteration)
            layer = finding.layers[0] if finding.layers else ""
            self._context.events.append(
                Event("finding", str(finding), iteration, severity, layer=layer, tensor=finding.tensor, data=data)
            )
            stops = self._calls_for_stop(finding)
            if stops and self._may_drop and finding.rule == "nonfinite":
                self._held.append(finding)
                stops = False
            if stops:
                self._stopping.append(finding)
                # The error that stops the run has the details; on several ranks it is raised in a later step.
                logger.warning("The finding %s stops the training.", finding.in_short)
            elif finding.severity != "note" and (finding.ranks or own_rank() == 0):
                logger.warning(
                    "%s: %s. What to do: %s.%s More: te-precision rules %s",
                    finding.severity.capitalize(),
                    finding,
                    finding.remedy,
                    f" Not a problem if {finding.disproof}." if finding.disproof else "",
                    finding.rule,
                )

    def _calls_for_stop(self, finding: Finding) -> bool:
        try:
            reaction = self._on_finding(finding)
            if reaction not in (None, "stop"):
                raise OptionError(f"the function may return 'stop' or None, not {reaction!r}")
            return reaction is not None
        except Exception as error:
            self._context.failures.report("calling on_finding= for", finding.rule, error)
            return False


class ContractCheck:
    """Checks the precision contract, and shares the products of the first steps with the other ranks.

    Products are shared until all ranks have had a backward.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._results = context.results
        self._ranks = context.ranks
        self._contract = context.options.require
        self.keeper = None if self._contract is None else ContractKeeper(self._contract)
        self._shares_left = 0

    def attach(self, model: ObservedModel) -> None:
        """Share products from the next step on; raise a ConfigError for a contract about layers that no rank has, or
        about modules without products alone."""
        self._shares_left = MOST_WITHOUT_BACKWARD if self._ranks.several else 0
        if self._contract is not None:
            without_products = dict.fromkeys(model.names_without_products())
            names = [name for name in model.all_names if name not in without_products]
            try:
                require_layers(self._contract, self._ranks.pool(names, "names", str), without_products)
            except ConfigError:
                self.keeper = None  # an invalid contract is not checked at the end of the run
                raise

    @property
    def _changes(self) -> int:
        return self._results.table.changes + self._results.coverage.changes

    def begin_step(self, iteration: int) -> None:
        if self.keeper is not None:
            self.keeper.begin_step(self._changes, iteration, self._ranks)

    def end_step(self, iteration: int) -> None:
        """Check the contract if it is due.

        Raises:
            PrecisionContractError: the contract is broken, and ends the run.
        """
        results = self._results
        keeper = self.keeper
        if self._shares_left:
            rank_coverage = results.coverage_at(iteration)
            shared = Coverage(shared_products(rank_coverage, self._ranks, "products of the first step", mean=True))
            results.coverage.put_other_ranks(shared)
            is_over = all(
                self._ranks.pool([rank_coverage.has_backward or not rank_coverage], "backwards of the first step", bool)
            )
            is_over = is_over or not self._ranks.are_connected  # disconnected ranks cannot share products
            self._shares_left = 0 if is_over else self._shares_left - 1
        if keeper is not None:
            self._record(keeper, functools.partial(keeper.end_step, results.coverage_at), iteration)

    def end_run(self, iteration: int, why_not: str, *, has_step: bool, raises: bool) -> None:
        """Check the contract at the end of the run, as :meth:`end_step`, if it was not checked before.

        Args:
            why_not: the reason why the contract cannot be checked, if so.
            raises: whether to raise; False if another error ends the run, which must not be hidden.
        """
        keeper = self.keeper
        results = self._results
        if keeper is not None:
            has_run = has_step and iteration in results.iterations
            coverage = results.coverage_with_other_ranks(iteration) if has_run else NOTHING
            check = functools.partial(keeper.end_run, results.coverage_at, coverage, self._changes)
            self._record(keeper, functools.partial(check, why_not=why_not, raises=raises), iteration)
            if steps := keeper.unchecked_steps:
                self._context.note_unobserved(
                    f"the contract (require=) was not checked in step {some_of(map(str, steps))}: a forward with other"
                    " operations ran only once, so its products are estimates"
                )

    def _record(self, keeper: ContractKeeper, check: Callable[..., str | None], iteration: int) -> None:
        broken: str | None = None
        try:
            broken = check(iteration=iteration, ranks=self._ranks)
        except PrecisionContractError as error:
            broken = str(error)
            raise
        finally:
            if broken is not None:
                text = broken or "The run meets its precision contract."
                data = {"checked": text != keeper.unchecked}
                severity: Severity = "warning" if broken else "info"
                self._context.events.append(
                    Event("contract_checked", text, iteration, severity, phase="step", data=data)
                )


class ParameterChecks:
    """Checks the parameters of a run, and adds an event per result, for the rules and the records."""

    def __init__(
        self, context: RunContext, model: ObservedModel, scalars: ScalarBuffer, every_step: EveryStepCheck
    ) -> None:
        self._ranks = context.ranks
        self._events = context.events
        self._every_step = every_step
        self._failures = context.failures
        self._replicas = Replicas(model, context.ranks)
        self.watch = ParameterWatch(model, scalars, context.failures)
        self._problems = ParameterProblems(self.watch)
        self._checked: set[str] = set()
        self._unmatched: list[str] = []

    @torch.no_grad()
    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, iteration: int, order: int, *, is_collected: bool
    ) -> None:
        """Check the parameters before an optimizer steps; see :meth:`ParameterWatch.before_step`."""
        with self._failures.guard("checking the parameters of", type(optimizer).__name__):
            if self._replicas.needs_start and self.watch.listed.stepped_by(optimizer).held:
                self._replicas.begin()
        for rise in self.watch.before_step(optimizer, iteration, order, is_collected=is_collected):
            text = f"The learning rate rose from {rise.before:.3g} to {rise.now:.3g}."
            self._events.append(Event("learning_rate_rose", text, iteration))

    def end_step(self, iteration: int, stepped: Sequence[Parameter], norm: torch.Tensor | None) -> None:
        """Check an iteration, and exchange the problems, so that all ranks report the same.

        Args:
            stepped: as :meth:`stepped` returned them.
            norm: the gradient norm in clipping; None without clipping.
        """
        broken, is_new = self.watch.end_step(iteration, stepped)
        problems: list[Problem] = []
        with self._failures.guard("checking", "the parameters"):
            problems = self._problems.with_shares(broken) if broken else []
            if is_new:
                problems = self._problems.find() + problems
        try:
            problems = self._replicas.exchange(problems, iteration, norm, is_due=self.watch.is_due)
        except Exception as error:
            self._ranks.leave(error)
            self._failures.report("comparing", "the parameters of the ranks", error)
        for span, names in self.watch.take_vanished().items():
            slots = tuple(TensorSlot(layer, "wgrad") for layer in layers_of(names))
            self._events.append(_event_of_change(Change("frozen", slots, *span)))
        self._record(problems, iteration, of_all=self._ranks.are_connected)

    @property
    def adds_eps(self) -> bool | None:
        """Return whether an optimizer of the model adds ``eps`` as Adam does; None before the first step."""
        adding = [stepped.adds_eps for stepped in self.watch.listed.stepped.values() if stepped.adds_eps is not None]
        if adding:
            return any(adding)
        return None

    def end(self, iteration: int) -> None:
        """Check all parameters for inf and nan at the end of a run."""
        broken = self.watch.end(iteration)
        problems = self._problems.find(at_last=True) + self._problems.with_shares(broken)
        self._record(self._replicas.take_news() + problems, iteration, of_all=False)

    def _record(self, problems: list[Problem], iteration: int, *, of_all: bool) -> None:
        checked = self._problems.checked | self._replicas.checked
        unmatched = self._problems.unmatched
        if not problems and checked <= self._checked and unmatched == self._unmatched:
            return
        self._checked |= checked
        self._unmatched = unmatched
        if any(problem.what.startswith("nonfinite") for problem in problems):
            self._every_step.read()  # it may know where they began
        unique = {(problem.what, problem.name): problem for problem in problems}.values()
        problems_by_kind = group_by_key((problem.what, problem) for problem in unique)
        rows: list[dict[str, Any]] = []
        for what, same_problems in problems_by_kind.items():
            names = [problem.name for problem in same_problems[:MOST_NAMES]]
            since = min(problem.since for problem in same_problems)
            rows.append({"what": what, "names": names, "since": since, "number": same_problems[0].number})
        data = {"checked": sorted(checked), "problems": rows, "of_all": of_all, "unmatched": unmatched}
        text = "Parameters were checked"
        severity: Severity = "info"
        if problems:
            rules = ", ".join(dict.fromkeys(RULE_OF.get(what, what) for what in problems_by_kind))
            text = f"{many(len(problems), 'problem')} in parameters: {rules}"
            severity = "warning"
        self._events.append(Event("parameters", f"{text}.", iteration, severity, phase="step", data=data))


class EveryStepCheck:
    """Reads the watch of every step, and adds events for the origin of inf and nan and for sudden changes.

    Attributes:
        unsent: origins of inf and nan that the other ranks have not received yet.
        is_requested: whether to record the last steps at the end of this step.
    """

    def __init__(self, context: RunContext, watch: EveryStep) -> None:
        self._events = context.events
        self._failures = context.failures
        self._watch = watch
        self.steps = LastSteps(watch.ring.slots)
        self.is_requested = False
        self._changes = Changes(watch.ring.slots)
        self._updates = UpdateSizes(watch.ring)
        self.unsent: list[Origin] = []
        self._held: list[Origin] = []
        self._watched = 0
        self._records_left = MOST_RECORDS
        self._left = dict.fromkeys(get_args(Kind), MOST_CHANGES)

    def end_step(self, iteration: int, *, waits: bool, stepped: Iterable[Parameter] = ()) -> None:
        """End a step.

        Args:
            waits: whether to read all steps so far from the device, after waiting for it.
            stepped: the weights that optimizers have stepped.
        """
        try:
            if self._watch.is_on and not is_capturing():
                self._updates.add(stepped)
            self._watch.end_step()
            self._add(self._watch.ring.end_step(iteration))
        except Exception as error:
            self._watch.is_on = False
            self._failures.report("reading what was watched in", f"iteration {iteration}", error)
        if waits or self.is_requested:
            self.read()
            self.record_requested(iteration)

    def record_requested(self, iteration: int) -> None:
        if self.is_requested:
            self.is_requested = False
            self.record("SIGUSR1 was received", iteration, reserve=LEFT_FOR_PROBLEMS + 1)

    def read(self) -> None:
        """Read all steps so far from the devices, and wait for them."""
        try:
            self._add(self._watch.ring.take())
        except Exception as error:
            self._watch.is_on = False
            self._failures.report("reading", "what was watched in the last steps", error)

    def record(self, why: str, iteration: int, *, of_all: bool = False, reserve: int = 0) -> None:
        """Add an event with the last steps, if they were not recorded too often.

        Args:
            of_all: whether all ranks record them for the same reason; only the first rank then writes a file.
            reserve: how many records are left for other reasons: for problems and the end of the run.
        """
        if self._records_left > reserve and self.steps.rows:
            self._records_left -= 1
            data = {"of_all": of_all, "is_problem": not reserve, **self.steps.as_json()}
            count = many(len(self.steps.rows), "step")
            self._events.append(Event("last_steps", f"The last {count} before: {why}.", iteration, data=data))

    def add_held(self, iteration: int, broken: tuple[int, int] | None) -> None:
        """Add the events for weights that an optimizer has written.

        Args:
            iteration: the current one.
            broken: see :attr:`FiniteGradients.broken`.
        """
        for origin in self._held:
            event = _event_of(origin)
            if broken is not None and broken[0] == origin.iteration and broken[1] <= origin.place:
                self._events.append(replace(event, iteration=iteration, phase="step"))  # behind that of the gradients
            else:
                self._events.insert(0, event)
        self._held.clear()

    def note_last_nonfinite(self, iteration: int) -> None:
        """Add an event for the last step with inf or nan, at the end of the run."""
        self.add_held(iteration, None)
        last = self.steps.last
        if last is not None:
            text = f"The last step with inf or nan is {last.iteration}."
            phase = "backward" if last.in_backward else "forward"
            self._events.append(Event("last_nonfinite", text, last.iteration, phase=phase))

    def exchange_origins(self, ranks: Ranks) -> list[tuple[int, Event]]:
        """Return rank and event of each other rank that has found where inf and nan began."""
        this_rank = own_rank()
        entries = ranks.pool([(this_rank, origin) for origin in self.unsent], "origins", tuple[int, Origin])
        self.unsent.clear()
        return [(rank, _event_of(origin)) for rank, origin in entries if rank != this_rank]

    def _add(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            origin = self.steps.add(row)
            if origin is not None:
                self.unsent.append(origin)
                if origin.after_update and origin.tensor == "weight":  # the gradients may have brought it
                    self._held.append(origin)
                else:
                    self._events.append(_event_of(origin))
            ended = self.steps.take_ended()
            if ended is not None:
                text = f"Inf and nan of step {ended.iteration} are not in the {FINITE_AGAIN} optimizer steps after it."
                self._events.append(Event("finite_again", text, row.iteration, data={"stepped": ended.stepped}))
            for change in self._changes.add(row):
                is_end = change.kind in ABSENCES and change.until is not None
                self._left[change.kind] -= not is_end
                if is_end or self._left[change.kind] >= 0:
                    self._events.append(_event_of_change(change))
            self._watched += bool(row.order)
            if self._watched == LEAST_HISTORY and row.order:
                layers = {slot.layer for slot in self._watch.ring.slots}
                text = f"The GEMMs of {many(len(layers), 'layer')} are watched in every step"
                if row.unwatched:
                    text += f", except {some_of(row.unwatched)}"
                self._events.append(Event("every_step_watched", f"{text}.", row.iteration))


def _event_of_change(change: Change) -> Event:
    return Event("changed", str(change), change.since, data=change.as_json())


def _event_of(origin: Origin) -> Event:
    phase = "backward" if origin.in_backward else "forward"
    text = f"{origin.tensor} of {origin.layer}: {origin}."
    data = origin.as_json()
    return Event("first_nonfinite", text, origin.iteration, "error", phase, origin.layer, origin.tensor, data=data)


class OverflowCheck:
    """Detects activation overflow; ``detector`` is None without detection, and before a model is attached."""

    def __init__(self, context: RunContext) -> None:
        self.detector: DebugActivationOverflow | None = None
        self._context = context
        self._model: Model = ()
        self._noted: ActivationOverflowError | None = None

    def attach(self, model: Model) -> None:
        context = self._context
        options = self._context.options
        if ACTIVATION_OVERFLOW not in options.debug:
            return
        former = self.detector
        if former is not None:
            if named_roots(model) == named_roots(self._model):
                return  # the detector notices modules that were replaced in the model
            former.close(SessionError("Another model was attached."))
        self.detector = DebugActivationOverflow(model, distributed=options.reduce, process_group=options.process_group)
        self.detector.join_session(messages=context.ranks.messages, step=context.describe_step)
        self._model = model
        if former is not None:
            self.detector.loss_scaled = former.loss_scaled

    def check(self) -> None:
        if self.detector is not None:
            try:
                self.detector.check()
            except ActivationOverflowError as error:
                self.note(error)
                raise

    def note(self, error: BaseException) -> None:
        """Add an event for an activation overflow that stopped the training, once."""
        if isinstance(error, ActivationOverflowError) and error is not self._noted:
            self._noted = error
            data = {"class": error.class_name, "role": error.role, "batch": error.batch, "rank": error.rank}
            phase = "backward" if error.role.startswith("grad") else "forward"
            self._context.events.append(
                Event("nonfinite", str(error), self._context.iteration, "error", phase, error.path, data=data)
            )
