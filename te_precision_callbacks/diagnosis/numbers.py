"""The values of a step by tensor and statistic, as rules read them.

A step is two arrays, series and values. Most steps have the same series, and reuse the indices that split them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.statistics.names import OWN_RECIPE
from te_precision_callbacks.statistics.series import Family, Series, family_of

Places = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Column(NamedTuple):
    """A statistic of a tensor in a step: layer indices, int64, the same in all steps; and values, float64."""

    family: Family
    layers: Places
    values: Values

    def at(self, layers: Places, missing: float) -> Values:
        """[layers]: the values of some layers; ``missing`` for layers without one."""
        if layers is self.layers or np.array_equal(layers, self.layers):  # the usual case for statistics of one tensor
            return self.values
        known = dict(zip(self.layers.tolist(), self.values.tolist(), strict=True))
        return np.array([known.get(layer, missing) for layer in layers.tolist()])

    @property
    def bits(self) -> Values:
        with np.errstate(divide="ignore", invalid="ignore"):
            bits: Values = np.log2(self.values)
        bits[~np.isfinite(bits)] = np.nan
        return bits


def are_in(layers: Places, others: Places) -> npt.NDArray[np.bool_]:
    """[layers]: whether each is among the others."""
    return np.full(len(layers), True) if layers is others else np.isin(layers, others)


def extend_rows(table: npt.NDArray[ScalarT], layers: Places, fill: object) -> npt.NDArray[ScalarT]:
    """Extend a table, [layers, ...], to a row for each layer; new rows have the values ``fill``."""
    missing = int(layers.max(initial=-1)) + 1 - len(table)
    if missing <= 0:
        return table
    return np.concatenate([table, np.full((missing, *table.shape[1:]), fill, table.dtype)])


class StepNumbers:
    """The values of a step; ``rank`` is None for reduced values."""

    def __init__(
        self, iteration: int, names: list[str], columns: Mapping[Family, Column], rank: int | None = None
    ) -> None:
        self.iteration = iteration
        self.names = names
        self.rank = rank
        self._columns = columns
        self._by_statistic: dict[str, list[Column]] = {}
        for family, column in columns.items():
            name = family.statistic if family.request is None else family.request.statistic.name
            self._by_statistic.setdefault(name, []).append(column)
        self._found: dict[tuple[str, int], list[Column]] = {}  # many rules read the same columns
        self._masked: dict[int, tuple[Column, Column]] = {}

    def names_of(self, column: Column) -> list[str]:
        return [self.names[layer] for layer in column.layers.tolist()]

    def columns(self, statistic: str, tensors: Collection[str] = (), facts: Facts | None = None) -> list[Column]:
        """The columns of a statistic of tensors, or of their quantized data.

        Hypothetical values are left out: statistics of a recipe that the layer does not run, and statistics of
        quantization of tensors that no product reads in low precision.

        Args:
            statistic: its name without a recipe, as in docs/statistics.md, or the name of a custom statistic.
            tensors: by default all.
            facts: the recipe of each layer; None leaves out statistics of named recipes.
        """
        key = statistic, id(facts)
        if key not in self._found:
            self._found[key] = list(self._find(statistic, facts))
        found = self._found[key]
        return [column for column in found if column.family.tensor in tensors] if tensors else found

    def _find(self, statistic: str, facts: Facts | None) -> Iterator[Column]:
        if statistic == "cur_amax":
            yield from self._amaxes()
        for column in self._by_statistic.get(statistic, ()):
            request = column.family.request
            if request is None or (request.recipe is None and not request.columnwise):
                yield column
            elif request.columnwise:
                continue
            elif request.recipe == OWN_RECIPE or (facts is not None and request.e5m2 is None):
                yield from self._quantized(column, request.recipe, facts)

    def _amaxes(self) -> Iterator[Column]:
        own = {family.tensor for family in self._columns if family.statistic == "cur_amax"}
        for family, column in self._columns.items():
            if family.statistic != "max" or family.tensor in own:
                continue
            least = self._columns.get(family_of(family.tensor, "min"))
            if least is not None:
                yield column._replace(values=np.maximum(np.abs(column.values), np.abs(least.at(column.layers, np.nan))))

    def _quantized(self, column: Column, recipe: str | None, facts: Facts | None) -> Iterator[Column]:
        if facts is None:
            yield column
            return
        tensor = column.family.tensor

        def make() -> npt.NDArray[np.bool_]:
            names = self.names_of(column)
            holds = (recipe in (OWN_RECIPE, facts.recipe_of(name)) and facts.quantizes(name, tensor) for name in names)
            return np.array(list(holds), bool)

        own = facts.cached(f"quantized by {recipe}", tensor, column.layers, make)
        if own.all():
            yield column
        elif own.any():
            yield Column(column.family, column.layers[own], column.values[own])

    def mask_nonfinite(self, column: Column) -> Column:
        """Replace values of tensors that contain inf or nan by nan, since statistics ignore these elements."""
        known = self._masked.get(id(column))
        if known is not None:
            return known[1]
        lost = self.column("nonfinite_num", column.family.tensor)
        masked = column
        if lost is not None and (lost.values > 0).any():
            masked = column._replace(values=np.where(lost.at(column.layers, 0.0) > 0, np.nan, column.values))
        self._masked[id(column)] = column, masked
        return masked

    def column(self, statistic: str, tensor: str, facts: Facts | None = None) -> Column | None:
        return next(iter(self.columns(statistic, (tensor,), facts)), None)


class Splitter:
    def __init__(self, series_of: Callable[[int], Series]) -> None:
        self.names: list[str] = []
        self._series_of = series_of
        self._numbers: dict[str, int] = {}
        self._families: dict[Family, int] = {}
        self._layer_of = np.empty(0, np.int64)
        self._family_of = np.empty(0, np.int64)
        self._last: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._split: list[tuple[Family, Places, Places]] = []

    def step(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: Values,
        unscaled: frozenset[str] = frozenset(),
        rank: int | None = None,
    ) -> StepNumbers:
        """Return the values of a step, without statistics of delayed scaling of ``unscaled`` layers, which are in their
        first step.
        """
        if not np.array_equal(series, self._last):
            self._split_by(series)
        columns = {}
        for family, places, layers in self._split:
            own = values[places]
            if unscaled and family.is_of_delayed_scaling:
                kept = np.array([self.names[layer] not in unscaled for layer in layers.tolist()], bool)
                layers, own = layers[kept], own[kept]
            if len(layers):
                columns[family] = Column(family, layers, own)
        return StepNumbers(iteration, self.names, columns, rank)

    def _split_by(self, series: npt.NDArray[np.int32]) -> None:
        self._add_series(int(series.max(initial=-1)) + 1)
        families = self._family_of[series]
        order = np.argsort(families, kind="stable")
        begins = np.flatnonzero(np.diff(families[order], prepend=-1))
        known = list(self._families)
        equal: dict[bytes, Places] = {}  # equal arrays become one, which is compared faster
        self._split = [
            (known[int(families[places[0]])], places, equal.setdefault(layers.tobytes(), layers))
            for places in np.split(order, begins[1:])
            if len(layers := self._layer_of[series[places]])
        ]
        self._last = series.copy()

    def _add_series(self, count: int) -> None:
        new = [self._series_of(number) for number in range(len(self._layer_of), count)]
        if not new:
            return
        layers, families = self._numbers, self._families
        of_layers = [layers.setdefault(series.layer, len(layers)) for series in new]
        of_families = [families.setdefault(series.family, len(families)) for series in new]
        self._layer_of = np.append(self._layer_of, np.array(of_layers, np.int64))
        self._family_of = np.append(self._family_of, np.array(of_families, np.int64))
        self.names[len(self.names) :] = list(layers)[len(self.names) :]
