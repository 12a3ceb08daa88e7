"""Conditions that hold in several collection steps in a row. Steps without the statistic do not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.diagnosis.rule import Sighting


class Lasting(NamedTuple):
    """Something that was seen in several collection steps in a row.

    Attributes:
        steps: in how many.
        since: the first one.
    """

    steps: int
    since: int


class Streaks:
    """Counts in how many collection steps in a row something holds for each layer."""

    def __init__(self) -> None:
        self._held: dict[int, Lasting] = {}

    def hold(self, layers: Iterable[int], iteration: int) -> dict[int, Lasting]:
        """Update the streaks, and return those of the layers with the condition."""
        before, self._held = self._held, {}
        for layer in layers:
            last = before.get(layer)
            self._held[layer] = Lasting(1, iteration) if last is None else Lasting(last.steps + 1, last.since)
        return self._held


class ColumnStreaks:
    """The streaks of each column that a rule looks at.

    Args:
        steps: in how many collection steps in a row something must hold.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._streaks: dict[object, Streaks] = {}

    def sightings(
        self,
        numbers: StepNumbers,
        facts: Facts,
        column: Column,
        holds: npt.NDArray[np.bool_],
        seen: str,
        *values: npt.NDArray[np.generic],
        tells: npt.NDArray[np.bool_] | None = None,
        severity: Severity | None = None,
        key: str = "",
    ) -> Iterator[Sighting]:
        """Return one sighting of all layers with a condition that has lasted long enough.

        Args:
            numbers, facts: the step.
            column: the column.
            holds: [layers of the column]: whether the condition holds.
            seen: the description, with a ``{}`` for each of ``values``.
            values: [layers of the column]; the first layer in execution order is described.
            tells: [layers of the column]: whether to report the layer; None for all layers.
            severity: see :class:`Sighting`.
            key: keeps several conditions on a column apart; see :class:`Sighting`.
        """
        streaks = self._streaks.setdefault((column.family, key), Streaks())
        held = streaks.hold(column.layers[holds].tolist(), numbers.iteration)
        reported = held.keys() if tells is None else set(column.layers[tells].tolist())
        found = {
            numbers.names[layer]: last for layer, last in held.items() if last.steps >= self.steps and layer in reported
        }
        if not found:
            return
        tensor = column.family.tensor
        layers = facts.in_order(found, tensor)
        since = min(last.since for last in found.values())
        place = numbers.names_of(column).index(layers[0])
        text = seen.format(*(each[place] for each in values))
        yield Sighting(tuple(layers), tensor, column.family.statistic, text, since, severity, key=key)

    def graded(
        self,
        numbers: StepNumbers,
        facts: Facts,
        column: Column,
        warnings: npt.NDArray[np.bool_],
        notes: npt.NDArray[np.bool_],
        seen: str,
        *values: npt.NDArray[np.generic],
        key: str = "",
    ) -> Iterator[Sighting]:
        """Return sightings like :meth:`sightings`, as a warning for some layers and a note for others.

        Args:
            warnings, notes: [layers of the column]: whether the condition holds.
            numbers, facts, column, seen, values, key: see there; the severity is added to the key.
        """
        severities: tuple[tuple[Severity, npt.NDArray[np.bool_]], ...] = (("warning", warnings), ("note", notes))
        for severity, holds in severities:
            yield from self.sightings(
                numbers, facts, column, holds, seen, *values, severity=severity, key=f"{key}{severity}"
            )
