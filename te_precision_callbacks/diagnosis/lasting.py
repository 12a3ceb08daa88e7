"""Conditions that hold in several collection steps in a row. Steps without the statistic do not count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.diagnosis.rule import Sighting


class ColumnStreaks:
    """The streaks of each column that a rule looks at; something must hold in so many collection steps in a row."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._held: dict[object, dict[int, tuple[int, int]]] = {}  # by column: layer -> its first step, and how many

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
            holds: [layers of the column]: whether the condition holds.
            seen: the description, with a ``{}`` for each of ``values``.
            values: [layers of the column]; the first layer in execution order is described.
            tells: [layers of the column]: whether to report the layer; None for all layers.
            key: keeps several conditions on a column apart; see :class:`Sighting`.
        """
        before = self._held.get((column.family, key), {})
        held = {}
        for layer in column.layers[holds].tolist():
            first, steps = before.get(layer, (numbers.iteration, 0))
            held[layer] = first, steps + 1
        self._held[column.family, key] = held
        reported = held.keys() if tells is None else set(column.layers[tells].tolist())
        lasting = [layer for layer, (_, steps) in held.items() if steps >= self.steps and layer in reported]
        if not lasting:
            return
        tensor = column.family.tensor
        layers = facts.in_order((numbers.names[layer] for layer in lasting), tensor)
        since = min(held[layer][0] for layer in lasting)
        place = numbers.names_of(column).index(layers[0])
        text = seen.format(*(column_of_values[place] for column_of_values in values))
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
        """Return sightings like :meth:`sightings`, as a warning for some layers and a note for others; the severity is
        added to the key.
        """
        severities: tuple[tuple[Severity, npt.NDArray[np.bool_]], ...] = (("warning", warnings), ("note", notes))
        for severity, holds in severities:
            yield from self.sightings(
                numbers, facts, column, holds, seen, *values, severity=severity, key=f"{key}{severity}"
            )
