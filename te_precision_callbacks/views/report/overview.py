"""Heat maps of each statistic, layers by spans of steps, where a cell is the worst value; and histograms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from te_precision_callbacks.runs.recorded import Curve, RecordedRun
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.series import badness, family_of, sign_of
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS
from te_precision_callbacks.views.report.subjects import FamilySeries

MOST_AT_ONCE = 2_000_000

_CELLS = 2_000_000
"""The maximum number of cells of all heat maps, unless there are more rows."""

_MOST_COLUMNS = 400


@dataclass(frozen=True)
class Columns:
    """The columns of a heat map: the first and last iteration of each span, [columns]."""

    first: Ints
    last: Ints

    @classmethod
    def of(cls, run: RecordedRun, most: int) -> Columns:
        """Divide the iterations of a run into columns of about equal size."""
        parts = [table["iteration"].to_numpy() for table in (run.steps, run.scalars) if len(table)]
        parts += [run.series[column].drop_null().to_numpy() for column in ("first", "last")]
        if not len(run.steps):
            parts += [curve.iterations for curve in curves_of(run, range(len(run.series)))]
        iterations = np.unique(np.concatenate(parts).astype(np.int64))
        number = min(most, len(iterations))
        edges = np.linspace(0, len(iterations), number + 1).astype(np.int64)
        return cls(iterations[edges[:-1]], iterations[edges[1:] - 1])

    def __len__(self) -> int:
        return len(self.first)

    def column_of(self, iterations: Ints) -> Ints:
        return np.maximum(np.searchsorted(self.first, iterations, "right") - 1, 0)

    def take(self, chosen: Ints) -> Columns:
        return Columns(self.first[chosen], self.last[chosen])


def heat_map_columns(run: RecordedRun, families: Sequence[FamilySeries]) -> Columns:
    """Return as many columns as fit on a page."""
    rows = sum(len(family.rows) * len(family.ranks) for family in families)
    return Columns.of(run, max(1, min(_CELLS // max(rows, 1), _MOST_COLUMNS)))


class WorstValue(NamedTuple):
    """The worst value of a layer; ``layer``: its index in :attr:`Subjects.layers`."""

    layer: int
    rank: int
    value: float
    at: int


class Overview:
    """A statistic of a tensor in all layers, over time.

    Values of delayed scaling's first step, with the scale 1, are left out, since they would dominate the colors.

    Attributes:
        layers: [rows], the layers with the statistic, in the order of execution.
        ranks: as :attr:`FamilySeries.ranks`.
        cells: [ranks, rows, columns]: the worst value of the column; nan also without a value.
        present: [ranks, rows, columns], bool: whether there is a value.
        places: the index of a series -> its rank and row in these arrays.
        worst, worst_at: [ranks, rows]: the worst value of each layer, and its iteration; iteration -1 without one.
    """

    def __init__(self, series: FamilySeries, columns: Columns) -> None:
        self.family = series.family
        self.columns = columns
        self.layers = series.rows
        self.ranks = series.ranks
        shape = (len(self.ranks), len(self.layers))
        self.cells = np.full((*shape, len(columns)), np.nan)
        self.present = np.zeros(self.cells.shape, bool)
        self.worst = np.full(shape, np.nan)
        self.worst_at = np.full(shape, -1)
        ranks = np.searchsorted(self.ranks, series.rank).tolist()
        rows = np.searchsorted(self.layers, series.layer).tolist()
        self.places = dict(zip(series.series.tolist(), zip(ranks, rows, strict=True), strict=True))

    def add(self, series: int, curve: Curve) -> None:
        iterations, values = curve
        if not len(values):
            return
        rank, row = self.places[series]
        key = badness(values, sign_of(self.family.worse))
        column = self.columns.column_of(iterations)
        order = np.lexsort((-key, column))
        chosen = order[np.unique(column[order], return_index=True)[1]]  # the first of the worst values in each column
        self.cells[rank, row, column[chosen]] = values[chosen]
        self.present[rank, row, column[chosen]] = True
        worst = int(np.argmax(key))
        self.worst[rank, row] = values[worst]
        self.worst_at[rank, row] = iterations[worst]

    def without_empty_columns(self) -> Overview:
        used = np.flatnonzero(self.present.any((0, 1)))
        self.columns = self.columns.take(used)
        self.cells = self.cells[..., used]
        self.present = self.present[..., used]
        return self

    def worst_layers(self, most: int) -> list[WorstValue]:
        """The worst value of each of the worst layers, worst first."""
        values = {(rank, row): float(self.worst[rank, row]) for rank, row in np.argwhere(self.worst_at >= 0).tolist()}
        worst: dict[int, WorstValue] = {}
        for place in worst_first(len(values), self.family, values):
            rank, row = place
            layer = int(self.layers[row])
            if layer not in worst:
                worst[layer] = WorstValue(layer, self.ranks[rank], values[place], int(self.worst_at[place]))
        return list(worst.values())[:most]


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


def _counts(run: RecordedRun) -> Ints:
    return np.asarray(run.series["count"].fill_null(0).to_numpy().astype(np.int64))


def curves_of(run: RecordedRun, numbers: Sequence[int]) -> Iterator[Curve]:
    """Yield the values of series, in the given order, without delayed scaling's first step.

    The run is read in pieces of bounded size.
    """
    for piece in pieces(_counts(run)[list(numbers)]):
        table = run.values(numbers[piece])
        series = table["series"].to_numpy().astype(np.int64)  # searchsorted() would convert int32 in each call
        iterations = table["iteration"].to_numpy()
        values = table["value"].to_numpy()
        flags = table["flags"].fill_null(0).to_numpy()
        for number in numbers[piece]:
            subject = run.subjects[number]
            rows = slice(*np.searchsorted(series, (number, number + 1)))
            counting = ~family_of(subject.tensor, subject.statistic).leaves_out(flags[rows])
            yield Curve(iterations[rows][counting], values[rows][counting])


def overviews(run: RecordedRun, families: Sequence[FamilySeries], columns: Columns) -> Iterator[Overview]:
    """Return the overviews of families, in order. The run is read once."""
    curves = curves_of(run, [number for family in families for number in family.series.tolist()])
    for family in families:
        overview = Overview(family, columns)
        for number in family.series.tolist():
            overview.add(number, next(curves))
        yield overview.without_empty_columns()


_MOST_HISTOGRAMS_AT_ONCE = 20_000


class HistogramOverTime(NamedTuple):
    """A histogram, summed over the steps of each column.

    Attributes:
        series: index of its series.
        columns: the columns with a histogram.
        lowest: the first nonempty bin.
        counts: [columns, bins], from the first nonempty bin to the last one.
    """

    series: int
    columns: Columns
    lowest: int
    counts: Floats


def histograms(run: RecordedRun, numbers: Sequence[int], columns: Columns) -> Iterator[HistogramOverTime]:
    """Yield the histograms of series with values, in the given order."""
    for piece in pieces(_counts(run)[list(numbers)], _MOST_HISTOGRAMS_AT_ONCE):
        table = run.vectors(numbers[piece])
        for number in numbers[piece]:
            rows = table.filter(pc.equal(table["series"], number)).combine_chunks()
            if not len(rows):
                continue
            column = columns.column_of(rows["iteration"].to_numpy())
            column_of_bins = column[pc.list_parent_indices(rows["bin"]).to_numpy()]
            counts: Floats = np.zeros((len(columns), len(EXPONENT_COLUMNS)))
            bins = pc.list_flatten(rows["bin"]).to_numpy()
            np.add.at(counts, (column_of_bins, bins), pc.list_flatten(rows["count"]).to_numpy())
            used = np.unique(column)
            lowest = int(bins.min(initial=len(EXPONENT_COLUMNS) - 1))
            highest = int(bins.max(initial=lowest))
            yield HistogramOverTime(number, columns.take(used), lowest, counts[used, lowest : highest + 1])
