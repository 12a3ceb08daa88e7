"""Heat maps of each statistic, layers by spans of steps, where a cell is the worst value; and histograms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.series import badness, sign_of
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS
from te_precision_callbacks.views.report.subjects import FamilySeries

MOST_AT_ONCE = 2_000_000

_CELLS = 4_000_000
"""The maximum number of cells of all heat maps, unless there are more rows than fit with the fewest columns."""

_MOST_COLUMNS = 400
_FEWEST_COLUMNS = 24


@dataclass(frozen=True)
class Columns:
    """The columns of a heat map: the first and last iteration of each span, [columns]."""

    first: Ints
    last: Ints

    @classmethod
    def of(cls, run: RecordedRun, most: int) -> Columns:
        """Divide the iterations of a run into columns of about equal size."""
        parts = [table["iteration"].to_numpy() for table in (run.steps, run.scalars) if len(table)]
        if not len(run.steps):
            parts += [np.unique(table["iteration"].to_numpy()) for table in _value_pieces(run)]
        parts += [run.series[column].drop_null().to_numpy() for column in ("first", "last")]
        iterations = np.unique(np.concatenate(parts).astype(np.int64))
        number = min(most, len(iterations))
        edges = np.linspace(0, len(iterations), number + 1).astype(np.int64)
        return cls(iterations[edges[:-1]], iterations[edges[1:] - 1])

    @classmethod
    def for_rows(cls, run: RecordedRun, rows: int) -> Columns:
        """Return as many columns as fit on a page, given the total number of rows of all heat maps."""
        return cls.of(run, min(max(_CELLS // max(rows, 1), _FEWEST_COLUMNS), _MOST_COLUMNS))

    def __len__(self) -> int:
        return len(self.first)

    def column_of(self, iterations: Ints) -> Ints:
        return np.maximum(np.searchsorted(self.first, iterations, "right") - 1, 0)

    def take(self, chosen: Ints) -> Columns:
        return Columns(self.first[chosen], self.last[chosen])


def has_room_for(rows: int) -> bool:
    return rows * _FEWEST_COLUMNS <= _CELLS


def _value_pieces(run: RecordedRun) -> Iterator[pa.Table]:
    numbers = run.series["series"].to_numpy().astype(np.int64)
    counts = run.series["count"].fill_null(0).to_numpy().astype(np.int64)
    for piece in pieces(counts):
        yield run.values(numbers[piece].tolist())


class WorstValue(NamedTuple):
    value: float
    rank: int
    at: int


class Overview:
    """A statistic of a tensor in all layers, over time.

    Values of delayed scaling's first step, with the scale 1, are left out, since they would dominate the colors.

    Attributes:
        layers: [rows], the layers with the statistic, in the order of execution.
        cells: rank -> [rows, columns]: the worst value of the column; nan also without a value.
        present: rank -> [rows, columns], bool: whether there is a value.
        series: rank -> [rows], the index of the series; -1 without one.
        worst, worst_at: rank -> [rows]: the worst value of each layer, and its iteration; iteration -1 without one.
    """

    def __init__(self, of: FamilySeries, columns: Columns) -> None:
        self.of = of
        self.columns = columns
        self.layers = of.rows
        self.family = of.family
        self.sign = sign_of(of.family.worse)
        rows = len(self.layers)
        shape = (len(self.layers), len(columns))
        self.cells: dict[int, Floats] = {}
        self.present: dict[int, Mask] = {}
        self.series: dict[int, Ints] = {}
        self.worst: dict[int, Floats] = {}
        self.worst_at: dict[int, Ints] = {}
        for rank in of.ranks:
            self.cells[rank] = np.full(shape, np.nan)
            self.present[rank] = np.zeros(shape, bool)
            self.series[rank] = np.full(rows, -1)
            self.worst[rank] = np.full(rows, np.nan)
            self.worst_at[rank] = np.full(rows, -1)
        places = zip(np.searchsorted(self.layers, of.layer).tolist(), of.rank.tolist(), strict=True)
        self._places = dict(zip(of.series.tolist(), places, strict=True))

    def add(self, series: int, iterations: Ints, values: Floats) -> None:
        row, rank = self._places[series]
        self.series[rank][row] = series
        if not len(values):
            return
        key = badness(values, self.sign)
        column = self.columns.column_of(iterations)
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        # The first of the worst values in each column.
        highest = np.maximum.reduceat(key, starts)
        is_highest = np.flatnonzero(key == np.repeat(highest, np.diff(np.append(starts, len(key)))))
        _, first = np.unique(column[is_highest], return_index=True)
        self.cells[rank][row, column[starts]] = values[is_highest[first]]
        self.present[rank][row, column[starts]] = True
        worst = int(np.argmax(key))
        self.worst[rank][row] = values[worst]
        self.worst_at[rank][row] = iterations[worst]

    def without_empty_columns(self) -> Overview:
        chosen = np.flatnonzero(np.any([present.any(0) for present in self.present.values()], 0))
        self.columns = self.columns.take(chosen)
        for rank in self.of.ranks:
            self.cells[rank] = self.cells[rank][:, chosen]
            self.present[rank] = self.present[rank][:, chosen]
        return self

    def worst_of_rows(self) -> dict[int, WorstValue]:
        worst: dict[int, WorstValue] = {}
        bad: dict[int, float] = {}
        for rank in self.of.ranks:
            key = badness(self.worst[rank], self.sign).tolist()
            for row in np.flatnonzero(self.worst_at[rank] >= 0).tolist():
                if row not in worst or key[row] > bad[row]:
                    worst[row] = WorstValue(float(self.worst[rank][row]), rank, int(self.worst_at[rank][row]))
                    bad[row] = key[row]
        return worst

    def worst_rows(self, most: int) -> list[tuple[int, int]]:
        worst = self.worst_of_rows()
        rows = worst_first(most, self.family, {row: number.value for row, number in worst.items()})
        return [(row, worst[row].rank) for row in rows]


def pieces(counts: Ints, most: int = MOST_AT_ONCE) -> Iterator[slice]:
    """Divide consecutive series into slices of at most ``most`` values; a longer series gets its own slice."""
    begin = 0
    total = 0
    for end, count in enumerate(counts.tolist()):
        if total + count > most and end > begin:
            yield slice(begin, end)
            begin = end
            total = 0
        total += count
    if begin < len(counts):
        yield slice(begin, len(counts))


def overviews(run: RecordedRun, families: Sequence[FamilySeries], columns: Columns) -> Iterator[Overview]:
    """Return the overviews of families, in order. The run is read once, in pieces of bounded size."""
    owner: dict[int, FamilySeries] = {}
    counts: list[int] = []
    for family in families:
        owner |= dict.fromkeys(family.series.tolist(), family)
        counts += family.count.tolist()
    numbers = list(owner)
    last = {family.series[-1]: family for family in families}  # after its last series, a family is complete
    made: Overview | None = None
    for piece in pieces(np.array(counts, np.int64)):
        table = run.values(numbers[piece])
        series = table["series"].to_numpy()
        iterations = table["iteration"].to_numpy()
        values = table["value"].to_numpy()
        flags = table["flags"].to_numpy()
        for number in numbers[piece]:
            begin, end = np.searchsorted(series, (number, number + 1)).tolist()
            family = owner[number]
            made = made or Overview(family, columns)
            counting = ~family.family.leaves_out(flags[begin:end])
            if begin < end:
                made.add(number, iterations[begin:end][counting], values[begin:end][counting])
            if number in last:
                yield made.without_empty_columns()
                made = None


_MOST_HISTOGRAMS_AT_ONCE = 20_000


def histograms(
    run: RecordedRun, of: FamilySeries, columns: Columns, wanted: Collection[int]
) -> Iterator[tuple[int, Columns, int, Floats]]:
    """Yield the histograms of a family, layer by layer, summed over the steps of each column.

    Yields:
        The index of the series in the family, the columns with a histogram, the first nonempty bin, and the counts
            from it on: [columns, bins].
    """
    bins = len(EXPONENT_COLUMNS)
    order = [place for place in np.argsort(of.layer, kind="stable") if int(of.series[place]) in wanted]
    for piece in pieces(of.count[order], _MOST_HISTOGRAMS_AT_ONCE):
        chosen = order[piece]
        table = run.vectors(of.series[chosen].tolist())
        series = table["series"].to_numpy()
        iterations = table["iteration"].to_numpy()
        bin_lists = table["bin"].combine_chunks()
        count_lists = table["count"].combine_chunks()
        offsets = bin_lists.offsets.to_numpy()
        all_bins = bin_lists.values.to_numpy()
        all_counts = count_lists.values.to_numpy()
        for place in chosen:
            rows = np.flatnonzero(series == of.series[place])
            if not rows.size:
                continue
            begin = offsets[rows[0]]
            end = offsets[rows[-1] + 1]
            column = np.repeat(columns.column_of(iterations[rows]), np.diff(offsets[rows[0] : rows[-1] + 2]))
            cell = column * bins + all_bins[begin:end].astype(np.int64)
            counts: Floats = (
                np.bincount(cell, all_counts[begin:end], len(columns) * bins).reshape(-1, bins).astype(np.float64)
            )
            used = np.unique(columns.column_of(iterations[rows]))
            counts = counts[used]
            filled = np.flatnonzero(counts.any(0))
            low, high = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, 1)
            yield int(place), columns.take(used), low, counts[:, low:high]
