"""The values of a step as a table, as rules read them: a row for each tensor of a layer, and a column for a statistic.

Rows keep their numbers for a whole run. Most steps have the same series, and reuse the layout that splits them. A rule
checks a column of all tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest
from te_precision_callbacks.statistics.names import OWN_RECIPE
from te_precision_callbacks.statistics.series import Family, Series

ScalarT = TypeVar("ScalarT", bound=np.generic)
ResultT = TypeVar("ResultT")


def extend_rows(table: npt.NDArray[ScalarT], count: int, fill: object) -> npt.NDArray[ScalarT]:
    """Extend a table, [rows, ...], to ``count`` rows; new ones have the values ``fill``."""
    if len(table) >= count:
        return table
    return np.concatenate([table, np.full((count - len(table), *table.shape[1:]), fill, table.dtype)])


class Source(NamedTuple):
    """The values of a statistic of one tensor: the rows that have one, and the places among the values of the step."""

    family: Family
    rows: Ints
    places: Ints


class Column(NamedTuple):
    """The rows with a value of a statistic.

    Attributes:
        rows: by tensor and recipe, in order of their first appearance.
        places: of the values of these rows, among the values of the step.
        tensors: the tensors of the rows, each once.
    """

    rows: Ints
    places: Ints
    tensors: list[str]
    sources: list[Source]

    def label(self, row: int) -> str:
        """The statistic's name in records."""
        return next(source.family.statistic for source in self.sources if row in source.rows)


class Layout:
    """The rows and columns of steps with the same series, and a cache of arrays that rules derive from them.

    Attributes:
        names, tensors: [rows]: the layers, and their tensors.
        layers: [rows]: indices of the layers.
        statistics: the recorded statistics, without a recipe in their names.
        facts: the facts behind all derived arrays.
        derived: what rules derive from the layout and the facts; frequent ones are read without a call of ``derive``.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[str], sources: dict[str, list[Source]]) -> None:
        self.names = names
        self.tensors = np.array(tensors, np.str_)
        layers: dict[str, int] = {}
        self.layers = np.array([layers.setdefault(name, len(layers)) for name in names], np.int64)
        self.statistics = sources.keys()
        self.facts = Facts()
        self._sources = sources
        self.derived: dict[object, Any] = {}

    def use(self, facts: Facts) -> None:
        if facts is not self.facts:
            self.facts = facts
            self.derived = {}

    def column(self, statistic: str) -> Column:
        """The rows with a value of a recorded statistic."""
        if statistic not in self.derived:
            self.derived[statistic] = join([self._select_own(source) for source in self._sources.get(statistic, ())])
        column: Column = self.derived[statistic]
        return column

    def _select_own(self, source: Source) -> Source:
        """Leave out hypothetical values: of a recipe that the layer does not run, and of quantization of a tensor that
        no product reads in low precision.
        """
        request = source.family.request
        if request is None or (request.recipe is None and not request.columnwise):
            return source
        own = np.zeros(len(source.rows), bool)
        if not request.columnwise and (request.recipe == OWN_RECIPE or request.e5m2 is None):
            names = [self.names[row] for row in source.rows.tolist()]
            recipes = [request.recipe in (OWN_RECIPE, self.facts.recipe_of(name)) for name in names]
            own = recipes & np.array([self.facts.quantizes(name, source.family.tensor) for name in names], bool)
        return Source(source.family, source.rows[own], source.places[own])


def join(sources: list[Source]) -> Column:
    """Join sources to a column, with the first value of each row."""
    none = np.empty(0, np.int64)
    rows = np.concatenate([none, *(source.rows for source in sources)])
    places = np.concatenate([none, *(source.places for source in sources)])
    first = np.sort(np.unique(rows, return_index=True)[1])
    tensors = dict.fromkeys(source.family.tensor for source in sources if len(source.rows))
    return Column(rows[first], places[first], list(tensors), sources)


class StepNumbers:
    """The values of a step.

    Attributes:
        rank: None for reduced values.
        first, last: the first step of the run, and the one before this; None for the first step.
        names, tensors, layers, facts, statistics: see :class:`Layout`.
    """

    first: StepNumbers | None = None
    last: StepNumbers | None = None

    def __init__(self, iteration: int, layout: Layout, values: Floats, rank: int | None) -> None:
        self.iteration = iteration
        self.rank = rank
        self.names = layout.names
        self.tensors = layout.tensors
        self.layers = layout.layers
        self.statistics = layout.statistics
        self._layout = layout
        self._values = values
        self._columns: dict[str, Floats] = {}

    def __len__(self) -> int:
        return len(self.names)

    def use(self, facts: Facts) -> None:
        self._layout.use(facts)

    @property
    def facts(self) -> Facts:
        return self._layout.facts

    def derive(self, key: object, make: Callable[[], ResultT]) -> ResultT:
        """Cache a value for all steps with these series, until the facts change."""
        derived = self._layout.derived
        if key not in derived:
            derived[key] = make()
        result: ResultT = derived[key]
        return result

    def by_row(self, value_of: Callable[[Facts, str, str], object]) -> npt.NDArray[Any]:
        """[rows]: a function of the facts, a layer and a tensor."""
        derived = self._layout.derived
        if value_of not in derived:
            rows = zip(self.names, self.tensors.tolist(), strict=True)
            derived[value_of] = np.array([value_of(self.facts, *row) for row in rows])
        values: npt.NDArray[Any] = derived[value_of]
        return values

    def are(self, tensor: str) -> Mask:
        """[rows]: whether each is the tensor."""
        return self.derive(("are", tensor), lambda: self.tensors == tensor)

    def names_of(self, rows: Mask) -> list[str]:
        """The layers of some rows."""
        return [self.names[row] for row in np.flatnonzero(rows).tolist()]

    def column(self, statistic: str) -> Column:
        """The rows with a value of a statistic of tensors, or of their quantized data."""
        derived = self._layout.derived
        key = "amax" if statistic == "cur_amax" else statistic
        if key not in derived:
            derived[key] = self._amaxes() if key == "amax" else self._layout.column(statistic)
        column: Column = derived[key]
        return column

    def has(self, statistic: str) -> bool:
        return len(self.column(statistic).rows) > 0

    def are_known(self, statistic: str, tensor: str = "") -> Mask:
        """[rows]: whether each has a value of a statistic, and is the tensor."""
        derived = self._layout.derived
        key = "known", statistic, tensor
        if key not in derived:
            known = np.zeros(len(self), bool)
            known[self.column(statistic).rows] = True
            derived[key] = known & self.are(tensor) if tensor else known
        mask: Mask = derived[key]
        return mask

    def values(self, statistic: str) -> Floats:
        """[rows]: the values of a statistic, by its name without a recipe as in docs/statistics.md, or by the name of a
        user's own; nan for rows without it.
        """
        values = self._columns.get(statistic)
        if values is None:
            values = np.empty(len(self))
            values.fill(np.nan)
            if statistic == "cur_amax" and "max" in self.statistics:
                values = np.maximum(np.abs(self.values("max")), np.abs(self.values("min")))
            column = self._layout.column(statistic)
            values[column.rows] = self._values[column.places]
            self._columns[statistic] = values
        return values

    def finite(self, statistic: str) -> Floats:
        """[rows]: as :meth:`values`, and nan for tensors that contain inf or nan, since statistics ignore these
        elements.
        """
        if self._broken is None:
            return self.values(statistic)
        return np.where(self._broken, np.nan, self.values(statistic))

    def earlier(self, step: StepNumbers | None, statistic: str) -> Floats:
        """[rows]: as :meth:`finite`, in ``first`` or ``last``; nan without it."""
        return np.full(len(self), np.nan) if step is None else extend_rows(step.finite(statistic), len(self), np.nan)

    def bits(self, statistic: str) -> Floats:
        """[rows]: the logarithms of :meth:`finite` to base 2; nan for 0."""
        bits: Floats = np.log2(self.finite(statistic))
        bits[~np.isfinite(bits)] = np.nan
        return bits

    @cached_property
    def _broken(self) -> Mask | None:
        broken = self.values("nonfinite_num") > 0
        return broken if holds_any(broken) else None

    def _amaxes(self) -> Column:
        """The rows with ``cur_amax``, and those with ``min`` and ``max`` instead."""
        amax = self._layout.column("cur_amax")
        least = self._layout.column("min")
        extremes = [
            source._replace(rows=source.rows[np.isin(source.rows, least.rows)])
            for source in self._layout.column("max").sources
        ]
        return join([*amax.sources, *extremes]) if len(least.rows) else amax


class Splitter:
    """Splits the values of steps by the layouts of their series.

    Args:
        series_of: number of a series -> the series.
    """

    def __init__(self, series_of: Callable[[int], Series]) -> None:
        self._series_of = series_of
        self._rows: dict[tuple[str, str], int] = {}  # layer and tensor -> row
        self._row_of: list[int] = []  # [series]
        self._family_of: list[int] = []  # [series]
        self._families: dict[Family, int] = {}
        self._series = b""  # of the last step
        self._layout = Layout((), (), {})
        self._first: StepNumbers | None = None
        self._last: StepNumbers | None = None

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
        if unscaled:
            scaled = np.array([self._is_scaled(self._series_of(number), unscaled) for number in series.tolist()], bool)
            series = series[scaled]
            values = values[scaled]
        if series.tobytes() != self._series:
            self._series = series.tobytes()
            self._layout = self._lay_out(series)
        numbers = StepNumbers(iteration, self._layout, values, rank)
        numbers.first, numbers.last = self._first, self._last
        if self._last is not None:
            self._last.first = self._last.last = None
        self._first, self._last = self._first or numbers, numbers
        return numbers

    @staticmethod
    def _is_scaled(series: Series, unscaled: frozenset[str]) -> bool:
        return series.layer not in unscaled or not series.family.is_of_delayed_scaling

    def _lay_out(self, series: npt.NDArray[np.int32]) -> Layout:
        self._add(int(largest(series, initial=-1)) + 1)
        rows = np.array(self._row_of, np.int64)[series]
        family_numbers = np.array(self._family_of, np.int64)[series]
        order = np.argsort(family_numbers, kind="stable")
        begins = np.flatnonzero(np.diff(family_numbers[order]))
        families = list(self._families)
        sources: dict[str, list[Source]] = {}
        for places in np.split(order, begins + 1) if len(series) else ():
            family = families[family_numbers[places[0]]]
            statistic = family.statistic if family.request is None else family.request.statistic.name
            sources.setdefault(statistic, []).append(Source(family, rows[places], places))
        return Layout([layer for layer, _ in self._rows], [tensor for _, tensor in self._rows], sources)

    def _add(self, count: int) -> None:
        for number in range(len(self._row_of), count):
            layer, family = self._series_of(number)
            self._row_of.append(self._rows.setdefault((layer, family.tensor), len(self._rows)))
            self._family_of.append(self._families.setdefault(family, len(self._families)))
