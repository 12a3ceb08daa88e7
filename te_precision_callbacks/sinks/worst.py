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
from te_precision_callbacks.statistics.series import Family, Series, SeriesTable, badness, sign_of

WORST_OF_ALL: Mapping[str, str] = {
    "worst_underflows%": "underflows%",
    "worst_overflows%": "overflows%",
    "worst_sqnr_db": "sqnr_db",
    "nonfinite_num": "nonfinite_num",
}
"""Last part of a metric name -> statistic. The metric is its worst value over all layers, tensors, recipes, element
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


def worst_of_all(families: Mapping[Family, ByLayer]) -> dict[str, tuple[Series, float]]:
    """Return name of :data:`WORST_OF_ALL` -> series and worst value, given the result of :func:`comparable_values`."""
    worst: dict[str, tuple[Series, float]] = {}
    largest: dict[str, float] = {}
    keys = {statistic: key for key, statistic in WORST_OF_ALL.items()}
    for family, values in families.items():
        if family.request is None or family.request.statistic.name not in keys:
            continue
        key = keys[family.request.statistic.name]
        for layer in worst_first(1, family, values):
            value = values[layer]
            # An SQNR of inf is never the worst: the quantized tensor is exact.
            badness = family.badness(value)
            if badness > largest.get(key, -math.inf):
                largest[key] = badness
                worst[key] = (Series(layer, family), value)
    return worst


class Worst(NamedTuple):
    """The worst value of a series, and the first debug iteration with this value."""

    row: Row
    iteration: int


_SUMMARY = np.dtype(
    [
        *(("last", "f8"), ("worst", "f8"), ("badness", "f8"), ("iteration", "i8")),
        *(("sign", "f8"), ("directed", "?"), ("has", "?"), ("delayed", "?")),
    ],
    align=True,
)
"""Summary of a series; ``iteration`` is -1 if no value counts as worst."""


class RunStatistics:
    """Keeps the last value of each series of a run, and the worst value of series with a worse direction."""

    def __init__(self, table: SeriesTable) -> None:
        self._table = table
        self._summaries = np.empty(0, _SUMMARY)

    def add(self, records: StepRecords) -> None:
        self._grow()
        summaries = self._summaries
        series = records.series
        values = np.frombuffer(records.values)
        summaries["last"][series] = values
        summaries["has"][series] = True
        compared = summaries["directed"][series]
        if records.unscaled:
            waiting = [self._table[number].layer in records.unscaled for number in series.tolist()]
            compared &= ~(summaries["delayed"][series] & np.array(waiting, dtype=bool))
        series = series[compared]
        values = values[compared]
        bad = badness(values, summaries["sign"][series])
        worse = ((bad > summaries["badness"][series]) | (summaries["iteration"][series] < 0)).nonzero()[0]
        worse = worse[bad[worse].argsort(kind="stable")]  # if a series occurs twice, its worst value comes last
        taken = series[worse]
        summaries["badness"][taken] = bad[worse]
        summaries["worst"][taken] = values[worse]
        summaries["iteration"][taken] = records.iteration

    def last(self) -> Iterator[Row]:
        for number in np.flatnonzero(self._summaries["has"]).tolist():
            yield row_of(self._table[number], float(self._summaries["last"][number]))

    def worst(self) -> Iterator[Worst]:
        for number in np.flatnonzero(self._summaries["iteration"] >= 0).tolist():
            row = row_of(self._table[number], float(self._summaries["worst"][number]))
            yield Worst(row, int(self._summaries["iteration"][number]))

    def _grow(self) -> None:
        """Add rows for new series; after an interruption, the next step adds them."""
        families = [series.family for series in self._table.since(len(self._summaries))]
        if not families:
            return
        without_values = {}
        for family in set(families):
            facts = sign_of(family.worse), family.has_direction, False, family.is_of_delayed_scaling
            without_values[family] = (math.nan, math.nan, math.nan, -1, *facts)
        new = [without_values[family] for family in families]
        self._summaries = np.append(self._summaries, np.array(new, _SUMMARY))


def worst_first(most: int, family: Family, values: Mapping[_Place, float]) -> list[_Place]:
    """Return the keys of the worst values, at most ``most``, worst first."""
    return heapq.nlargest(most, values, key=lambda place: family.badness(values[place]))
