"""The layers of a run in the order of execution, its families of statistics, and their values over spans of steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.layers.folding import ShortNames
from te_precision_callbacks.runs.recorded import Curve, RecordedRun, sort_by_position
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.runs.tables import REDUCED
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.series import Family, badness, family_of, sign_of
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS

SHORT = 42

MOST_AT_ONCE = 2_000_000
_MOST_HISTOGRAMS_AT_ONCE = 20_000

_CELLS = 2_000_000
"""The maximum number of cells of all heat maps, unless there are more rows."""

_MOST_COLUMNS = 400


class ReportError(PrecisionDebugError, ValueError):
    """A report cannot be made: the run has no values, or the file cannot be written."""


@dataclass(frozen=True)
class ReportLayer:
    """A layer of the run. The short name is for plots, without control characters."""

    name: str
    short: str


class WorstValue(NamedTuple):
    """The worst value of a layer; ``layer``: its index in :attr:`Subjects.layers`."""

    layer: int
    rank: int
    value: float
    at: int


@dataclass(frozen=True, eq=False)
class FamilySeries:
    """The series of a statistic of a tensor, by rank, then by layer; all arrays are [series].

    Attributes:
        series: their indices in the run.
        layer: indices in :attr:`Subjects.layers`; -1 without a layer.
        rank: :data:`REDUCED` for reduced values.
        worst, worst_at: the worst value and its iteration, without delayed scaling's first step; or nan and -1.
    """

    family: Family
    series: Ints
    layer: Ints
    rank: Ints
    worst: Floats
    worst_at: Ints

    def worst_layers(self, most: int) -> list[WorstValue]:
        """The worst value of each of the worst layers, worst first."""
        values = {row: float(self.worst[row]) for row in np.flatnonzero(self.worst_at >= 0).tolist()}
        worst: dict[int, WorstValue] = {}
        for row in worst_first(len(values), self.family, values):
            value = WorstValue(int(self.layer[row]), int(self.rank[row]), values[row], int(self.worst_at[row]))
            worst.setdefault(value.layer, value)
        return list(worst.values())[:most]


class Subjects:
    """The layers of a run in the order of execution, then layers that have not run, and its families of statistics.

    Attributes:
        number_of_layer: name -> index in ``layers``; also without the scope, then the first of its layers.
        families, histograms: by tensor.
        free: the families without a layer.
    """

    def __init__(self, run: RecordedRun) -> None:
        names = [layer_name(subject.scope, subject.layer) for subject in run.subjects]
        recorded = run.layers.to_pylist()
        without_scope = dict(zip(names, (subject.layer for subject in run.subjects), strict=True))
        without_scope |= {layer_name(row["scope"], row["layer"]): row["layer"] for row in recorded}
        placed = [(layer_name(row["scope"], row["layer"]), row["exec_fwd"]) for row in recorded]
        in_order = sort_by_position((*placed, *zip(names, itertools.repeat(None))))
        short = ShortNames(map(visible, in_order))
        self.layers = [ReportLayer(name, short.of(visible(name), SHORT)) for name in in_order]
        self.number_of_layer = {name: number for number, name in enumerate(in_order)}
        for number, name in enumerate(in_order):
            self.number_of_layer.setdefault(without_scope[name], number)
        layers = np.array([self.number_of_layer.get(name, -1) for name in names], np.int64)
        ranks = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        worst = run.series["worst"].to_numpy()
        worst_at = run.series["worst_at"].fill_null(-1).to_numpy()
        members = group_by_key((_family(run, series), series) for series in np.lexsort((layers, ranks)).tolist())
        order: dict[str, int] = {tensor: number for number, tensor in enumerate(TENSORS)}
        self.histograms: list[FamilySeries] = []
        self.families: list[FamilySeries] = []
        self.free: list[FamilySeries] = []
        for family in sorted(members, key=lambda family: order.get(family.tensor, len(order))):
            rows = np.array(members[family], np.int64)
            series = FamilySeries(family, rows, layers[rows], ranks[rows], worst[rows], worst_at[rows])
            if (series.layer < 0).any():
                self.free.append(series)
            elif family.request is not None and family.request.statistic.is_histogram:
                self.histograms.append(series)
            else:
                self.families.append(series)


def _family(run: RecordedRun, series: int) -> Family:
    subject = run.subjects[series]
    return family_of(subject.tensor, subject.statistic, subject.gemm or None)


def layer_name(scope: str | None, layer: str | None) -> str:
    """The name of a layer in a report: prefixed with the scope, unless it already begins with it."""
    if not layer or not scope or layer.startswith(f"{scope}."):
        return layer or ""
    return f"{scope}.{layer}"


def folder_name(run: RecordedRun) -> str:
    path = Path(os.path.abspath(run.path))  # without dots; links stay as they are
    for folder in (path, *path.parents):
        if folder.name == FOLDER:
            path = folder.parent
    return path.name or run.run_id


# ---------------------------------------------------------------------- values over time


class Columns(NamedTuple):
    """The first and last iteration of each span of steps, [columns]."""

    first: Ints
    last: Ints

    @classmethod
    def of(cls, run: RecordedRun, most: int) -> Columns:
        """Divide the iterations of a run into columns of about equal size."""
        parts = [table["iteration"].to_numpy() for table in (run.steps, run.scalars) if len(table)]
        parts += [run.series[column].drop_null().to_numpy() for column in ("first", "last")]
        iterations = np.unique(np.concatenate(parts).astype(np.int64))
        number = min(most, len(iterations))
        edges = np.linspace(0, len(iterations), number + 1).astype(np.int64)
        return cls(iterations[edges[:-1]], iterations[edges[1:] - 1])

    @classmethod
    def of_heat_maps(cls, run: RecordedRun, families: Sequence[FamilySeries]) -> Columns:
        """Return as many columns as fit on a page."""
        rows = sum(len(family.series) for family in families)
        return cls.of(run, max(1, min(_CELLS // max(rows, 1), _MOST_COLUMNS)))

    def column_of(self, iterations: Ints) -> Ints:
        return np.maximum(np.searchsorted(self.first, iterations, "right") - 1, 0)

    def take(self, chosen: Ints) -> Columns:
        return Columns(self.first[chosen], self.last[chosen])


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


def curves_of(run: RecordedRun, numbers: Sequence[int]) -> Iterator[Curve]:
    """Yield the values of series, in the given order, without delayed scaling's first step."""
    table = run.values(numbers)
    series = table["series"].to_numpy().astype(np.int64)  # searchsorted() would convert int32 in each call
    iterations = table["iteration"].to_numpy()
    values = table["value"].to_numpy()
    flags = table["flags"].fill_null(0).to_numpy()
    for number in numbers:
        rows = slice(*np.searchsorted(series, (number, number + 1)))
        counting = ~_family(run, number).leaves_out(flags[rows])
        yield Curve(iterations[rows][counting], values[rows][counting])


class HeatMap(NamedTuple):
    """The values of a family by span of steps, the worst of each; without delayed scaling's first step, which would
    dominate the colors.

    Attributes:
        columns: those with a value of any series.
        cells: [series, columns]: nan also without a value.
        present: [series, columns]: whether there is a value.
    """

    columns: Columns
    cells: Floats
    present: Mask


def heat_maps(run: RecordedRun, families: Sequence[FamilySeries], columns: Columns) -> Iterator[HeatMap]:
    """Yield the heat maps of families, in order. The run is read once."""
    curves = curves_of(run, [number for family in families for number in family.series.tolist()])
    for family in families:
        cells = np.full((len(family.series), len(columns.first)), np.nan)
        present = np.zeros(cells.shape, bool)
        for row, (iterations, values) in zip(range(len(cells)), curves, strict=False):
            column = columns.column_of(iterations)
            order = np.lexsort((-badness(values, sign_of(family.family.worse)), column))
            chosen = order[np.unique(column[order], return_index=True)[1]]  # the first of the worst in each column
            cells[row, column[chosen]] = values[chosen]
            present[row, column[chosen]] = True
        used = np.flatnonzero(present.any(0))
        yield HeatMap(columns.take(used), cells[:, used], present[:, used])


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
    counts_of_series = run.series["count"].fill_null(0).to_numpy()[list(numbers)]
    for piece in pieces(counts_of_series, _MOST_HISTOGRAMS_AT_ONCE):
        table = run.vectors(numbers[piece])
        for number in numbers[piece]:
            rows = table.filter(pc.equal(table["series"], number)).combine_chunks()
            if not len(rows):
                continue
            column = columns.column_of(rows["iteration"].to_numpy())
            column_of_bins = column[pc.list_parent_indices(rows["bin"]).to_numpy()]
            counts: Floats = np.zeros((len(columns.first), len(EXPONENT_COLUMNS)))
            bins = pc.list_flatten(rows["bin"]).to_numpy()
            np.add.at(counts, (column_of_bins, bins), pc.list_flatten(rows["count"]).to_numpy())
            used = np.unique(column)
            lowest = int(bins.min(initial=len(EXPONENT_COLUMNS) - 1))
            highest = int(bins.max(initial=lowest))
            yield HistogramOverTime(number, columns.take(used), lowest, counts[used, lowest : highest + 1])
