"""The series of a run, with counts of values, ranges of iterations, and worst values."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from te_precision_callbacks.runs.tables import SERIES, VALUES, VECTORS, column, part_of
from te_precision_callbacks.statistics.series import Summaries, family_of

REDUCED = -1
"""Rank of values that are reduced over ranks."""

VALUE_ROWS = part_of(VALUES, ["segment", "iteration", "series", "value", "flags"])
VECTOR_ROWS = part_of(VECTORS, ["segment", "iteration", "series", "bin", "count"])
"""Schemas of the rows of some series."""


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


class SeriesIndex(Summaries):
    """Numbers series from 0, and summarizes their values."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Subject, int] = {}

    def number(self, subjects: Iterable[Subject]) -> list[int]:
        numbers = [self._numbers.setdefault(subject, len(self._numbers)) for subject in subjects]
        new = itertools.islice(self._numbers, len(self.rows), None)
        self.grow([family_of(subject.tensor, subject.statistic, subject.gemm or None) for subject in new])
        return numbers

    def table(self) -> pa.Table:
        rows = self.rows
        nothing = rows["count"] == 0
        without_worst = rows["worst_at"] < 0
        columns = [pa.array(np.arange(len(rows), dtype=np.int32)), *subject_columns(self._numbers)]
        columns.append(pa.array(rows["count"]))
        columns += [pa.array(rows[name], mask=nothing) for name in ("first", "last")]
        columns += [pa.array(rows[name], mask=without_worst) for name in ("worst", "worst_at")]
        return pa.Table.from_arrays(columns, schema=SERIES)


def subject_columns(subjects: Collection[tuple[str | int | None, ...]]) -> list[pa.Array]:
    """Return a column for each field of :class:`Subject`. Dictionaries of names are in order of first appearance."""
    columns = []
    for place in range(len(Subject._fields) - 1):
        names = list(map(str, map(itemgetter(place), subjects)))
        columns.append(column(names, pa.string()).dictionary_encode())
    return [*columns, column([rank for *_, rank in subjects], pa.int32())]
