"""Finds the worst of many numbers, by the direction that the table of statistics gives to each statistic.

Statistics of delayed scaling from a layer's first step, with the scale 1, are left out: ``StepRecords.unscaled``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.sinks.step_records import Row, StepRecords, row_of
from te_precision_callbacks.statistics.series import Family, Series, SeriesTable, badness, family_of, sign_of

WORST_OF_ALL: Mapping[str, str] = {
    "worst_underflows%": "underflows%",
    "worst_overflows%": "overflows%",
    "worst_sqnr_db": "sqnr_db",
    "nonfinite_num": "nonfinite_num",
}
"""Last part of the metric's name -> the statistic whose worst value the metric is, over all layers, tensors, recipes,
element formats and directions."""


ByLayer = Mapping[str, float]
"""Layer -> value."""

_Place = TypeVar("_Place", bound=Hashable)


def judged(records: StepRecords) -> Mapping[Family, ByLayer]:
    """The numbers of a step that count for the worst of the run: all but those of delayed scaling without a scale
    yet."""
    if not records.unscaled:
        return records.families
    return {
        family: {layer: value for layer, value in values.items() if layer not in records.unscaled}
        if family.is_of_delayed_scaling
        else values
        for family, values in records.families.items()
    }


def worst_of_all(families: Mapping[Family, ByLayer]) -> dict[str, tuple[Series, float]]:
    """The worst number, with its series, for each name of :data:`WORST_OF_ALL` that the step has.

    Args:
        families: the numbers of a step that are :func:`judged`.
    """
    found: dict[str, tuple[Series, float]] = {}
    keys = {statistic: key for key, statistic in WORST_OF_ALL.items()}
    for family, values in families.items():
        if family.request is None or family.request.statistic.name not in keys:
            continue
        key = keys[family.request.statistic.name]
        for layer in _worst(1, family, values):
            value = values[layer]
            # An SQNR of inf is never the worst: the quantized tensor is exact.
            if family.badness(value) > (found[key][0].family.badness(found[key][1]) if key in found else -math.inf):
                found[key] = (Series(layer, family), value)
    return found


class Worst(NamedTuple):
    """The worst value of a statistic of one tensor.

    Attributes:
        row: the layer, the tensor, the statistic, and the value.
        iteration: the debug iteration in which it was first seen.
    """

    row: Row
    iteration: int


class Column(NamedTuple):
    """A statistic of all tensors that have it.

    Attributes:
        tensors: [tensors], int64: their numbers in :attr:`RunStatistics.tensors`.
        last: [tensors], float64: the last values.
        worst: [tensors], float64: the worst values of the run; the last ones where none is worse.
        iteration: [tensors], int64: when the worst values first were; -1 where none is worse.
        family: that of the first tensor.
    """

    tensors: npt.NDArray[np.int64]
    last: npt.NDArray[np.float64]
    worst: npt.NDArray[np.float64]
    iteration: npt.NDArray[np.int64]
    family: Family

    @property
    def values(self) -> dict[int, float]:
        """Tensor -> the value that ranks it: the worst, or without a worse direction the last. Tensors of which only
        delayed scaling's first step has one are left out."""
        judged = (self.iteration >= 0) | (not self.family.has_direction)
        return dict(zip(self.tensors[judged].tolist(), self.worst[judged].tolist(), strict=True))


class RunStatistics:
    """The last value of each series of a run, and the worst so far of those that have a worse direction.

    Args:
        table: the series.

    Attributes:
        tensors: the layer and the name of each tensor that has statistics.
    """

    def __init__(self, table: SeriesTable) -> None:
        self._table = table
        self.tensors: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._families: dict[Family, int] = {}
        self._tensor, self._family = np.empty(0, np.int64), np.empty(0, np.int64)
        self._last = np.empty(0)
        self._worst = np.empty(0)
        self._badness = np.empty(0)
        self._iteration = np.empty(0, np.int64)
        self._sign = np.empty(0)
        self._directed = np.empty(0, bool)
        self._has = np.empty(0, bool)
        self._delayed = np.empty(0, bool)

    def add(self, records: StepRecords) -> None:
        """Take the numbers of a step."""
        self._grow()
        series, values = records.series, np.frombuffer(records.values)
        self._last[series], self._has[series] = values, True
        compared = self._directed[series]
        if records.unscaled:
            waiting = [self._table[number].layer in records.unscaled for number in series.tolist()]
            compared &= ~(self._delayed[series] & np.array(waiting, dtype=bool))
        series, values = series[compared], values[compared]
        bad = badness(values, self._sign[series])
        worse = np.flatnonzero((bad > self._badness[series]) | (self._iteration[series] < 0))
        worse = worse[np.argsort(bad[worse], kind="stable")]  # if a series is there twice, its worst comes last
        taken = series[worse]
        self._badness[taken], self._worst[taken] = bad[worse], values[worse]
        self._iteration[taken] = records.iteration

    def last(self) -> Iterator[Row]:
        """The last value of each series."""
        for number in np.flatnonzero(self._has).tolist():
            yield row_of(self._table[number], float(self._last[number]))

    def worst(self) -> Iterator[Worst]:
        """The worst value of each series, and when it first was."""
        for number in np.flatnonzero(self._iteration >= 0).tolist():
            row = row_of(self._table[number], float(self._worst[number]))
            yield Worst(row, int(self._iteration[number]))

    def columns(self) -> dict[str, Column]:
        """Statistic -> its column, without users' own numbers."""
        found: dict[str, tuple[Family, list[int]]] = {}
        for family, number in self._families.items():
            if family.tensor:
                found.setdefault(family.statistic, (family, []))[1].append(number)
        columns = {name: self._column(family, numbers) for name, (family, numbers) in found.items()}
        return {name: column for name, column in columns.items() if len(column.tensors)}

    def _column(self, family: Family, numbers: Sequence[int]) -> Column:
        series = np.flatnonzero(self._has & np.isin(self._family, numbers))
        iteration, last = self._iteration[series], self._last[series]
        worst = np.where(iteration < 0, last, self._worst[series])
        return Column(self._tensor[series], last, worst, iteration, family)

    def _grow(self) -> None:
        """Make room for new series; each column for itself, so one that could not grow does so in the next step."""
        if len(self._delayed) == len(self._table):
            return
        numbers, families = self._numbers, self._families
        self._tensor = self._grown(self._tensor, lambda one: numbers.setdefault((one.layer, one.tensor), len(numbers)))
        self.tensors = list(numbers)
        self._family = self._grown(self._family, lambda one: families.setdefault(one.family, len(families)))
        self._last = self._grown(self._last, lambda _: math.nan)
        self._worst = self._grown(self._worst, lambda _: math.nan)
        self._badness = self._grown(self._badness, lambda _: math.nan)
        self._iteration = self._grown(self._iteration, lambda _: -1)
        self._sign = self._grown(self._sign, lambda one: sign_of(one.family.worse))
        self._directed = self._grown(self._directed, lambda one: one.family.has_direction)
        self._has = self._grown(self._has, lambda _: False)
        self._delayed = self._grown(self._delayed, lambda one: one.family.is_of_delayed_scaling)

    def _grown(self, column: npt.NDArray[Any], of: Callable[[Series], float]) -> npt.NDArray[Any]:
        new = [of(self._table[number]) for number in range(len(column), len(self._table))]
        return np.append(column, np.array(new, column.dtype))


class Lost(NamedTuple):
    """Why a place is among the worst by a statistic that does not show it: what is lost there by another one.

    Attributes:
        statistic: the other one.
        value: its value.
    """

    statistic: str
    value: float


def worst_first(
    most: int, family: Family, values: Mapping[_Place, float], beside: Callable[[str], Mapping[_Place, float]]
) -> dict[_Place, Lost | None]:
    """The worst places by a statistic, the worst first: the one answer for all who list the worst layers.

    An SQNR or a squared error says little about elements that are lost next to an outlier. For these statistics, the
    places with the most underflows and overflows take turns with the places that are worst by the statistic itself.

    Args:
        most: the maximum number of places.
        family: the statistic.
        values: the values of the places, such as layers. Those of delayed scaling's first step are left out.
        beside: a statistic's name in records -> its values, likewise, of the same tensor.

    Returns:
        The places, each with what brings it here if that is not the statistic itself.
    """
    lists: list[list[tuple[_Place, Lost | None]]] = [[(place, None) for place in _worst(most, family, values)]]
    request = family.request
    for name in () if request is None else request.statistic.misses:
        label = request.beside(name) if request is not None else name
        lost = {place: value for place, value in beside(label).items() if place in values and value != 0}
        worst = _worst(most, family_of(family.tensor, label), lost)
        lists.append([(place, Lost(label, lost[place])) for place in worst])
    found: dict[_Place, Lost | None] = {}
    for taking_turns in zip_longest(*lists):
        for turn in taking_turns:
            if turn is not None and turn[0] not in found and len(found) < most:
                found[turn[0]] = turn[1]
    return found


def worst_beside(
    most: int, family: Family, values: Mapping[_Place, float], families: Mapping[Family, Mapping[_Place, float]]
) -> dict[_Place, Lost | None]:
    """The worst places by a statistic, as :func:`worst_first`.

    Args:
        most: the maximum number of places.
        family: the statistic.
        values: the values of the places.
        families: all families -> their values.
    """
    return worst_first(most, family, values, lambda label: families.get(family_of(family.tensor, label), {}))


def _worst(most: int, family: Family, values: Mapping[_Place, float]) -> list[_Place]:
    return heapq.nlargest(most, values, key=lambda place: family.badness(values[place]))
