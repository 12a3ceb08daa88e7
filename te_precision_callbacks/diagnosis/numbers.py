"""The values of a step as a table, as rules read them: a row for each tensor of a layer, and a column for a statistic.

Rows keep their numbers for a whole run. Most steps have the same series, and share what is derived from them. A rule
checks a column of all tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.statistics.arrays import Floats, Mask
from te_precision_callbacks.statistics.names import OWN_RECIPE
from te_precision_callbacks.statistics.series import Family, Series

ScalarT = TypeVar("ScalarT", bound=np.generic)
ResultT = TypeVar("ResultT")


def extend_rows(table: npt.NDArray[ScalarT], count: int, fill: object) -> npt.NDArray[ScalarT]:
    """Extend a table, [rows, ...], to ``count`` rows; new ones have the values ``fill``."""
    if len(table) >= count:
        return table
    return np.concatenate([table, np.full((count - len(table), *table.shape[1:]), fill, table.dtype)])


class ValueEntry(NamedTuple):
    """A value of a step: its row, its number among the values of the step, and its family."""

    row: int
    number: int
    family: Family


class Column:
    """The rows with a value of a statistic, each with its first entry.

    Attributes:
        rows: in order of the entries.
        indices: of the values of these rows, among the values of the step.
        tensors: the tensors of the rows.
    """

    def __init__(self, entries: Iterable[ValueEntry]) -> None:
        self.entries: dict[int, ValueEntry] = {}
        for entry in entries:
            self.entries.setdefault(entry.row, entry)
        self.rows = np.array([*self.entries], np.int64)
        self.indices = np.array([entry.number for entry in self.entries.values()], np.int64)
        self.tensors = {entry.family.tensor for entry in self.entries.values()}

    def label(self, row: int) -> str:
        """The statistic's name in records."""
        return self.entries[row].family.statistic


class StepNumbers:
    """The values of a step.

    Steps with the same series share the rows and entries, and a cache of arrays that rules derive from them and from
    the facts.

    Attributes:
        rank: None for reduced values.
        first, last: the first step of the run, and the one before this; None for the first step.
        names, tensors: [rows]: the layers, and their tensors.
        facts: the facts behind all derived arrays.
    """

    iteration = -1
    rank: int | None = None
    first: StepNumbers | None = None
    last: StepNumbers | None = None

    def __init__(self, rows: Iterable[tuple[str, str]], entries: Mapping[str, Sequence[ValueEntry]]) -> None:
        self.names = [name for name, _ in rows]
        self.tensors = np.array([tensor for _, tensor in rows], np.str_)
        self.facts = Facts()
        self._entries = entries  # recorded statistic, without a recipe in its name -> its entries
        self._derived: dict[object, Any] = {}
        self._unknown = np.full(len(self.names), np.nan)
        self._values = np.empty(0)
        self._columns: dict[str, Floats] = {}
        self._finite: dict[str, Floats] = {}

    def at(self, iteration: int, values: Floats, rank: int | None) -> StepNumbers:
        """Return another step with the same series."""
        step = copy(self)
        step.iteration = iteration
        step.rank = rank
        step._values = values
        step._columns = {}
        step._finite = {}
        return step

    def __len__(self) -> int:
        return len(self.names)

    def use(self, facts: Facts) -> None:
        if facts is not self.facts:
            self.facts = facts
            self._derived = {}

    def derive(self, key: object, make: Callable[[], ResultT]) -> ResultT:
        """Cache a value for all steps with these series, until the facts change."""
        if key not in self._derived:
            self._derived[key] = make()
        result: ResultT = self._derived[key]
        return result

    def by_row(self, value_of: Callable[[LayerFacts, str], object]) -> npt.NDArray[Any]:
        """[rows]: a function of a layer and a tensor."""
        layers = map(self.facts.layer, self.names)
        return self.derive(value_of, lambda: np.array(list(map(value_of, layers, self.tensors.tolist()))))

    def are(self, tensor: str) -> Mask:
        """[rows]: whether each is the tensor."""
        return self.derive(("are", tensor), lambda: self.tensors == tensor)

    def names_of(self, rows: Mask) -> list[str]:
        """The layers of some rows."""
        return [self.names[row] for row in np.flatnonzero(rows).tolist()]

    def in_order(self, rows: Iterable[int]) -> list[int]:
        """Sort rows by the execution order of their tensors."""
        return sorted(rows, key=lambda row: self.facts.order_key(self.names[row], str(self.tensors[row])))

    def column(self, statistic: str) -> Column:
        """The rows with a value of a statistic of tensors, or of their quantized data; those with ``min`` and ``max``
        have ``cur_amax``.
        """
        key = "column", statistic
        if key not in self._derived:
            self._derived[key] = self._column(statistic)
        column: Column = self._derived[key]
        return column

    def _column(self, statistic: str) -> Column:
        entries = [*filter(self._is_own, self._entries.get(statistic, ()))]
        if statistic == "cur_amax":
            least = self.column("min").entries
            entries += [entry for row, entry in self.column("max").entries.items() if row in least]
        return Column(entries)

    def _is_own(self, entry: ValueEntry) -> bool:
        """Return False for hypothetical values: of a recipe that the layer does not run, and of quantization of a
        tensor that no product reads in low precision.
        """
        request = entry.family.request
        if request is None or (request.recipe is None and not request.columnwise):
            return True
        if request.columnwise or (request.recipe != OWN_RECIPE and request.e5m2 is not None):
            return False
        layer = self.facts.layer(self.names[entry.row])
        return request.recipe in (OWN_RECIPE, layer.recipe) and layer.quantizes(entry.family.tensor)

    def has(self, statistic: str) -> bool:
        return len(self.column(statistic).rows) > 0

    def are_known(self, statistic: str, tensor: str = "") -> Mask:
        """[rows]: whether each has a value of a statistic, and is the tensor."""
        key = "known", statistic, tensor
        if key not in self._derived:
            has_value = np.isin(np.arange(len(self)), self.column(statistic).rows)
            self._derived[key] = has_value & self.are(tensor) if tensor else has_value
        mask: Mask = self._derived[key]
        return mask

    def values(self, statistic: str) -> Floats:
        """[rows]: the values of a statistic, by its name without a recipe as in docs/statistics.md, or by the name of a
        user's own; nan for rows without it.
        """
        if statistic not in self._columns:
            column = self.column(statistic)
            values = self._unknown.copy()
            values[column.rows] = self._values[column.indices]
            if statistic == "cur_amax":  # of rows with extremes it is the maximum so far
                values = np.fmax(np.abs(values), np.abs(self.values("min")))
            self._columns[statistic] = values
        return self._columns[statistic]

    def finite(self, statistic: str) -> Floats:
        """[rows]: as :meth:`values`, and nan for tensors that contain inf or nan, since statistics ignore these
        elements.
        """
        if statistic not in self._finite:
            values = self.values(statistic).copy()
            values[self.values("nonfinite_num") > 0] = np.nan
            self._finite[statistic] = values
        return self._finite[statistic]

    def earlier(self, step: StepNumbers | None, statistic: str) -> Floats:
        """[rows]: as :meth:`finite`, in ``first`` or ``last``; nan without it."""
        return self._unknown if step is None else extend_rows(step.finite(statistic), len(self), np.nan)

    def bits(self, statistic: str) -> Floats:
        """[rows]: the logarithms of :meth:`finite` to base 2; nan for 0."""
        bits: Floats = np.log2(self.finite(statistic))
        bits[~np.isfinite(bits)] = np.nan
        return bits


class Splitter:
    """Splits the values of steps by their series.

    Args:
        series_of: number of a series -> the series.
    """

    def __init__(self, series_of: Callable[[int], Series]) -> None:
        self._series_of = series_of
        self._rows: dict[tuple[str, str], int] = {}  # layer and tensor -> row
        self._series = b""  # of the last step
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
            known_series = map(self._series_of, series.tolist())
            scaled = [layer not in unscaled or not family.is_of_delayed_scaling for layer, family in known_series]
            are_scaled = np.array(scaled, bool)
            series = series[are_scaled]
            values = values[are_scaled]
        if self._last is not None and series.tobytes() == self._series:
            numbers = self._last.at(iteration, values, rank)
        else:
            numbers = self._lay_out(series.tolist()).at(iteration, values, rank)
            self._series = series.tobytes()
        numbers.first = self._first
        numbers.last = self._last
        if self._last is not None:
            self._last.first = self._last.last = None
        self._first = self._first or numbers
        self._last = numbers
        return numbers

    def _lay_out(self, series: Sequence[int]) -> StepNumbers:
        entries: dict[str, list[ValueEntry]] = {}
        for number, index in sorted(zip(series, range(len(series)), strict=True)):
            layer, family = self._series_of(number)
            row = self._rows.setdefault((layer, family.tensor), len(self._rows))
            name = family.statistic if family.request is None else family.request.statistic.name
            entries.setdefault(name, []).append(ValueEntry(row, index, family))
        return StepNumbers(self._rows, entries)
