"""The values of a step by statistic, as rules read them.

A step is two arrays, series and values. Most steps have the same series, and reuse the indices that split them. A rule
checks a statistic of all tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.series import Family, Series

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Column(NamedTuple):
    """A statistic in a step.

    Attributes:
        number: the same in all steps.
        statistic: its name in records.
        request: the parsed statistic; None for a user's own.
        rows: indices of tensors of layers, the same in all steps.
    """

    number: int
    statistic: str
    request: Request | None
    rows: Ints
    values: Floats

    def at(self, rows: Ints, missing: float) -> Floats:
        """[rows]: the values of some tensors; ``missing`` for tensors without one."""
        if rows is self.rows or np.array_equal(rows, self.rows):
            return self.values
        table = np.full(max(rows.max(initial=-1), self.rows.max(initial=-1)) + 1, missing)
        table[self.rows] = self.values
        return table[rows]

    def where(self, chosen: Mask) -> Column:
        if chosen.all():
            return self
        return self._replace(rows=self.rows[chosen], values=self.values[chosen])

    @property
    def bits(self) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            bits: Floats = np.log2(self.values)
        bits[~np.isfinite(bits)] = np.nan
        return bits


def extend_rows(table: npt.NDArray[ScalarT], rows: Ints, fill: object) -> npt.NDArray[ScalarT]:
    """Extend a table, [rows, ...], to have all ``rows``; new ones have the values ``fill``."""
    missing = int(rows.max(initial=-1)) + 1 - len(table)
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
    """

    def __init__(
        self,
        iteration: int,
        names: Sequence[str],
        layers: Ints,
        tensors: npt.NDArray[np.str_],
        columns: Sequence[Column],
        rank: int | None,
    ) -> None:
        self.iteration = iteration
        self.names = names
        self.layers = layers
        self.tensors = tensors
        self.rank = rank
        self._by_statistic: dict[str, list[Column]] = {}
        for column in columns:
            name = column.statistic if column.request is None else column.request.statistic.name
            self._by_statistic.setdefault(name, []).append(column)
        self._found: dict[tuple[str, int], list[Column]] = {}  # many rules read the same columns
        self._masked: dict[int, tuple[Column, Column]] = {}

    def names_of(self, column: Column) -> list[str]:
        return [self.names[row] for row in column.rows.tolist()]

    def tensors_of(self, column: Column) -> list[str]:
        tensors: list[str] = self.tensors[column.rows].tolist()
        return tensors

    def are(self, tensor: str, column: Column) -> Mask:
        """[rows of the column]: whether each is the tensor."""
        are: Mask = self.tensors[column.rows] == tensor
        return are

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
        return columns[0]._replace(rows=rows[first], values=values[first])

    def column_of(self, statistic: str, tensor: str) -> Column | None:
        """The values of a statistic of a tensor; None without one."""
        column = self.column(statistic)
        of_tensor = None if column is None else column.where(self.are(tensor, column))
        if of_tensor is not None and len(of_tensor.rows):
            return of_tensor
        return None

    def _find(self, statistic: str, facts: Facts | None) -> Iterator[Column]:
        if statistic == "cur_amax":
            yield from self._amaxes()
        for column in self._by_statistic.get(statistic, ()):
            request = column.request
            if request is None or (request.recipe is None and not request.columnwise):
                yield column
            elif request.columnwise:
                continue
            elif request.recipe == OWN_RECIPE or (facts is not None and request.e5m2 is None):
                yield from self._quantized(column, request.recipe, facts)

    def _amaxes(self) -> Iterator[Column]:
        """Yield ``cur_amax`` of tensors that have only ``min`` and ``max``."""
        amaxes = self._by_statistic.get("cur_amax", [])
        for column in self._by_statistic.get("max", ()):
            if any(column.rows is amax.rows for amax in amaxes):
                continue
            known = set(chain(*map(self.tensors_of, amaxes)))
            for least in self._by_statistic.get("min", ()):
                wanted = set(self.tensors_of(least)) - known
                both = column.where(np.isin(self.tensors[column.rows], list(wanted)))
                if len(both.rows):
                    yield both._replace(values=np.maximum(np.abs(both.values), np.abs(least.at(both.rows, np.nan))))

    def _quantized(self, column: Column, recipe: str | None, facts: Facts | None) -> Iterator[Column]:
        if facts is None:
            yield column
            return

        def holds(name: str, tensor: str) -> bool:
            return recipe in (OWN_RECIPE, facts.recipe_of(name)) and facts.quantizes(name, tensor)

        def make() -> Mask:
            return np.array(list(map(holds, self.names_of(column), self.tensors_of(column))), bool)

        own = facts.cached(f"quantized by {recipe}", column.rows, make)
        if own.any():
            yield column.where(own)

    def mask_nonfinite(self, column: Column) -> Column:
        """Replace values of tensors that contain inf or nan by nan, since statistics ignore these elements."""
        if id(column) not in self._masked:
            lost = self.column("nonfinite_num")
            masked = column
            if lost is not None and (lost.values > 0).any():
                masked = column._replace(values=np.where(lost.at(column.rows, 0.0) > 0, np.nan, column.values))
            self._masked[id(column)] = column, masked
        return self._masked[id(column)][1]


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
        self._last: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._order = np.empty(0, np.int64)
        self._split: list[tuple[Family, Column, slice]] = []

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
        if not np.array_equal(series, self._last):
            self._split_by(series)
        ordered = values[self._order]
        columns = []
        for family, empty, places in self._split:
            column = empty._replace(values=ordered[places])
            if unscaled and family.is_of_delayed_scaling:
                column = column.where(np.array([self._names[row] not in unscaled for row in column.rows.tolist()]))
            if len(column.rows):
                columns.append(column)
        return StepNumbers(iteration, self._names, self._layers, self._tensors, columns, rank)

    def _split_by(self, series: npt.NDArray[np.int32]) -> None:
        self._add_series(int(series.max(initial=-1)) + 1)
        rows, families, numbers = self._series[series].T
        self._order = np.lexsort((families, numbers))
        begins = np.flatnonzero(np.diff(numbers[self._order], prepend=-1)).tolist()
        known = list(self._families)
        equal: dict[bytes, Ints] = {}  # equal arrays become one, which is compared faster
        self._split = []
        for begin, end in zip(begins, [*begins[1:], len(series)], strict=True):
            of_number = rows[self._order[begin:end]]
            of_number = equal.setdefault(of_number.tobytes(), of_number)
            first = self._order[begin]
            family = known[families[first]]
            column = Column(int(numbers[first]), family.statistic, family.request, of_number, np.empty(0))
            self._split.append((family, column, slice(begin, end)))
        self._last = series.copy()

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
