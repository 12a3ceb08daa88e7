"""Computes statistics from the columns of segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.engine.slots import COLUMNS, ColumnNames, SegmentKey
from te_precision_callbacks.statistics.names import UnknownStatisticError
from te_precision_callbacks.statistics.series import SeriesTable
from te_precision_callbacks.statistics.table import STATISTICS, Columns, StatisticSource, Values

_SeriesValues = tuple[npt.NDArray[np.int32], Values]

_NONFINITE = "nonfinite_num"


class Row(NamedTuple):
    """A tensor: labels of its due statistics, and the positions of its shards' sums and maxima in the message."""

    labels: dict[str, None]
    shards: list[tuple[int, int]]


class TableReader:
    """Computes the values of segments with the same columns; cached for all steps with the same statistics."""

    def __init__(self, names: ColumnNames, rows: Mapping[SegmentKey, Row], table: SeriesTable) -> None:
        self._table = table
        self._sums, self._maxima = names
        positions = np.array([shard for row in rows.values() for shard in row.shards], dtype=np.intp)
        steps = [np.arange(len(part))[:, None] for part in names]
        self._cells = np.concatenate([positions[:, 0] + steps[0], positions[:, 1] + steps[1]])  # [columns, shards]
        self._begins = np.cumsum([0, *(len(row.shards) for row in rows.values())])[:-1]  # the first shard of each row
        self._uncounted: list[tuple[str, str]] = []  # tensors with moments, but without a request for nonfinite_num
        uncounted_rows: list[int] = []
        numbers: list[int] = []
        value_rows: dict[str, list[tuple[int, int]]] = {}  # statistic -> (row, place) pairs
        histograms: dict[StatisticSource, list[tuple[int, int]]] = {}  # kind -> (row, series) pairs
        for index, (key, row) in enumerate(rows.items()):
            if key.kind == StatisticSource.TENSOR.name and _NONFINITE not in row.labels:
                self._uncounted.append((key.layer, key.tensor))
                uncounted_rows.append(index)
            for label in row.labels:
                number = table.intern(key.layer, key.tensor, label)
                request = table[number].family.request
                if request is None:
                    raise UnknownStatisticError(f"another rank has a statistic {label!r} that is unknown on this rank")
                if request.statistic.value is None:
                    histograms.setdefault(request.statistic.source, []).append((index, number))
                else:
                    value_rows.setdefault(request.statistic.name, []).append((index, len(numbers)))
                    numbers.append(number)
        self._uncounted_rows = np.array(uncounted_rows, dtype=np.intp)
        self._series = np.array(numbers, dtype=np.int32)
        self._formulas = [
            (STATISTICS[name].value, *np.array(pairs, dtype=np.intp).T.copy()) for name, pairs in value_rows.items()
        ]
        self._histograms = [(COLUMNS[source][0], *zip(*pairs, strict=True)) for source, pairs in histograms.items()]

    def columns(self, message: Values) -> Columns:
        """Return the columns, with the shards of replicas added up."""
        cells = message[self._cells]
        sums = cells[: len(self._sums)]
        maxima = cells[len(self._sums) :]
        sums[sums == NOTHING] = 0.0  # no rank has measured this replica
        if len(self._begins) < cells.shape[1]:
            sums = np.add.reduceat(sums, self._begins, axis=1)
            maxima = np.maximum.reduceat(maxima, self._begins, axis=1)
        return dict(zip((*self._sums, *self._maxima), (*sums, *maxima), strict=True))

    def numbers(self, columns: Columns) -> _SeriesValues:
        values = np.empty(len(self._series))
        for formula, rows, positions in self._formulas:
            if formula is not None:
                values[positions] = formula(columns)[rows]
        return self._series, values

    def nonfinite_counts(self, columns: Columns, broken: set[tuple[str, str]]) -> _SeriesValues:
        """Return ``nonfinite_num`` of tensors that do not request it, after a first inf or nan; extends ``broken``."""
        counts = columns["nonfinite"][self._uncounted_rows] if self._uncounted else np.empty(0)
        broken.update(self._uncounted[index] for index in counts.nonzero()[0].tolist())
        indices = [index for index, key in enumerate(self._uncounted) if key in broken] if broken else []
        series = [self._table.intern(*self._uncounted[index], _NONFINITE) for index in indices]
        return np.array(series, dtype=np.int32), counts[indices]

    def histograms(self, columns: Columns) -> Iterator[tuple[int, tuple[float, ...]]]:
        for bins, rows, numbers in self._histograms:
            counts = np.stack([columns[name][list(rows)] for name in bins], axis=-1).tolist()
            yield from zip(numbers, map(tuple, counts), strict=True)
