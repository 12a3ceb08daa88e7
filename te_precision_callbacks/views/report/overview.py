"""The overview of a run: layer by step for each statistic, in few columns, each cell the worst of its steps.

for overview in overviews(run, subjects, Columns.of(run, most=250)):
    overview.cells[REDUCED]             # [layers, columns], float64, nan where there is no number
    overview.worst[REDUCED]             # [layers], the worst number of each layer, and when it was

A run is read once, in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.series import Family, badness, sign_of
from te_precision_callbacks.views.report.subjects import FamilySeries, Ints

Floats = npt.NDArray[np.float64]

MOST_AT_ONCE = 2_000_000
"""The most numbers that are read at once."""

ALL_RANKS = -2
"""Stands for the worst number of all ranks."""


@dataclass(frozen=True)
class Columns:
    """The columns of an overview: consecutive iterations that had numbers.

    Attributes:
        first, last: [columns], the first and the last iteration of each.
    """

    first: Ints
    last: Ints

    @classmethod
    def of(cls, run: RecordedRun, most: int) -> Columns:
        """At most so many columns of about equally many iterations. Where steps were thinned out, a column begins at
        one that is left, so that all layers have numbers in it.

        Args:
            run: the run.
            most: the most columns.
        """
        parts = [table["iteration"].to_numpy() for table in (run.steps, run.scalars) if len(table)]
        if not len(run.steps):
            parts += [np.unique(table["iteration"].to_numpy()) for table in _pieces_of_all(run)]
        parts += [run.series[column].drop_null().to_numpy() for column in ("first", "last")]
        iterations = np.unique(np.concatenate(parts).astype(np.int64))
        if run.thinned:
            last, whole = iterations[-1:], run.has_all_of(iterations)
            iterations = iterations[whole] if whole.any() else last
        number = min(most, len(iterations))
        edges = np.linspace(0, len(iterations), number + 1).astype(np.int64)
        return cls(iterations[edges[:-1]], iterations[edges[1:] - 1])

    def __len__(self) -> int:
        return len(self.first)

    def column_of(self, iterations: Ints) -> Ints:
        """The column of each iteration."""
        return np.maximum(np.searchsorted(self.first, iterations, "right") - 1, 0)

    def take(self, chosen: Ints) -> Columns:
        """Some of the columns."""
        return Columns(self.first[chosen], self.last[chosen])


def _pieces_of_all(run: RecordedRun) -> Iterator[pa.Table]:
    numbers = run.series["series"].to_numpy().astype(np.int64)
    counts = run.series["count"].fill_null(0).to_numpy().astype(np.int64)
    for piece in pieces(counts):
        yield run.values(numbers[piece].tolist())


class WorstNumber(NamedTuple):
    """The worst number of a layer: its rank, and its iteration."""

    value: float
    rank: int
    at: int


@dataclass
class Overview:
    """A statistic of a tensor in all layers, over time.

    What delayed scaling did in a layer's first step, with the scale 1, is no worst number, and has no cell unless its
    column has others: it would hide all else.

    Attributes:
        of: the statistic and its series.
        layers: [rows], the layers that have it, in the order of execution.
        columns: those in which it has any number, one that counts or not.
        cells: rank -> [rows, columns]: the worst number of the column; nan also where there is none.
        present: rank -> [rows, columns], bool: whether there is a number.
        series: rank -> [rows], the number of the series; -1 where there is none.
        worst, worst_at: rank -> [rows]: the worst number of each layer, and its iteration; iteration -1 for none.
        last, last_at: likewise for the last number.
        exact: iteration -> rank -> [rows], the numbers of that iteration; nan where there is none.
        left: rank -> [rows, columns], bool: whether all numbers there are of delayed scaling's first step.
    """

    of: FamilySeries
    layers: Ints
    columns: Columns
    cells: dict[int, Floats] = field(default_factory=dict)
    present: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    series: dict[int, Ints] = field(default_factory=dict)
    worst: dict[int, Floats] = field(default_factory=dict)
    worst_at: dict[int, Ints] = field(default_factory=dict)
    last: dict[int, Floats] = field(default_factory=dict)
    last_at: dict[int, Ints] = field(default_factory=dict)
    exact: dict[int, dict[int, Floats]] = field(default_factory=dict)
    left: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The statistic."""
        return self.of.family

    def worst_of_rows(self) -> dict[int, WorstNumber]:
        """Row -> the worst number of all ranks, of the rows that have one that counts."""
        sign = sign_of(self.family.worse)
        found: dict[int, WorstNumber] = {}
        bad: dict[int, float] = {}
        for rank in self.of.ranks:
            key = badness(self.worst[rank], sign).tolist()
            for row in np.flatnonzero(self.worst_at[rank] >= 0).tolist():
                if row not in found or key[row] > bad[row]:
                    found[row] = WorstNumber(float(self.worst[rank][row]), rank, int(self.worst_at[rank][row]))
                    bad[row] = key[row]
        return found

    def worst_rows(self, most: int) -> list[tuple[int, int]]:
        """The rows with the worst numbers, and their ranks, the worst first; a row counts once."""
        worst = self.worst_of_rows()
        rows = worst_first(most, self.family, {row: number.value for row, number in worst.items()}, lambda _: {})
        return [(row, worst[row].rank) for row in rows]


def pieces(counts: Ints, most: int = MOST_AT_ONCE) -> Iterator[slice]:
    """Consecutive series with so many numbers together, or one with more."""
    begin = total = 0
    for end, count in enumerate(counts.tolist()):
        if total + count > most and end > begin:
            yield slice(begin, end)
            begin, total = end, 0
        total += count
    if begin < len(counts):
        yield slice(begin, len(counts))


def overviews(
    run: RecordedRun, families: Sequence[FamilySeries], columns: Columns, exact: Iterable[int] = ()
) -> Iterator[Overview]:
    """The overviews of families, in order.

    Args:
        run: the run.
        families: those that are wanted.
        columns: the columns.
        exact: the iterations whose numbers are kept as they are.
    """
    if not families:
        return
    makers = [_Maker(one, columns, np.unique(np.array(list(exact), np.int64))) for one in families]
    owner = np.concatenate([np.full(len(one.series), place) for place, one in enumerate(families)])
    number = np.concatenate([one.series for one in families])
    counts = np.concatenate([one.count for one in families])
    made = 0
    for piece in pieces(counts):
        table = run.values(number[piece].tolist())
        series, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
        values, flags = table["value"].to_numpy(), table["flags"].to_numpy()
        starts = np.flatnonzero(np.diff(series, prepend=-1))
        ends = np.append(starts[1:], len(series))
        where = dict(zip(series[starts].tolist(), zip(starts.tolist(), ends.tolist(), strict=True), strict=True))
        for place in range(owner[piece.start], owner[piece.stop - 1] + 1):
            for wanted in number[piece][owner[piece] == place].tolist():
                if wanted in where:
                    begin, end = where[wanted]
                    makers[place].add(wanted, iterations[begin:end], values[begin:end], flags[begin:end])
        done = len(families) if piece.stop == len(number) else int(owner[piece.stop])
        for place in range(made, done):
            yield makers[place].made()
            makers[place].forget()
        made = done


class _Maker:
    """Makes the overview of a family from its series, one after another."""

    def __init__(self, of: FamilySeries, columns: Columns, exact: Ints) -> None:
        self._of = of
        self._columns = columns
        self._exact = exact
        self._made: Overview | None = None
        rows = of.rows
        self._row_of = dict(
            zip(of.series.tolist(), zip(np.searchsorted(rows, of.layer), of.rank, strict=True), strict=True)
        )

    def _begun(self) -> Overview:
        if self._made is None:
            made = self._made = Overview(self._of, self._of.rows, self._columns)
            shape = (len(made.layers), len(self._columns))
            for rank in self._of.ranks:
                made.cells[rank] = np.full(shape, np.nan)
                made.present[rank], made.left[rank] = np.zeros(shape, bool), np.zeros(shape, bool)
                made.series[rank], made.worst_at[rank], made.last_at[rank] = (
                    np.full(len(made.layers), -1) for _ in range(3)
                )
                made.worst[rank], made.last[rank] = (np.full(len(made.layers), np.nan) for _ in range(2))
        return self._made

    def add(self, series: int, iterations: Ints, values: Floats, flags: npt.NDArray[np.uint8]) -> None:
        """Take the numbers of a series, by iteration."""
        made = self._begun()
        row, rank = self._row_of[series]
        family = self._of.family
        counts = ~family.leaves_out(flags)
        made.left[rank][row, self._columns.column_of(iterations[~counts])] = True
        if counts.any():
            self._add_counting(made, (row, rank), iterations[counts], values[counts])
        made.series[rank][row] = series
        made.last[rank][row], made.last_at[rank][row] = values[-1], iterations[-1]
        for iteration in self._exact[np.isin(self._exact, iterations)].tolist():
            of_rank = made.exact.setdefault(iteration, {})
            if rank not in of_rank:
                of_rank[rank] = np.full(len(made.layers), np.nan)
            of_rank[rank][row] = values[np.searchsorted(iterations, iteration)]

    def _add_counting(self, made: Overview, place: tuple[int, int], iterations: Ints, values: Floats) -> None:
        """Take the numbers that count."""
        row, rank = place
        key = badness(values, sign_of(self._of.family.worse))
        column = self._columns.column_of(iterations)
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        # The first number of the greatest badness in each column.
        highest = np.maximum.reduceat(key, starts)
        is_highest = np.flatnonzero(key == np.repeat(highest, np.diff(np.append(starts, len(key)))))
        _, first = np.unique(column[is_highest], return_index=True)
        made.cells[rank][row, column[starts]] = values[is_highest[first]]
        made.present[rank][row, column[starts]] = True
        worst = int(np.argmax(key))
        made.worst[rank][row], made.worst_at[rank][row] = values[worst], iterations[worst]

    def made(self) -> Overview:
        """The overview, without empty columns; with the worst of all ranks where there are several."""
        made = self._begun()
        any_number = np.zeros(len(self._columns), bool)
        for rank, present in made.present.items():
            any_number |= present.any(0) | made.left[rank].any(0)  # else a neighbour's cell would reach over it
            made.left[rank] &= ~present
        chosen = np.flatnonzero(any_number)
        made.columns = self._columns.take(chosen)
        made.cells = {rank: cells[:, chosen] for rank, cells in made.cells.items()}
        made.present, made.left = (
            {rank: each[:, chosen] for rank, each in of_rank.items()} for of_rank in (made.present, made.left)
        )
        if len(made.cells) > 1:
            self._combine(made)
        return made

    def forget(self) -> None:
        """Drop the overview, which has been handed over."""
        self._made = None

    def _combine(self, made: Overview) -> None:
        sign = sign_of(self._of.family.worse)
        cells, present = np.full_like(next(iter(made.cells.values())), np.nan), None
        key = np.full(cells.shape, -np.inf)
        for rank, of_rank in made.cells.items():
            is_there = made.present[rank]
            own = np.where(is_there, badness(of_rank, sign), -np.inf)
            take = is_there & ((own > key) | (True if present is None else ~present))
            cells[take], key[take] = of_rank[take], own[take]
            present = is_there if present is None else present | is_there
        made.cells[ALL_RANKS] = cells
        made.present[ALL_RANKS] = np.zeros(cells.shape, bool) if present is None else present
        made.left[ALL_RANKS] = np.logical_or.reduce(list(made.left.values())) & ~made.present[ALL_RANKS]
