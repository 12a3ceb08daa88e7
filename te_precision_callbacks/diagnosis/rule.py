"""Rules: rows with a problem, its data, severity, reason and remedy; and the shapes of their checks.

A row of the table of rules has a shape with its data and thresholds:

- :class:`AboveLimit`: a statistic is at or above a limit, in several collection steps in a row;
- :class:`InARow`: another condition on a statistic, in several collection steps in a row;
- :class:`FactHolds`: a fact about the run;
- :class:`Reported`: an event of the run;
- :class:`Changed`: a sudden change, as the watch of every step reports it, such as layers that it misses.

Three more are in the modules of their rows: :class:`~te_precision_callbacks.diagnosis.rules.training.Logged`, a number
that the trainer logs, :class:`~te_precision_callbacks.diagnosis.rules.parameters.ParameterRule`, a problem of
parameters, and :class:`~te_precision_callbacks.diagnosis.rules.quantized.ScaleCheck`, a scale compared with its amax.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.flight.changes import LEAST_HISTORY, describe_absences
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Mask, holds_any

_LAST_STEPS = 64
"""The last steps with data, one of which is the last good one of a new finding; ``needed`` is at most as large."""

Subject = Literal["tensor", "layer", "group of similar layers", "model", "config"]


class Sighting(NamedTuple):
    """The result of a rule in a step.

    Attributes:
        seen: a description with the values of the first layer.
        layers: in any order.
        since: the first iteration; None for a problem from the start.
        severity, remedy: by default the rule's.
        key: distinguishes findings of a rule and a tensor.
        replaces: whether severity and description replace the finding's, at the end of a run.
        withdraws: whether the finding only held in the first steps, and is dropped.
    """

    seen: str
    layers: tuple[str, ...] = ()
    tensor: str = ""
    statistic: str = ""
    since: int | None = None
    severity: Severity | None = None
    patch: str = ""
    key: str = ""
    remedy: str = ""
    replaces: bool = False
    withdraws: bool = False


Sightings = Iterable[Sighting]


class Streak(NamedTuple):
    """Steps in a row: the first one, and their number."""

    first: int
    steps: int


@dataclass(kw_only=True)
class RuleCheck:
    """Checks one rule in one run, step by step. A subclass has one or more of these methods, which return sightings:

    - ``facts(facts: Facts)``: checks the facts of the run;
    - ``step(numbers: StepNumbers)``: checks the statistics of a step, within ``np.errstate(all="ignore")``;
    - ``scalars(iteration: int, values: Mapping[str, float])``: checks metrics of the trainer in an iteration; they may
      come later than ``step``;
    - ``event(event: Event)``: checks an event of the run, such as a broken contract or the exception that ended it.

    Attributes:
        needed: the minimum number of steps with data, and of steps in a row with a problem.
        applies: whether the rule applies to the run; None while unknown.
        run: the present facts of the run.
        checked: whether there was enough data.
        lacks: why there are no data; empty if that is not known.
        failed: the exception of the check, which then ends; empty without one.
        steps: the last steps with data.
        streaks: condition -> row -> the steps in a row so far; only of conditions that hold now.
    """

    needed: int = 1
    applies: bool | None = True
    kind_of_step: str = "collection step"
    run = Facts()
    checked = False
    lacks = ""
    failed = ""

    def __post_init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_LAST_STEPS)
        self.streaks: dict[tuple[object, ...], dict[int, Streak]] = {}

    def note_data(self, iteration: int) -> None:
        if not self.steps or self.steps[-1] != iteration:
            self.steps.append(iteration)
            self.checked = len(self.steps) >= self.needed

    @property
    def why_not(self) -> str:
        if self.steps and not self.checked:
            return f"not enough {self.kind_of_step}s ({len(self.steps)} of {self.needed})"
        return self.lacks

    def in_a_row(
        self,
        numbers: StepNumbers,
        statistic: str,
        holds: Mask,
        describe: Callable[[int], str],
        *,
        reported: Mask | None = None,
        severity: Severity | None = None,
        key: str = "",
        steps: int = 0,
    ) -> Sightings:
        """Yield a sighting of each tensor, with all layers where a condition holds in several collection steps in a
        row. Steps without the statistic of the tensor are skipped.

        Args:
            holds: [rows]: whether the condition holds; rows without the statistic are left out.
            describe: row -> the description, of the first layer in execution order.
            reported: [rows]: whether to report the layer; None for all layers.
            key: of the sightings; distinguishes several conditions on a statistic, as severity and steps do.
            steps: how many steps in a row; 0 for ``needed``.
        """
        condition = statistic, key, severity, steps
        former = self.streaks.pop(condition, {})
        if not former and not holds_any(holds):
            return
        column = numbers.column(statistic)
        streaks = {row: streak for row, streak in former.items() if numbers.tensors[row] not in column.tensors}
        lasting: dict[str, list[int]] = {}
        for row in column.rows[holds[column.rows]].tolist():
            first, count = former.get(row, (numbers.iteration, 0))
            streaks[row] = Streak(first, count + 1)
            if count + 1 >= (steps or self.needed) and (reported is None or reported[row]):
                lasting.setdefault(str(numbers.tensors[row]), []).append(row)
        if streaks:
            self.streaks[condition] = streaks
        for tensor, rows in lasting.items():
            rows = numbers.in_order(rows)
            layers = tuple(map(numbers.names.__getitem__, rows))
            since = min(streaks[row].first for row in rows)
            yield Sighting(describe(rows[0]), layers, tensor, column.label(rows[0]), since, severity, key=key)

    def by_severity(
        self,
        numbers: StepNumbers,
        statistic: str,
        warnings: Mask,
        notes: Mask,
        describe: Callable[[int], str],
        steps: int = 0,
    ) -> Sightings:
        """Yield sightings like :meth:`in_a_row`, as a warning for some layers and a note for others."""
        yield from self.in_a_row(numbers, statistic, warnings, describe, severity="warning", steps=steps)
        yield from self.in_a_row(numbers, statistic, notes, describe, severity="note", steps=steps)


class RuleError(ValueError):
    """A row of the table of rules contradicts itself."""


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules. Rows with the same id are variants of a rule, each with texts and a check. A
    text may have several lines; ``condition`` names thresholds of the check, as in ``{limit:g}``.

    Attributes:
        id: its name, for ``te-precision rules ID`` and for ``on_finding=``.
        title: the problem, in one line; no two rows have the same one.
        subject: the kind of subject.
        needs: the required data.
        collect: the options of a config that collect these data.
        condition: the condition, with thresholds.
        silent: healthy cases that are not reported.
        severity: the worst severity of its findings, unless a sighting has one.
        recipes: the recipes it applies to; empty for all.
        source: the source of the rule and its thresholds.
        disproof: evidence that there is no problem.
        cost: the cost of the remedy; empty without one.
        check: creates a check for a run; of a known shape with the column and the thresholds.
        essential: whether an all-clear requires this rule.
        consequence_of: ids or titles of rules that can cause its findings, such as ``growth``; ``growth of weight``: of
            a tensor.
        variants: of the first row of a rule, the others.

    Raises:
        RuleError: the check lacks its column or a threshold, or ``condition`` names a threshold that the check lacks.
    """

    id: str
    title: str
    subject: Subject
    needs: str
    collect: str
    condition: str
    silent: str
    source: str
    why: str
    disproof: str
    remedy: str
    check: Callable[[], RuleCheck]
    severity: Severity = "warning"
    recipes: tuple[str, ...] = ()
    cost: str = ""
    essential: bool = False
    consequence_of: tuple[str, ...] = ()
    variants: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        try:
            thresholds = vars(self.check())
        except (TypeError, ValueError) as error:
            raise RuleError(f"rule {self.id!r}: its check cannot be created: {error}") from None
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, " ".join(text.split()))
        try:
            object.__setattr__(self, "condition", self.condition.format(**thresholds))
        except (KeyError, ValueError) as error:
            raise RuleError(f"rule {self.id!r}: condition= names {error}, which its check lacks") from None


Applies = Callable[[Facts], bool | None]
"""Returns whether a rule applies to a run; None while unknown."""

Find = Callable[[Any, StepNumbers], Sightings]
"""Yields the sightings of a check in a step."""


@dataclass(kw_only=True)
class InARow(RuleCheck):
    """A condition on a statistic in ``needed`` collection steps in a row. It applies to runs with the statistic.

    Attributes:
        tensor: the only tensor that is checked; empty for all.
        also: further statistics that it needs.
        applies_to: returns whether it applies to a run that lacks the statistic so far.
        is_strict: True if it checks only the runs that it applies to.
        lacks_in: returns why a run lacks the statistic; empty for no reason.
        find: yields the sightings of a step.
    """

    statistic: str
    tensor: str = ""
    also: Sequence[str] = ()
    applies_to: Applies = lambda facts: False
    is_strict: bool = False
    lacks_in: Callable[[Facts], str] = lambda facts: ""
    find: Find

    def facts(self, facts: Facts) -> Sightings:
        applies = self.applies if self.steps else self.applies_to(facts)
        self.applies = self.applies if applies is None else applies
        self.lacks = self.lacks_in(facts)
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        if not (holds_any(numbers.are_known(self.statistic, self.tensor)) and all(map(numbers.has, self.also))):
            return ()
        if self.is_strict and not self.applies_to(numbers.facts):
            return ()
        self.applies = True
        self.note_data(numbers.iteration)
        return self.find(self, numbers)


def runs_low_precision(facts: Facts) -> bool | None:
    return facts.has_low if facts.layers_that_ran else None


def _above_limit(check: AboveLimit, numbers: StepNumbers) -> Sightings:
    values = numbers.finite(check.statistic)
    holds = (values >= check.limit) & (values < check.below) & numbers.are_known(check.statistic, check.tensor)
    for sighting in check.in_a_row(numbers, check.statistic, holds, lambda row: check.seen.format(values[row])):
        # The layer of a statistic of the model has no name.
        yield sighting._replace(layers=tuple(filter(None, sighting.layers)), remedy=check.remedy(numbers.facts))


@dataclass(kw_only=True)
class AboveLimit(InARow):
    """A statistic that is at or above ``limit``, and below ``below``, in ``needed`` collection steps in a row.

    Attributes:
        seen: the description, with a place for the value.
        remedy: returns the remedy in a run; empty for the rule's.
    """

    limit: float
    seen: str
    below: float = math.inf
    remedy: Callable[[Facts], str] = lambda facts: ""
    find: Find = _above_limit


@dataclass(kw_only=True)
class FactHolds(RuleCheck):
    """A fact about a run.

    Attributes:
        find: yields the sightings, if the rule applies to the run.
    """

    find: Callable[[Facts], Sightings]
    applies_to: Applies

    def facts(self, facts: Facts) -> Sightings:
        applies = self.applies_to(facts)
        if applies is None:
            return ()
        self.applies = self.checked = applies
        return self.find(facts) if applies else ()


@dataclass(kw_only=True)
class Reported(RuleCheck):
    """An event of the run; the rule applies to runs that have one.

    Attributes:
        kinds: the kinds of events, and of changes.
        find: yields the sightings of an event, and sets ``lacks`` where something could not be checked.
        is_of_all: whether the rule applies to all runs instead, and is checked in those with a step.
        events: these events so far.
    """

    kinds: Sequence[str]
    find: Callable[[Reported, Event], Sightings]
    is_of_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.applies = self.is_of_all
        self.events: list[Event] = []

    def facts(self, facts: Facts) -> Sightings:
        self.checked |= self.is_of_all and facts.has_run and not self.lacks
        return ()

    def event(self, event: Event) -> Sightings:
        if event.data.get("kind", event.kind) in self.kinds:
            self.events.append(event)
            self.applies = True
            self.checked |= not self.is_of_all
            if event.kind == "changed":
                self.note_data(event.iteration - 1)  # which was watched
            yield from self.find(self, event)
            self.checked &= not self.lacks


NEEDS_EACH_STEP = f"every_step=True, and {LEAST_HISTORY} steps"
COLLECT_EACH_STEP = "every_step=True, the default, and a longer run"
"""The data of :class:`Changed`."""


def layers_of_change(event: Event) -> tuple[str, ...]:
    return tuple(layer for layer, _ in event.data["slots"])


def _with_layers(check: Reported, event: Event) -> Sightings:
    return [Sighting(event.text, layers_of_change(event), since=event.iteration)]


@dataclass(kw_only=True)
class Changed(Reported):
    """A sudden change that the watch of every step has found; the rule applies to runs with that watch."""

    find: Callable[[Reported, Event], Sightings] = _with_layers

    def event(self, event: Event) -> Sightings:
        if event.kind == "every_step_watched":
            self.applies = self.checked = True
        return super().event(event)


def find_absences(check: Reported, event: Event) -> Sightings:
    """Find layers that are missed since a step, as one finding: a note once all of them are back."""
    absences: dict[str, tuple[int, int | None]] = {}  # layer -> first and last step; None if it goes on
    for change in check.events:
        absences.update(dict.fromkeys(layers_of_change(change), (change.data["since"], change.data["until"])))
    spans = absences.values()
    severity: Severity = "warning" if any(last is None for _, last in spans) else "note"
    latest = max(first if last is None else last for first, last in spans)
    text = describe_absences(event.data["kind"], spans)
    sighting = Sighting(text, layers_of_change(event), since=latest, severity=severity)
    return [sighting._replace(replaces=True), sighting]
