"""What a comparison has compared, as far as its page shows it.

    numbers = ComparedNumbers()
    result = compare(a, b, noise=[again], numbers=numbers)
    numbers.grids[0].cells[REDUCED]        # [layers, columns]: how far apart, for the heat map
    numbers.curves                          # both sides of series, those that depart first

Runs may be large, and are read in pieces; of each piece this keeps the largest difference of each cell, and curves with
a bounded number of points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.runs.index import REDUCED, Subject
from te_precision_callbacks.views.compare.departures import Compared
from te_precision_callbacks.views.compare.judging_scales import scale_of
from te_precision_callbacks.views.compare.sides import Floats, Ints, Side, family
from te_precision_callbacks.views.report.overview import Columns
from te_precision_callbacks.views.report.subjects import Subjects, layer_name

Family = tuple[str, str, str]
"""Tensor, GEMM, statistic."""

_CELLS = 4_000_000
"""The most cells of all grids, unless there are more series than fit with the fewest columns."""

_MOST_COLUMNS, _FEWEST_COLUMNS = 400, 24

_MOST_POINTS = 1000
"""The most points of a curve."""

_MOST_CURVES = 1500


class ComparedSeries(NamedTuple):
    """Both sides of a series.

    Attributes:
        subject: the series.
        departs: whether it is a finding.
        strength: the largest difference, as a multiple of what counts.
        every: every how many of its steps are there, beside the one at which it departs.
        iterations: [n].
        a, b: [n]: both sides.
        low, high: [n]: between them a value is ordinary: as far from ``a`` as most of the noise is at that step; nan
            without a noise floor.
        below, above: [n]: between them a value is too near to ``a`` to count.
    """

    subject: Subject
    departs: bool
    strength: float
    every: int
    iterations: Ints
    a: Floats
    b: Floats
    low: Floats
    high: Floats
    below: Floats
    above: Floats


@dataclass
class DifferenceGrid:
    """How far apart the sides are in a statistic of a tensor, layer by step.

    Attributes:
        tensor, gemm, statistic: which.
        unit: ``spreads`` with a noise floor, else that of the statistic's scale.
        layers: [rows], as places in :attr:`ComparedNumbers.subjects`.
        bound: the difference that counts, in ``unit``, of the middle series.
        cells: rank -> [rows, columns]: the largest difference of each, with its sign; nan where there is none.
        worst, worst_at: rank -> [rows]: the largest of a layer, and its iteration; nan and -1 where there is none.
    """

    tensor: str
    gemm: str
    statistic: str
    unit: str
    layers: Ints
    bound: float
    cells: dict[int, Floats] = field(default_factory=dict)
    worst: dict[int, Floats] = field(default_factory=dict)
    worst_at: dict[int, Ints] = field(default_factory=dict)

    def of_rank(self, rank: int, columns: int) -> tuple[Floats, Floats, Ints]:
        """The cells of a rank, the largest difference of each layer, and when that was."""
        if rank not in self.cells:
            self.cells[rank] = np.full((len(self.layers), columns), np.nan)
            self.worst[rank] = np.full(len(self.layers), np.nan)
            self.worst_at[rank] = np.full(len(self.layers), -1, np.int64)
        return self.cells[rank], self.worst[rank], self.worst_at[rank]


class ComparedNumbers:
    """Keeps what a comparison compares; give it to ``compare(numbers=)``, each time a new one.

    Attributes:
        a, b: the sides.
        subjects: the layers, in the order of execution.
        columns: the iterations of the grids.
    """

    a: Side
    b: Side
    subjects: Subjects
    columns: Columns

    def __init__(self) -> None:
        self._curves: list[ComparedSeries] = []
        self._grids: dict[Family, DifferenceGrid] = {}
        self._places: dict[Family, dict[Subject, tuple[int, int]]] = {}

    def taking(self, a: Side, b: Side, paired: Sequence[Subject]) -> Callable[[Compared], None]:
        """Begin.

        Args:
            a: one side.
            b: the other side.
            paired: the series that pair.

        Returns:
            What takes the numbers.
        """
        self.a, self.b = a, b
        self.subjects = Subjects(a.run)
        layer_of = {layer.name: number for number, layer in enumerate(self.subjects.layers)}
        most = min(max(_CELLS // max(len(paired), 1), _FEWEST_COLUMNS), _MOST_COLUMNS)
        self.columns = Columns.of(a.run, most)
        members: dict[Family, list[Subject]] = {}
        for subject in paired:
            if subject.layer:
                members.setdefault(family(subject), []).append(subject)
        for key, subjects in members.items():
            layers = [layer_of[layer_name(each.scope, each.layer)] for each in subjects]
            rows = np.unique(layers)
            self._places[key] = {
                each: (_rank(each), int(row)) for each, row in zip(subjects, np.searchsorted(rows, layers), strict=True)
            }
            self._grids[key] = DifferenceGrid(*key, "", rows, np.nan)
        return self._take

    @property
    def grids(self) -> list[DifferenceGrid]:
        """Those that have numbers."""
        return [grid for grid in self._grids.values() if grid.cells]

    @property
    def curves(self) -> list[ComparedSeries]:
        """Those that depart, the strongest first, then the others; no more than there is room for."""
        return sorted(self._curves, key=_interest)

    def _take(self, part: Compared) -> None:
        keys = list(dict.fromkeys(map(family, part.subjects)))
        number_of = {key: number for number, key in enumerate(keys)}
        of_each = np.array([number_of[family(subject)] for subject in part.subjects])[part.series]
        order = np.argsort(of_each, kind="stable")
        edges = np.searchsorted(of_each[order], np.arange(len(keys) + 1))
        for key, begin, end in zip(keys, edges[:-1], edges[1:], strict=True):
            if key in self._grids and begin < end:
                self._take_grid(part, key, order[begin:end])
        self._take_curves(part)

    def _take_grid(self, part: Compared, key: Family, chosen: Ints) -> None:
        grid = self._grids[key]
        known = ~np.isnan(part.spread[chosen])
        if not grid.unit:
            tensor, _, statistic = key
            grid.unit = "spreads" if known.any() else scale_of(tensor, statistic).unit
        if grid.unit == "spreads":
            chosen = chosen[known]
        measure = part.spread[chosen] if grid.unit == "spreads" else np.ones(len(chosen))
        apart = part.difference[chosen] / measure
        grid.bound = float(np.fmin(grid.bound, np.median(part.limit[chosen] / measure)))
        # A cell keeps the last number that is put there: the largest.
        order = np.argsort(np.abs(apart), kind="stable")
        chosen, apart = chosen[order], apart[order]
        series, iterations = part.series[chosen], part.iterations[chosen]
        column = self.columns.column_of(iterations)
        rank_of, row_of = np.full(len(part.subjects), REDUCED - 1), np.zeros(len(part.subjects), np.int64)
        for number, subject in enumerate(part.subjects):
            if subject in self._places[key]:
                rank_of[number], row_of[number] = self._places[key][subject]
        for rank in np.unique(rank_of[series]).tolist():
            own = rank_of[series] == rank
            row = row_of[series[own]]
            cells, worst, worst_at = grid.of_rank(rank, len(self.columns))
            cells[row, column[own]] = apart[own]
            worst[row], worst_at[row] = apart[own], iterations[own]

    def _take_curves(self, part: Compared) -> None:
        begin_of = dict(zip(part.series[part.begins].tolist(), part.begins.tolist(), strict=True))
        edges = np.searchsorted(part.series, np.arange(len(part.subjects) + 1))
        for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            if begin == end:
                continue
            every = -(-(end - begin) // _MOST_POINTS)
            at = np.arange(begin, end, every)
            if number in begin_of:
                at = np.unique(np.append(at, begin_of[number]))
            strength = float(np.max(np.abs(part.difference[begin:end]) / part.limit[begin:end]))
            a, b, low, high, below, above = (
                column[at] for column in (part.a, part.b, part.low, part.high, part.below, part.above)
            )
            departs = number in begin_of
            found = (part.subjects[number], departs, strength, every, part.iterations[at])
            self._curves.append(ComparedSeries(*found, a, b, low, high, below, above))
            if len(self._curves) >= 2 * _MOST_CURVES:
                self._curves = self.curves[:_MOST_CURVES]


def _interest(curve: ComparedSeries) -> tuple[bool, float]:
    return not curve.departs, -curve.strength


def _rank(subject: Subject) -> int:
    return REDUCED if subject.rank is None else subject.rank
