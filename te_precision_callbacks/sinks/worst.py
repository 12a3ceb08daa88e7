"""Finds the worst values, by the worse direction of each statistic (``statistics/table.py``).

Excludes statistics of delayed scaling from a layer's first step, with a scale of 1 (``StepRecords.unscaled``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from te_precision_callbacks.sinks.step_records import Row, StepRecords, row_of
from te_precision_callbacks.statistics.series import Family, SeriesTable, Summaries

WORST_OF_ALL: Mapping[str, str] = {
    "underflows%": "worst_underflows%",
    "overflows%": "worst_overflows%",
    "sqnr_db": "worst_sqnr_db",
    "nonfinite_num": "nonfinite_num",
}
"""Statistic -> last part of a metric's name. The metric is its worst value over all layers, tensors, recipes, element
formats and directions."""


ByLayer = Mapping[str, float]
"""Layer -> value."""

_Place = TypeVar("_Place", bound=Hashable)


def comparable_values(records: StepRecords) -> Mapping[Family, ByLayer]:
    """Return the values of a step that count as worst values: without delayed scaling's first step."""
    if not records.unscaled:
        return records.families
    families = dict(records.families)
    for family, values in families.items():
        if family.is_of_delayed_scaling:
            families[family] = {layer: value for layer, value in values.items() if layer not in records.unscaled}
    return families


def worst_of_all(families: Mapping[Family, ByLayer]) -> dict[str, float]:
    """Return the metrics of :data:`WORST_OF_ALL`, given the result of :func:`comparable_values`."""
    worst: dict[str, tuple[float, float]] = {}  # badness and value
    for family, values in families.items():
        key = family.request and WORST_OF_ALL.get(family.request.statistic.name)
        if key:
            rated = [(family.badness(value), value) for value in values.values()]
            worst[key] = max([worst.get(key, (-math.inf, math.nan)), *rated])
    # An SQNR of inf is never the worst: the quantized tensor is exact.
    return {key: value for key, (badness, value) in worst.items() if badness > -math.inf}


class Worst(NamedTuple):
    """The worst value of a series, and the first debug iteration with this value."""

    row: Row
    iteration: int


class RunStatistics:
    """Keeps the last value of each series of a run, and the worst value of series with a worse direction."""

    def __init__(self, table: SeriesTable) -> None:
        self._table = table
        self._summaries = Summaries()

    def add(self, records: StepRecords) -> None:
        # After an interruption, the next step adds the new series.
        self._summaries.grow([series.family for series in self._table.since(len(self._summaries.rows))])
        first_step = np.zeros(len(records), bool)
        if records.unscaled:
            first_step[:] = [self._table[number].layer in records.unscaled for number in records.series.tolist()]
        iterations = np.full(len(records), records.iteration)
        self._summaries.rows["count"][records.series] = 1
        self._summaries.note_values(records.series, iterations, np.frombuffer(records.values), first_step)

    def last(self) -> Iterator[Row]:
        rows = self._summaries.rows
        for number in np.flatnonzero(rows["count"]).tolist():
            yield row_of(self._table[number], float(rows["latest"][number]))

    def worst(self) -> Iterator[Worst]:
        rows = self._summaries.rows
        for number in np.flatnonzero(rows["worst_at"] >= 0).tolist():
            if self._table[number].family.has_direction:
                yield Worst(row_of(self._table[number], float(rows["worst"][number])), int(rows["worst_at"][number]))


def worst_first(most: int, family: Family, values: Mapping[_Place, float]) -> list[_Place]:
    """Return the keys of the worst values, at most ``most``, worst first."""
    return heapq.nlargest(most, values, key=lambda place: family.badness(values[place]))
