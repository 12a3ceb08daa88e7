"""Computes statistics from the columns of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.engine.slots import COLUMNS, SegmentKey
from te_precision_callbacks.statistics.names import UnknownStatisticError
from te_precision_callbacks.statistics.series import SeriesTable
from te_precision_callbacks.statistics.table import STATISTICS, Columns, StatisticSource, Values

_SeriesValues = tuple[npt.NDArray[np.int32], Values]

_NONFINITE = "nonfinite_num"


class TableReader:
    """Computes the values of segments with the same columns; cached for all steps with the same statistics.

    Args:
        rows: the segments, and the labels of their statistics.
    """

    def __init__(self, rows: Sequence[tuple[SegmentKey, Sequence[str]]], table: SeriesTable) -> None:
        self._table = table
        self._uncounted: list[tuple[str, str]] = []  # tensors with moments, but without a request for nonfinite_num
        uncounted_rows: list[int] = []
        numbers: list[int] = []
        places: dict[str, list[tuple[int, int]]] = {}  # statistic -> (row, place) pairs
        histograms: dict[StatisticSource, list[tuple[int, int]]] = {}  # kind -> (row, series) pairs
        for row, (key, labels) in enumerate(rows):
            if key.kind == StatisticSource.TENSOR.name and _NONFINITE not in labels:
                self._uncounted.append((key.layer, key.tensor))
                uncounted_rows.append(row)
            for label in labels:
                number = table.intern(key.layer, key.tensor, label)
                request = table[number].family.request
                if request is None:
                    raise UnknownStatisticError(f"another rank has a statistic {label!r} that is unknown on this rank")
                if request.statistic.value is None:
                    histograms.setdefault(request.statistic.source, []).append((row, number))
                else:
                    places.setdefault(request.statistic.name, []).append((row, len(numbers)))
                    numbers.append(number)
        self._uncounted_rows = np.array(uncounted_rows, dtype=np.intp)
        self._series = np.array(numbers, dtype=np.int32)
        self._formulas = [
            (STATISTICS[name].value, *np.array(pairs, dtype=np.intp).T.copy()) for name, pairs in places.items()
        ]
        self._histograms = [(COLUMNS[source][0], *zip(*pairs, strict=True)) for source, pairs in histograms.items()]

    def numbers(self, columns: Columns) -> _SeriesValues:
        values = np.empty(len(self._series))
        for formula, rows, places in self._formulas:
            if formula is not None:
                values[places] = formula(columns)[rows]
        return self._series, values

    def nonfinite_counts(self, columns: Columns, broken: set[tuple[str, str]]) -> _SeriesValues:
        """Return ``nonfinite_num`` of tensors that do not request it, after a first inf or nan; extends ``broken``."""
        counts = columns["nonfinite"][self._uncounted_rows] if self._uncounted else np.empty(0)
        broken.update(self._uncounted[place] for place in counts.nonzero()[0].tolist())
        places = [place for place, key in enumerate(self._uncounted) if key in broken] if broken else []
        series = [self._table.intern(*self._uncounted[place], _NONFINITE) for place in places]
        return np.array(series, dtype=np.int32), counts[places]

    def histograms(self, columns: Columns) -> Iterator[tuple[int, tuple[float, ...]]]:
        for bins, rows, numbers in self._histograms:
            counts = np.stack([columns[name][list(rows)] for name in bins], axis=-1).tolist()
            yield from zip(numbers, map(tuple, counts), strict=True)
