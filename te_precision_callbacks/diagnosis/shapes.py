"""The shapes of rules. A row of the table of rules has a shape with its data and thresholds:

- :class:`AboveLimit`: a statistic is at or above a limit, in several collection steps in a row;
- :class:`InARow`: another condition on a statistic, in several collection steps in a row;
- :class:`Logged`: a condition on the history of a number that the trainer logs;
- :class:`FactHolds`: a fact about the run;
- :class:`Reported`: an event of the run;
- :class:`Changed`: a sudden change, as the watch of every step reports it, such as layers that it misses.

Two more are beside their rows: :class:`~te_precision_callbacks.diagnosis.rules.parameters.ParameterRule`, a problem of
parameters, and :class:`~te_precision_callbacks.diagnosis.rules.scales.ScaleCheck`, a scale compared with its amax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import RuleCheck, Sighting, Sightings, Streaks
from te_precision_callbacks.flight.changes import LEAST_HISTORY, Kind, describe_absences
from te_precision_callbacks.runs.summary import is_loss, loss_first, words_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import holds_any

Applies = Callable[[Facts], bool | None]
"""Returns whether a rule applies to a run; None while unknown."""


Find = Callable[[StepNumbers, Streaks], Sightings]
"""Yields the sightings of a step, from the streaks."""


@dataclass(kw_only=True)
class InARow(RuleCheck):
    """A condition on a statistic in ``needed`` collection steps in a row. Without ``applies_to``, it applies to runs
    with the statistic.

    Attributes:
        tensor: the only tensor that is checked; empty for all.
        also: further statistics that it needs.
        is_strict: True if it checks only the runs that it applies to.
        lacks_in: returns why a run lacks the statistic; empty for no reason.
        find: yields the sightings of a step.
    """

    statistic: str
    tensor: str = ""
    also: Sequence[str] = ()
    applies_to: Applies | None = None
    is_strict: bool = False
    lacks_in: Callable[[Facts], str] = lambda facts: ""
    find: Find = lambda numbers, streaks: ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.applies = self.applies_to is not None

    def facts(self, facts: Facts) -> Sightings:
        applies = None if self.applies_to is None or self.steps else self.applies_to(facts)
        self.applies = self.applies if applies is None else applies
        self.lacks = self.lacks_in(facts)
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        if not (holds_any(numbers.are_known(self.statistic, self.tensor)) and all(map(numbers.has, self.also))):
            return ()
        if self.is_strict and self.applies_to is not None and not self.applies_to(numbers.facts):
            return ()
        self.applies = self.applies or self.applies_to is None
        self.note_data(numbers.iteration)
        return self.find(numbers, self.streaks)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.find = self._above_limit

    def _above_limit(self, numbers: StepNumbers, streaks: Streaks) -> Sightings:
        values = numbers.finite(self.statistic)
        holds = (values >= self.limit) & (values < self.below) & numbers.are_known(self.statistic, self.tensor)
        for sighting in streaks.sightings(numbers, self.statistic, holds, lambda row: self.seen.format(values[row])):
            # The layer of a statistic of the model has no name.
            yield sighting._replace(layers=tuple(filter(None, sighting.layers)), remedy=self.remedy(numbers.facts))


class LoggedNumber(NamedTuple):
    """A number that the trainer logs in an iteration, its name, and the last loss then."""

    iteration: int
    name: str
    value: float
    loss: float


@dataclass
class Metrics:
    """The trainer's metrics in an iteration.

    Attributes:
        facts: the present facts of the run.
        counts: how often each metric was logged so far.
        loss: the last loss, of the training or a part of one; nan before the first.
    """

    facts: Facts = field(default_factory=Facts)
    values: Mapping[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    loss: float = math.nan


_OF_EVALUATION = frozenset({"eval", "val", "valid", "validation", "test"})


def is_loss_of_training(name: str) -> bool:
    """Return whether a scalar is a loss of the training, or a part of one."""
    return is_loss(name) and words_of(name).isdisjoint(_OF_EVALUATION)


MOST_POINTS = 512 * 30
"""The least number of last points in a history; always a multiple of it was dropped."""


@dataclass(kw_only=True)
class Logged(RuleCheck):
    """A condition on the history of a number that the trainer logs.

    Attributes:
        number: chooses name and value of the number among the metrics; None without it.
        find: yields the sightings, from the facts and the history.
        lacks_in: returns why there is no such number among the metrics; empty for no reason.
    """

    number: Callable[[Metrics], tuple[str, float] | None]
    find: Callable[[Facts, Sequence[LoggedNumber]], Sightings]
    lacks_in: Callable[[Metrics], str] = lambda metrics: ""
    kind_of_step: str = "logged step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history: list[LoggedNumber] = []
        self._metrics = Metrics()

    def facts(self, facts: Facts) -> Sightings:
        self._metrics.facts = facts
        return self.find(facts, self.history) if self.history else ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Sightings:
        metrics = self._metrics
        metrics.values = values
        metrics.counts.update(values.keys())
        for name in loss_first(filter(is_loss_of_training, values))[:1]:
            metrics.loss = values[name]
        number = self.number(metrics)
        if number is None:
            self.lacks = self.lacks_in(metrics)
            return ()
        self.applies = True
        self.note_data(iteration)
        if len(self.history) == 2 * MOST_POINTS:
            del self.history[:MOST_POINTS]
        self.history.append(LoggedNumber(iteration, *number, metrics.loss))
        return self.find(metrics.facts, self.history)


def runs_low_precision(facts: Facts) -> bool | None:
    return facts.has_low if facts.layers_that_ran else None


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
        kinds: the kinds of events.
        find: yields the sightings of an event, or why something could not be checked; the first one stays.
        is_of_all: whether the rule applies to all runs instead, and is checked in those with a step.
    """

    kinds: Sequence[str]
    find: Callable[[Event], Iterable[Sighting | str]]
    is_of_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.applies = self.is_of_all

    def facts(self, facts: Facts) -> Sightings:
        self.checked |= self.is_of_all and facts.has_run and not self.lacks
        return ()

    def event(self, event: Event) -> Sightings:
        if event.kind in self.kinds:
            self.applies = True
            self.checked |= not self.is_of_all
            for result in self.find(event):
                if isinstance(result, Sighting):
                    yield result
                else:
                    self.lacks = self.lacks or result
            self.checked &= not self.lacks


NEEDS_EACH_STEP = f"every_step=True, and {LEAST_HISTORY} steps"
COLLECT_EACH_STEP = "every_step=True, the default, and a longer run"
"""The data of :class:`Changed`."""


def _with_layers(events: Sequence[Event]) -> Sightings:
    last = events[-1]
    return [Sighting(last.text, layers_of_change(last), since=last.iteration)]


def layers_of_change(event: Event) -> tuple[str, ...]:
    return tuple(layer for layer, _ in event.data["slots"])


@dataclass(kw_only=True)
class Changed(RuleCheck):
    """A sudden change that the watch of every step has found; ``find`` yields the sightings of its events so far."""

    change: Kind
    find: Callable[[Sequence[Event]], Sightings] = _with_layers
    applies: bool | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._events: list[Event] = []

    def event(self, event: Event) -> Sightings:
        if event.kind == "every_step_watched":
            self.applies = self.checked = True
        if event.kind != "changed" or event.data["kind"] != self.change:
            return ()
        self.note_data(event.iteration - 1)  # which was watched
        self._events.append(event)
        return self.find(self._events)


def find_absences(events: Sequence[Event]) -> Sightings:
    """Find layers that are missed since a step, as one finding: a note once all of them are back."""
    absences: dict[str, tuple[int, int | None]] = {}  # layer -> first and last step; None if it goes on
    for event in events:
        absences.update(dict.fromkeys(layers_of_change(event), (event.data["since"], event.data["until"])))
    spans = absences.values()
    severity: Severity = "warning" if any(last is None for _, last in spans) else "note"
    latest = max(first if last is None else last for first, last in spans)
    text = describe_absences(events[-1].data["kind"], spans)
    sighting = Sighting(text, layers_of_change(events[-1]), since=latest, severity=severity)
    return [sighting] if len(events) == 1 else [sighting._replace(replaces=True), sighting]
