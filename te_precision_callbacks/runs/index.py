"""The series of a run, with counts of values, ranges of iterations, and worst values."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.tables import SERIES, STEP0, VALUES, VECTORS, column, part_of
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.series import badness, family_of, sign_of

REDUCED = -1
"""Rank of values that are reduced over ranks."""

VALUE_COLUMNS = ["segment", "iteration", "series", "value", "flags"]
VECTOR_COLUMNS = ["segment", "iteration", "series", "bin", "count"]

NO_VALUES = pa.Table.from_batches([], part_of(VALUES, VALUE_COLUMNS))
NO_VECTORS = pa.Table.from_batches([], part_of(VECTORS, VECTOR_COLUMNS))


class Subject(NamedTuple):
    scope: str
    layer: str
    tensor: str
    gemm: str
    statistic: str
    rank: int | None


def subjects_of(table: pa.Table) -> Iterator[Subject]:
    columns = table.select(Subject._fields).to_pydict().values()
    for *names, rank in zip(*columns, strict=True):
        yield Subject._make((*(name or "" for name in names), rank))


_SUMMARY = np.dtype(
    [
        *(("count", "i8"), ("first", "i8"), ("last", "i8")),
        *(("sign", "f8"), ("delayed", "?"), ("bad", "f8"), ("worst", "f8"), ("worst_at", "i8")),
    ],
    align=True,
)
"""Summary of a series; ``worst_at`` is -1 without a worst value."""


class SeriesIndex:
    """Numbers series from 0, and summarizes their values."""

    def __init__(self) -> None:
        self._numbers: dict[Subject, int] = {}
        self._summaries = np.empty(0, _SUMMARY)

    def number(self, subject: Subject) -> int:
        return self._numbers.setdefault(subject, len(self._numbers))

    @property
    def subjects(self) -> Iterable[Subject]:
        return self._numbers

    def note(
        self,
        series: npt.NDArray[np.integer[Any]],
        iterations: Ints,
        values: Floats | None = None,
        flags: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self._grow()
        summaries = self._summaries
        summaries["count"] += np.bincount(series, minlength=len(summaries))
        np.minimum.at(summaries["first"], series, iterations)
        np.maximum.at(summaries["last"], series, iterations)
        if values is None or flags is None:
            return
        telling = ~summaries["delayed"][series] | ((flags & STEP0) == 0)
        series = series[telling]
        iterations = iterations[telling]
        values = values[telling]
        key = badness(values, summaries["sign"][series])
        highest = np.full(len(summaries), -np.inf)
        np.maximum.at(highest, series, key)
        rows = np.flatnonzero(key == highest[series])
        whose, first = np.unique(series[rows], return_index=True)
        worse = (highest[whose] > summaries["bad"][whose]) | (summaries["worst_at"][whose] < 0)
        whose = whose[worse]
        rows = rows[first[worse]]
        summaries["bad"][whose] = key[rows]
        summaries["worst"][whose] = values[rows]
        summaries["worst_at"][whose] = iterations[rows]

    def _grow(self) -> None:
        largest = np.iinfo(np.int64).max
        new = itertools.islice(self._numbers, len(self._summaries), None)
        rows = []
        for subject in new:
            family = family_of(subject.tensor, subject.statistic, subject.gemm or None)
            sign = sign_of(family.worse)
            rows.append((0, largest, -largest, sign, family.is_of_delayed_scaling, -np.inf, np.nan, -1))
        if rows:
            self._summaries = np.append(self._summaries, np.array(rows, _SUMMARY))

    def table(self) -> pa.Table:
        self._grow()
        subjects = list(self._numbers)
        summaries = self._summaries
        nothing = summaries["count"] == 0
        columns = [
            pa.array(np.arange(len(subjects), dtype=np.int32)),
            *subject_columns(subjects),
            pa.array(summaries["count"]),
            pa.array(summaries["first"], mask=nothing),
            pa.array(summaries["last"], mask=nothing),
            pa.array(summaries["worst"], mask=summaries["worst_at"] < 0),
            pa.array(summaries["worst_at"], mask=summaries["worst_at"] < 0),
        ]
        return pa.Table.from_arrays(columns, schema=SERIES)


def subject_columns(subjects: Collection[tuple[str | int | None, ...]]) -> list[pa.Array]:
    """Return a column for each field of :class:`Subject`. Dictionaries of names are in order of first appearance."""
    columns = []
    for place in range(len(Subject._fields) - 1):
        names = list(map(str, map(itemgetter(place), subjects)))
        columns.append(column(names, pa.string()).dictionary_encode())
    return [*columns, column([rank for *_, rank in subjects], pa.int32())]


def sort_by_series(table: pa.Table) -> pa.Table:
    series = table["series"].to_numpy()
    iterations = table["iteration"].to_numpy()
    if not len(series):
        return table
    first = int(iterations.min())
    last = int(iterations.max())
    keys = series.astype(np.int64) * (last - first + 1) + (iterations - first)
    is_sorted = bool(np.all(keys[1:] >= keys[:-1]))
    if is_sorted:
        return table
    return table.take(pa.array(np.argsort(keys, kind="stable")))
