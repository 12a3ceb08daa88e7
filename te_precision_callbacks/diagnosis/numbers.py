"""The values of a step by statistic, as rules read them.

A step is two arrays, series and values. Most steps have the same series, and reuse the indices that split them. A rule
checks a statistic of all tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.series import Family, Series

ScalarT = TypeVar("ScalarT", bound=np.generic)
ResultT = TypeVar("ResultT")


class Column(NamedTuple):
    """A statistic in a step.

    Attributes:
        number: the same in all steps.
        statistic: its name in records.
        request: the parsed statistic; None for a user's own.
        rows: indices of tensors of layers, the same in all steps.
        kept: what :meth:`cached` has derived from the rows; most steps have the same rows.
    """

    number: int
    statistic: str
    request: Request | None
    rows: Ints
    values: Floats
    kept: dict[str, tuple[Facts | None, Any]]

    def at(self, rows: Ints, missing: float) -> Floats:
        """[rows]: the values of some tensors; ``missing`` for tensors without one."""
        if rows is self.rows or rows.tobytes() == self.rows.tobytes():
            return self.values
        table = np.empty(max(largest(rows, initial=-1), largest(self.rows, initial=-1)) + 1)
        table.fill(missing)
        table[self.rows] = self.values
        return table[rows]

    def cached(self, what: str, facts: Facts | None, make: Callable[[], ResultT]) -> ResultT:
        """Cache a value derived from the rows, and from facts if given."""
        known = self.kept.get(what)
        if known is None or known[0] is not facts:
            known = facts, make()
            self.kept[what] = known
        return known[1]

    def select(self, what: str, facts: Facts | None, choose: Callable[[], Mask]) -> Column:
        """Select tensors by a condition that is cached, as in :meth:`cached`."""
        chosen, rows, kept = self.cached(f"selected, {what}", facts, lambda: self._selection(choose()))
        if rows is self.rows:
            return self
        return Column(self.number, self.statistic, self.request, rows, self.values[chosen], kept)

    def _selection(self, chosen: Mask) -> tuple[Mask, Ints, dict[str, tuple[Facts | None, Any]]]:
        return (chosen, self.rows if chosen.all() else self.rows[chosen], {})

    def with_values(self, values: Floats) -> Column:
        # Column() would call a Python function.
        return tuple.__new__(Column, (self.number, self.statistic, self.request, self.rows, values, self.kept))

    @property
    def bits(self) -> Floats:
        bits: Floats = np.log2(self.values)
        bits[~np.isfinite(bits)] = np.nan
        return bits


Split = Mapping[str, Sequence[tuple[Family, Column, slice]]]
"""Name of a statistic -> the columns of a step, without values, and the places of their values."""


def extend_rows(table: npt.NDArray[ScalarT], rows: Ints, fill: object) -> npt.NDArray[ScalarT]:
    """Extend a table, [rows, ...], to have all ``rows``; new ones have the values ``fill``."""
    missing = int(largest(rows, initial=-1)) + 1 - len(table)
    if missing <= 0:
        return table
    return np.concatenate([table, np.full((missing, *table.shape[1:]), fill, table.dtype)])


class StepNumbers:
    """The values of a step.

    Attributes:
        names: [rows]: the layers.
        layers: [rows]: indices of the layers.
        tensors: [rows]: the tensors.
        rank: None for reduced values.
        statistics: the names that :meth:`columns` may find.
    """

    def __init__(
        self,
        iteration: int,
        names: Sequence[str],
        layers: Ints,
        tensors: npt.NDArray[np.str_],
        split: Split,
        values: Floats,
        unscaled: frozenset[str],
        rank: int | None,
    ) -> None:
        self.iteration = iteration
        self.names = names
        self.layers = layers
        self.tensors = tensors
        self.rank = rank
        self.statistics = split.keys()
        self._split = split
        self._values = values
        self._unscaled = unscaled
        self._found: dict[tuple[str, int], list[Column]] = {}  # many rules read the same columns

    def names_of(self, column: Column) -> list[str]:
        return column.cached("names", None, lambda: [self.names[row] for row in column.rows.tolist()])

    def tensors_of(self, column: Column) -> list[str]:
        return column.cached("tensors", None, self.tensors[column.rows].tolist)

    def are(self, tensor: str, column: Column) -> Mask:
        """[rows of the column]: whether each is the tensor."""
        return column.cached(tensor, None, lambda: self.tensors[column.rows] == tensor)

    def columns(self, statistic: str, facts: Facts | None = None) -> list[Column]:
        """The columns of a statistic of tensors, or of their quantized data: one, or one for each recipe in its name.

        Hypothetical values are left out: statistics of a recipe that the layer does not run, and statistics of
        quantization of tensors that no product reads in low precision.

        Args:
            statistic: its name without a recipe, as in docs/statistics.md, or the name of a custom statistic.
            facts: the recipe of each layer; None leaves out statistics of named recipes.
        """
        key = statistic, id(facts)
        if key not in self._found:
            self._found[key] = list(self._find(statistic, facts))
        return self._found[key]

    def column(self, statistic: str, facts: Facts | None = None) -> Column | None:
        """The columns of a statistic as one, with the first value of each tensor; None without one."""
        columns = self.columns(statistic, facts)
        if len(columns) < 2:
            return next(iter(columns), None)
        rows = np.concatenate([column.rows for column in columns])
        values = np.concatenate([column.values for column in columns])
        first = np.unique(rows, return_index=True)[1]
        return columns[0]._replace(rows=rows[first], values=values[first], kept={})

    def column_of(self, statistic: str, tensor: str) -> Column | None:
        """The values of a statistic of a tensor; None without one."""
        column = self.column(statistic)
        of_tensor = None if column is None else self.of_tensor(tensor, column)
        if of_tensor is not None and len(of_tensor.rows):
            return of_tensor
        return None

    def of_tensor(self, tensor: str, column: Column) -> Column:
        return column.select(tensor, None, lambda: self.are(tensor, column))

    def _given(self, statistic: str) -> Iterator[Column]:
        for family, empty, places in self._split.get(statistic, ()):
            column = empty.with_values(self._values[places])
            if self._unscaled and family.is_of_delayed_scaling:
                scaled = np.array([name not in self._unscaled for name in self.names_of(column)])
                column = column._replace(rows=column.rows[scaled], values=column.values[scaled], kept={})
            if len(column.rows):
                yield column

    def _find(self, statistic: str, facts: Facts | None) -> Iterator[Column]:
        if statistic == "cur_amax":
            yield from self._amaxes()
        for column in self._given(statistic):
            request = column.request
            if request is None or (request.recipe is None and not request.columnwise):
                yield column
            elif request.columnwise:
                continue
            elif request.recipe == OWN_RECIPE or (facts is not None and request.e5m2 is None):
                yield from self._quantized(column, request.recipe, facts)

    def _amaxes(self) -> Iterator[Column]:
        """Yield ``cur_amax`` of tensors that have only ``min`` and ``max``."""
        amaxes = list(self._given("cur_amax"))
        complete = {id(amax.rows) for amax in amaxes}
        for column in self._given("max"):
            if id(column.rows) in complete:
                continue
            known = set(chain(*map(self.tensors_of, amaxes)))
            for least in self._given("min"):
                wanted = set(self.tensors_of(least)) - known
                chosen = np.isin(self.tensors[column.rows], list(wanted))
                both = column._replace(rows=column.rows[chosen], values=column.values[chosen], kept={})
                if len(both.rows):
                    yield both.with_values(np.maximum(np.abs(both.values), np.abs(least.at(both.rows, np.nan))))

    def _quantized(self, column: Column, recipe: str | None, facts: Facts | None) -> Iterator[Column]:
        if facts is None:
            yield column
            return

        def holds(name: str, tensor: str) -> bool:
            return recipe in (OWN_RECIPE, facts.recipe_of(name)) and facts.quantizes(name, tensor)

        own = column.select(
            f"quantized by {recipe}",
            facts,
            lambda: np.array(list(map(holds, self.names_of(column), self.tensors_of(column))), bool),
        )
        if len(own.rows):
            yield own

    def mask_nonfinite(self, column: Column) -> Column:
        """Replace values of tensors that contain inf or nan by nan, since statistics ignore these elements."""
        lost = self._lost
        if lost is None:
            return column
        return column.with_values(np.where(lost.at(column.rows, 0.0) > 0, np.nan, column.values))

    @cached_property
    def _lost(self) -> Column | None:
        lost = self.column("nonfinite_num")
        if lost is not None and holds_any(lost.values > 0):
            return lost
        return None


class Splitter:
    def __init__(self, series_of: Callable[[int], Series]) -> None:
        self._series_of = series_of
        self._rows: dict[tuple[str, str], int] = {}  # layer and tensor -> row
        self._families: dict[Family, int] = {}
        self._numbers: dict[tuple[str, str | None, bool], int] = {}  # statistic, GEMM, is a user's own -> number
        self._names: Sequence[str] = ()
        self._layers = np.empty(0, np.int64)
        self._tensors = np.empty(0, np.str_)
        self._series = np.empty((0, 3), np.int64)  # row, family and number of the statistic of each series
        self._last = b""  # the series of the last step
        self._order = np.empty(0, np.int64)
        self._split: dict[str, list[tuple[Family, Column, slice]]] = {}

    def step(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: Floats,
        unscaled: frozenset[str] = frozenset(),
        rank: int | None = None,
    ) -> StepNumbers:
        """Return the values of a step, without statistics of delayed scaling of ``unscaled`` layers, which are in their
        first step.
        """
        if series.tobytes() != self._last:
            self._split_by(series)
        ordered = values[self._order]
        of_step = self._split, ordered, unscaled
        return StepNumbers(iteration, self._names, self._layers, self._tensors, *of_step, rank)

    def _split_by(self, series: npt.NDArray[np.int32]) -> None:
        self._add_series(int(series.max(initial=-1)) + 1)
        rows, families, numbers = self._series[series].T
        self._order = np.lexsort((families, numbers))
        begins = np.flatnonzero(np.diff(numbers[self._order], prepend=-1)).tolist()
        known = list(self._families)
        equal: dict[bytes, tuple[Ints, dict[str, Any]]] = {}  # equal arrays become one, with one cache
        self._split = {}
        for begin, end in zip(begins, [*begins[1:], len(series)], strict=True):
            of_number = rows[self._order[begin:end]]
            of_number, kept = equal.setdefault(of_number.tobytes(), (of_number, {}))
            first = self._order[begin]
            family = known[families[first]]
            column = Column(int(numbers[first]), family.statistic, family.request, of_number, np.empty(0), kept)
            name = family.statistic if family.request is None else family.request.statistic.name
            self._split.setdefault(name, []).append((family, column, slice(begin, end)))
        self._last = series.tobytes()

    def _add_series(self, count: int) -> None:
        added = []
        for series in range(len(self._series), count):
            layer, family = self._series_of(series)
            row = self._rows.setdefault((layer, family.tensor), len(self._rows))
            place = self._families.setdefault(family, len(self._families))
            key = family.statistic, family.gemm, family.request is None
            added.append((row, place, self._numbers.setdefault(key, len(self._numbers))))
        if not added:
            return
        self._series = np.concatenate([self._series, np.array(added, np.int64)])
        self._names, tensors = zip(*self._rows, strict=True)
        self._tensors = np.array(tensors)
        layers: dict[str, int] = {}
        self._layers = np.array([layers.setdefault(name, len(layers)) for name in self._names])
