"""Series, which a run numbers once, so that a step has only numbers of series and values.

A *series* is a statistic of a tensor of a layer. A *family* is the same statistic of the same tensor in all layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request, logged_request
from te_precision_callbacks.statistics.table import Worse

MOST_ITERATION = 1 << 53
"""Upper bound of iterations: JavaScript's integers are exact up to here."""

FIRST_STEP = 4
"""Flag of a value from a layer's first step of delayed scaling, with a scale of 1."""


@dataclass(frozen=True)
class Family:
    """A statistic of a tensor, in any layer.

    Attributes:
        tensor: one of :data:`~te_precision_callbacks.base.vocabulary.TENSORS`; empty for a value of a user's feature.
        statistic: its name in records and logs, or the user's own name.
        gemm: ``fprop``, ``dgrad`` or ``wgrad`` if the value belongs to one GEMM, else None.
        request: the parsed statistic; None for a user's own.
    """

    tensor: str
    statistic: str
    gemm: str | None = None
    request: Request | None = field(default=None, compare=False, repr=False)

    @property
    def worse(self) -> Worse | None:
        if self.request is None:
            return None
        return self.request.statistic.worse

    @property
    def is_of_delayed_scaling(self) -> bool:
        """True if the statistic describes delayed scaling, in a layer that runs it."""
        return self.request is not None and self.request.recipe in (OWN_RECIPE, "fp8_delayed_scaling")

    @property
    def has_direction(self) -> bool:
        return self.worse not in (None, Worse.NEITHER)

    def badness(self, value: float) -> float:
        """Return a key that grows as a value gets worse; nan is the worst value, and inf the best SQNR.

        Without a worse direction, as for a user's own statistic, the key is the magnitude.
        """
        if math.isnan(value):
            return math.inf
        sign = sign_of(self.worse)
        if math.isnan(sign):
            return abs(value)
        return sign * value


_SIGN: Mapping[Worse | None, float] = {Worse.HIGH: 1.0, Worse.LOW: -1.0}


def sign_of(worse: Worse | None) -> float:
    """Return the factor that makes a value grow as it gets worse; nan if its magnitude counts."""
    return _SIGN.get(worse, math.nan)


def badness(values: Floats, signs: float | Floats) -> Floats:
    """Return :meth:`Family.badness` of many values.

    Args:
        signs: :func:`sign_of` all values, or of each value.
    """
    with np.errstate(invalid="ignore"):
        key = np.where(np.isnan(signs), np.abs(values), values * signs)
    return np.where(np.isnan(values), np.inf, key)


@lru_cache(maxsize=4096)
def family_of(tensor: str, statistic: str, gemm: str | None = None) -> Family:
    return Family(tensor, statistic, gemm, logged_request(statistic) if tensor else None)


class Series(NamedTuple):
    """A statistic of a tensor of a layer; ``layer`` is empty for a value that a user's feature logged under its own
    name."""

    layer: str
    family: Family


class SeriesTable:
    """The series of a run, numbered in order of first appearance."""

    def __init__(self) -> None:
        self._series: list[Series] = []
        self._numbers: dict[tuple[str, str, str], int] = {}

    def __len__(self) -> int:
        return len(self._series)

    def __getitem__(self, number: int) -> Series:
        return self._series[number]

    def since(self, number: int) -> list[Series]:
        return self._series[number:]

    def intern(self, layer: str, tensor: str, statistic: str) -> int:
        """Return the number of a series, which may be new; without layer and tensor for a user's own statistic."""
        key = (layer, tensor, statistic)
        number = self._numbers.get(key)
        if number is None:
            number = len(self._series)
            self._series.append(Series(layer, family_of(tensor, statistic)))
            self._numbers[key] = number  # last, so that no series gets a used number after a MemoryError
        return number


_SUMMARY = np.dtype(
    [
        *(("count", "i8"), ("first", "i8"), ("last", "i8"), ("latest", "f8")),
        *(("sign", "f8"), ("delayed", "?"), ("bad", "f8"), ("worst", "f8"), ("worst_at", "i8")),
    ],
    align=True,
)


class Summaries:
    """Count, first and last iteration, latest value and worst value of each series.

    Attributes:
        rows: [series], structured; ``worst_at`` is the iteration of the first worst value, or -1 without one.
    """

    def __init__(self) -> None:
        self.rows = np.empty(0, _SUMMARY)

    def grow(self, families: Sequence[Family]) -> None:
        """Add series without values."""
        empty = {}
        for family in set(families):
            facts = sign_of(family.worse), family.is_of_delayed_scaling
            empty[family] = (0, MOST_ITERATION, -MOST_ITERATION, math.nan, *facts, -math.inf, math.nan, -1)
        if families:
            self.rows = np.append(self.rows, np.array([empty[family] for family in families], _SUMMARY))

    def note(self, series: npt.NDArray[np.integer[Any]], iterations: Ints) -> None:
        self.rows["count"] += np.bincount(series, minlength=len(self.rows))
        np.minimum.at(self.rows["first"], series, iterations)
        np.maximum.at(self.rows["last"], series, iterations)

    def note_values(
        self, series: npt.NDArray[np.integer[Any]], iterations: Ints, values: Floats, first_step: Mask
    ) -> None:
        """Note values; values of delayed scaling from the layer's first step (``first_step``) do not count as worst."""
        rows = self.rows
        rows["latest"][series] = values
        key = badness(values, rows["sign"][series])
        worse = (key > rows["bad"][series]) | (rows["worst_at"][series] < 0)
        positions = np.flatnonzero(worse & ~(rows["delayed"][series] & first_step))
        positions = positions[
            np.argsort(-key[positions], kind="stable")[::-1]
        ]  # of a series' worst values, the first one is written last
        rows["bad"][series[positions]] = key[positions]
        rows["worst"][series[positions]] = values[positions]
        rows["worst_at"][series[positions]] = iterations[positions]


class Measurement(NamedTuple):
    """A statistic of a tensor in a step; ``statistic`` is its name in logs, ``value`` a tuple for a histogram."""

    layer: str
    tensor: str
    statistic: str
    value: float | tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """Measurements of a step; iterating yields :class:`Measurement` objects.

    Attributes:
        series, values: [values], int32 and float64: number of the series, and value.
        histograms: series -> counts.
        local: whether the values are local although a reduction was requested.
    """

    table: SeriesTable
    series: npt.NDArray[np.int32]
    values: Floats
    histograms: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    local: bool = False

    def __len__(self) -> int:
        return len(self.series) + len(self.histograms)

    def __iter__(self) -> Iterator[Measurement]:
        numbers = zip(self.series.tolist(), self.values.tolist(), strict=True)
        for number, value in itertools.chain(numbers, self.histograms.items()):
            series = self.table[number]
            yield Measurement(series.layer, series.family.tensor, series.family.statistic, value)


def log_name(layer: str, tensor: str, statistic: str) -> str:
    """Return Transformer Engine's name of a series: ``<layer>_<tensor>_<statistic>``."""
    return "_".join(filter(None, (layer, tensor, statistic)))


def parse_log_name(name: str, layers: Collection[str]) -> tuple[str, str, str]:
    """Split a :func:`log_name` into layer, tensor and statistic; ``("", "", name)`` for a user's own name.

    Args:
        layers: the names of all layers; the longest match is used.
    """
    best = ("", "", name)
    for tensor in TENSORS:
        layer, separator, statistic = name.partition(f"_{tensor}_")
        while separator:
            if layer in layers and len(layer) > len(best[0]):
                best = (layer, tensor, statistic)
            more, separator, statistic = statistic.partition(f"_{tensor}_")
            layer = f"{layer}_{tensor}_{more}"
    return best
