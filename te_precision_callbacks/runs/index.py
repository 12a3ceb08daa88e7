"""The series of a run that is read: numbers for their subjects, and what their values span."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.tables import SERIES, STEP0, VALUES, VECTORS
from te_precision_callbacks.statistics.series import badness, family_of, sign_of

VALUE_COLUMNS = ["segment", "iteration", "series", "value", "flags"]
VECTOR_COLUMNS = ["segment", "iteration", "series", "bin", "count"]

# Without batches: making arrays, as empty_table() does, is when pyarrow imports pandas, which takes a second.
NO_VALUES = pa.Table.from_batches([], pa.schema([VALUES.field(name) for name in VALUE_COLUMNS]))
NO_VECTORS = pa.Table.from_batches([], pa.schema([VECTORS.field(name) for name in VECTOR_COLUMNS]))


class Subject(NamedTuple):
    """What a series says something about, by the columns of its table."""

    scope: str
    layer: str
    tensor: str
    gemm: str
    statistic: str
    rank: int | None


class SeriesIndex:
    """Numbers series from 0, and notes what their values span."""

    def __init__(self) -> None:
        self._numbers: dict[Subject, int] = {}
        self._count = np.zeros(0, np.int64)
        self._first = np.zeros(0, np.int64)
        self._last = np.zeros(0, np.int64)
        self._low = np.zeros(0)
        self._high = np.zeros(0)
        self._sign = np.zeros(0)
        self._delayed = np.zeros(0, bool)
        self._bad = np.zeros(0)
        self._worst = np.zeros(0)
        self._worst_at = np.zeros(0, np.int64)

    def number(self, subject: Subject) -> int:
        """The number of a series."""
        return self._numbers.setdefault(subject, len(self._numbers))

    @property
    def subjects(self) -> Iterable[Subject]:
        """What the series are about, by their numbers."""
        return self._numbers

    def note(
        self,
        series: npt.NDArray[np.integer[Any]],
        iterations: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64] | None = None,
        flags: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Note rows.

        Args:
            series, iterations: [rows].
            values, flags: [rows]; None for histograms.
        """
        if not len(series):
            return
        self._grow()
        if np.any(series[1:] < series[:-1]):
            order = np.argsort(series, kind="stable")
            series, iterations = series[order], iterations[order]
            values = None if values is None else values[order]
            flags = None if flags is None else flags[order]
        starts = np.flatnonzero(np.r_[True, series[1:] != series[:-1]])
        found = series[starts]
        self._count[found] += np.diff(np.r_[starts, len(series)])
        self._first[found] = np.minimum(self._first[found], np.minimum.reduceat(iterations, starts))
        self._last[found] = np.maximum(self._last[found], np.maximum.reduceat(iterations, starts))
        if values is not None:
            finite = np.isfinite(values)
            lows = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
            highs = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
            self._low[found] = np.minimum(self._low[found], lows)
            self._high[found] = np.maximum(self._high[found], highs)
            self._note_worst(series, iterations, values, flags, starts)

    def _note_worst(
        self,
        series: npt.NDArray[np.integer[Any]],
        iterations: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
        flags: npt.NDArray[np.uint8] | None,
        starts: npt.NDArray[np.int64],
    ) -> None:
        found = series[starts]
        key = badness(values, self._sign[series])
        if flags is not None:
            key = np.where(self._delayed[series] & ((flags & STEP0) != 0), -np.inf, key)
            counts = np.logical_or.reduceat(~self._delayed[series] | ((flags & STEP0) == 0), starts)
        else:
            counts = np.ones(len(starts), bool)
        highest = np.maximum.reduceat(key, starts)
        is_highest = np.flatnonzero(key == np.repeat(highest, np.diff(np.r_[starts, len(series)])))
        _, first = np.unique(series[is_highest], return_index=True)
        worse = counts & ((highest > self._bad[found]) | (self._worst_at[found] < 0))
        where, taken = is_highest[first][worse], found[worse]
        self._bad[taken], self._worst[taken], self._worst_at[taken] = key[where], values[where], iterations[where]

    def _grow(self) -> None:
        more = len(self._numbers) - len(self._count)
        if not more:
            return
        largest = np.iinfo(np.int64).max
        self._count = np.r_[self._count, np.zeros(more, np.int64)]
        self._first = np.r_[self._first, np.full(more, largest)]
        self._last = np.r_[self._last, np.full(more, -largest)]
        self._low = np.r_[self._low, np.full(more, np.inf)]
        self._high = np.r_[self._high, np.full(more, -np.inf)]
        new = itertools.islice(self._numbers, len(self._numbers) - more, None)
        families = [family_of(subject.tensor, subject.statistic, subject.gemm or None) for subject in new]
        self._sign = np.r_[self._sign, [sign_of(family.worse) for family in families]]
        self._delayed = np.r_[self._delayed, np.array([family.is_of_delayed_scaling for family in families], bool)]
        self._bad = np.r_[self._bad, np.full(more, -np.inf)]
        self._worst = np.r_[self._worst, np.full(more, np.nan)]
        self._worst_at = np.r_[self._worst_at, np.full(more, -1)]

    def table(self) -> pa.Table:
        """All series; low and high are null where no value is finite, the worst where none counts."""
        self._grow()
        subjects = list(self._numbers)
        nothing = self._count == 0
        columns = [
            pa.array(np.arange(len(subjects), dtype=np.int32)),
            *(pa.array(texts, pa.string()).dictionary_encode() for texts in _columns(subjects)),
            pa.array([subject.rank for subject in subjects], pa.int32()),
            pa.array(self._count),
            pa.array(self._first, mask=nothing),
            pa.array(self._last, mask=nothing),
            pa.array(self._low, mask=self._low == np.inf),
            pa.array(self._high, mask=self._high == -np.inf),
            pa.array(self._worst, mask=self._worst_at < 0),
            pa.array(self._worst_at, mask=self._worst_at < 0),
        ]
        return pa.Table.from_arrays(columns, schema=SERIES)


def _columns(subjects: list[Subject]) -> list[list[str]]:
    return [[str(subject[place]) for subject in subjects] for place in range(len(Subject._fields) - 1)]


def in_order(table: pa.Table) -> pa.Table:
    """Rows sorted by series and iteration; equal ones stay in their order."""
    series, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
    if not len(series):
        return table
    first, last = int(iterations.min()), int(iterations.max())
    if (int(series.max()) + 1) * (last - first + 1) > np.iinfo(np.int64).max:  # where an iteration is damaged
        return table.take(pa.array(np.lexsort((iterations, series))))
    keys = series.astype(np.int64) * (last - first + 1) + (iterations - first)
    if np.all(keys[1:] >= keys[:-1]):
        return table
    return table.take(pa.array(np.argsort(keys, kind="stable")))
