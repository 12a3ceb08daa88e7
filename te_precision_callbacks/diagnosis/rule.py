"""Rules: a problem, its data, severity, reason and remedy."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Mask

_KEPT_STEPS = 64
"""The last steps, among which the last good one of a new finding is."""

Subject = Literal["tensor", "layer", "group of similar layers", "model", "config"]


class Sighting(NamedTuple):
    """The result of a rule in a step.

    Attributes:
        layers: in any order.
        seen: a description with the values of the first layer.
        since: the first iteration; None for a problem from the start.
        severity, remedy: by default the rule's.
        key: distinguishes findings of a rule and a tensor.
        replaces: whether severity and description replace the finding's, at the end of a run.
        withdraws: whether the finding only held in the first steps, and is dropped.
    """

    layers: tuple[str, ...]
    tensor: str
    statistic: str
    seen: str
    since: int | None
    severity: Severity | None = None
    patch: str = ""
    key: str = ""
    remedy: str = ""
    replaces: bool = False
    withdraws: bool = False


class RuleCheck:
    """Checks one rule in one run, step by step. A subclass overrides :meth:`facts`, :meth:`step`, :meth:`scalars` or
    :meth:`event`.

    Attributes:
        reads: :meth:`step` is only called in steps with one of these statistics; if empty, in all steps.
        needed: the minimum number of steps with data, and of steps in ``streaks``.
        applies: whether the rule applies to the run; None while unknown.
        checked: whether there was enough data.
    """

    reads: Collection[str] = ()
    needed = 1
    applies: bool | None = True
    checked = False
    _kind_of_step = "collection step"

    def __init__(self) -> None:
        self.streaks = ColumnStreaks(self.needed)
        self.steps: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._count = 0

    def note_data(self, iteration: int) -> None:
        if not self.steps or self.steps[-1] != iteration:
            self.steps.append(iteration)
            self._count += 1
            self.checked = self._count >= self.needed

    @property
    def why_not(self) -> str:
        if self._count:
            return f"not enough {self._kind_of_step}s ({self._count} of {self.needed})"
        return ""

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterable[Sighting]:
        """Check the statistics of a step, within ``np.errstate(all="ignore")``."""
        return ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterable[Sighting]:
        """Check metrics of the trainer in an iteration; they may come later than :meth:`step`."""
        return ()

    def event(self, event: Event) -> Iterable[Sighting]:
        """Check an event of the run, such as a broken contract or the exception that ended the run."""
        return ()


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    Attributes:
        id: its name, for ``te-precision rules ID`` and for ``on_finding=``.
        title: the problem, in one line.
        subject: the kind of subject.
        needs: the required data.
        collect: the options of a config that collect these data.
        condition: the condition, with thresholds.
        silent: healthy cases that are not reported.
        severity: the worst severity of its findings.
        recipes: the recipes it applies to; empty for all.
        source: the source of the rule and its thresholds.
        disproof: evidence that there is no problem.
        cost: the cost of the remedy; empty without one.
        check: creates a check for a run.
        essential: whether an all-clear requires this rule.
        consequence_of: ids of rules that can cause its findings.
    """

    id: str
    title: str
    subject: Subject
    needs: str
    collect: str
    condition: str
    silent: str
    severity: Severity
    source: str
    why: str
    disproof: str
    remedy: str
    check: Callable[[], RuleCheck]
    recipes: tuple[str, ...] = ()
    cost: str = ""
    essential: bool = False
    consequence_of: tuple[str, ...] = ()


class ColumnStreaks:
    """Requires that a condition holds for a tensor in ``steps`` collection steps in a row. Steps without the statistic
    of the tensor are skipped.

    Attributes:
        held: column and key -> row -> first step, number of steps; only of conditions that hold now.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.held: dict[object, dict[int, tuple[int, int]]] = {}

    def sightings(
        self,
        numbers: StepNumbers,
        facts: Facts,
        column: Column,
        holds: Mask,
        seen: str,
        *values: Sequence[object] | npt.NDArray[np.generic],
        reported: Mask | None = None,
        severity: Severity | None = None,
        key: str = "",
    ) -> Iterator[Sighting]:
        """Yield a sighting of each tensor, with all layers where the condition has lasted long enough.

        Args:
            holds: [rows of the column]: whether the condition holds.
            seen: the description of the first layer in execution order, with a ``{}`` for each of ``values``.
            values: [rows of the column].
            reported: [rows of the column]: whether to report the layer; None for all layers.
            key: distinguishes several conditions on a column; see :class:`Sighting`.
        """
        before = self.held.get((column.number, key), {})
        holding = holds.nonzero()[0].tolist()
        if not before and not holding:
            return
        tensors = numbers.tensors_of(column)
        rows = column.rows.tolist()
        held = {row: streak for row, streak in before.items() if numbers.tensors[row] not in tensors}
        lasting: dict[str, dict[str, int]] = {}  # tensor -> layer -> place
        for place in holding:
            first, steps = before.get(rows[place], (numbers.iteration, 0))
            held[rows[place]] = first, steps + 1
            if steps + 1 >= self.steps and (reported is None or reported[place]):
                lasting.setdefault(tensors[place], {})[numbers.names[rows[place]]] = place
        self.held.pop((column.number, key), None)
        if held:
            self.held[column.number, key] = held
        for tensor, places in lasting.items():
            layers = facts.sort_by_execution(places, tensor)
            since = min(held[rows[place]][0] for place in places.values())
            text = seen.format(*(of_rows[places[layers[0]]] for of_rows in values))
            yield Sighting(tuple(layers), tensor, column.statistic, text, since, severity, key=key)

    def sightings_by_severity(
        self,
        numbers: StepNumbers,
        facts: Facts,
        column: Column,
        warnings: Mask,
        notes: Mask,
        seen: str,
        *values: Sequence[object] | npt.NDArray[np.generic],
        key: str = "",
    ) -> list[Sighting]:
        """Return sightings like :meth:`sightings`, as a warning for some layers and a note for others."""
        severities: dict[Severity, Mask] = {"warning": warnings, "note": notes}
        found: list[Sighting] = []
        for level, holds in severities.items():
            found += self.sightings(numbers, facts, column, holds, seen, *values, severity=level, key=f"{key}{level}")
        return by_tensor(numbers, column, found)


def by_tensor(numbers: StepNumbers, column: Column, *sightings: Iterable[Sighting]) -> list[Sighting]:
    """Sort sightings in the order of the column's tensors."""
    found = list(itertools.chain.from_iterable(sightings))
    if len(found) > 1:
        tensors = numbers.tensors_of(column)
        found.sort(key=lambda sighting: tensors.index(sighting.tensor))
    return found
