"""Series: the names that stay the same from step to step, so a step holds only numbers.

A *series* is one statistic of one tensor of one layer; the same statistic of the same tensor in all layers is a
*family*. A run has one table of series; a step has the numbers of its series and their values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request, logged_request
from te_precision_callbacks.statistics.table import Worse

FIRST_STEP = 4
"""The flag of a number of a layer's first step of delayed scaling, with the scale 1."""


@dataclass(frozen=True)
class Family:
    """One statistic of one tensor, in any layer.

    Attributes:
        tensor: one of :data:`~te_precision_callbacks.base.vocabulary.TENSORS`; empty for a number of a user's own
            feature.
        statistic: its name in records and logs, or the user's own name.
        gemm: ``fprop``, ``dgrad`` or ``wgrad`` if the number belongs to one GEMM, else None.
        request: the request that the statistic answers; None for a user's own.
    """

    tensor: str
    statistic: str
    gemm: str | None = None
    request: Request | None = field(default=None, compare=False, repr=False)

    @property
    def worse(self) -> Worse | None:
        return None if self.request is None else self.request.statistic.worse

    @property
    def is_of_delayed_scaling(self) -> bool:
        """True if the statistic describes delayed scaling in a layer that runs it."""
        return self.request is not None and self.request.recipe in (OWN_RECIPE, "fp8_delayed_scaling")

    @property
    def has_direction(self) -> bool:
        return self.worse not in (None, Worse.NEITHER)

    def leaves_out(self, flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which values belong to delayed scaling's first step, which is not representative.

        Args:
            flags: of each number, as in records.
        """
        return np.asarray((flags & FIRST_STEP) != 0) & self.is_of_delayed_scaling

    def badness(self, value: float) -> float:
        """A key that grows as a value gets worse; nan is the worst, and inf is the best SQNR.

        A statistic without a worse direction, and a user's own, is ranked by size.
        """
        if math.isnan(value):
            return math.inf
        sign = sign_of(self.worse)
        return abs(value) if math.isnan(sign) else sign * value


_SIGN = {Worse.HIGH: 1.0, Worse.LOW: -1.0}


def sign_of(worse: Worse | None) -> float:
    """The factor that makes a number grow as it gets worse; nan where its magnitude counts."""
    return math.nan if worse is None else _SIGN.get(worse, math.nan)


def badness(values: npt.NDArray[np.float64], signs: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A key that grows as numbers get worse, as :meth:`Family.badness`.

    Args:
        values: the numbers.
        signs: :func:`sign_of` the direction of all, or of each.
    """
    with np.errstate(invalid="ignore"):
        key = np.where(np.isnan(signs), np.abs(values), values * signs)
    return np.where(np.isnan(values), np.inf, key)


def family_of(tensor: str, statistic: str, gemm: str | None = None) -> Family:
    return Family(tensor, statistic, gemm, logged_request(statistic) if tensor else None)


class Series(NamedTuple):
    """One statistic of one tensor of one layer; ``layer`` is empty for a value logged by a custom feature under its own
    name."""

    layer: str
    family: Family


class SeriesTable:
    """The series of a run, by the number that each got when it was first seen."""

    def __init__(self) -> None:
        self._series: list[Series] = []
        self._numbers: dict[tuple[str, str, str, str | None], int] = {}
        self._families: dict[Family, Family] = {}

    def __len__(self) -> int:
        return len(self._series)

    def __getitem__(self, number: int) -> Series:
        return self._series[number]

    def find(self, layer: str, tensor: str, statistic: str) -> int | None:
        return self._numbers.get((layer, tensor, statistic, None))

    def intern(self, layer: str, tensor: str, statistic: str, gemm: str | None = None) -> int:
        """The number of a series; an unknown series gets a new number.

        ``layer`` and ``tensor`` are empty for a user's own number; ``gemm`` is the GEMM, if the statistic belongs to
        one.
        """
        key = (layer, tensor, statistic, gemm)
        number = self._numbers.get(key)
        if number is None:
            family = family_of(tensor, statistic, gemm)
            number = len(self._series)
            self._series.append(Series(layer, self._families.setdefault(family, family)))
            self._numbers[key] = number  # at last: where memory has run out before, no other series gets this number
        return number


class Measurement(NamedTuple):
    """One statistic, by its name in logs, of one tensor in one step; a tuple of floats for a histogram."""

    layer: str
    tensor: str
    statistic: str
    value: float | tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """Measurements of a step; iterating yields :class:`Measurement` objects.

    Attributes:
        series, values: [numbers], int32 and float64: the series of each number, and its value.
        histograms: series -> counts.
        local: whether the numbers are this rank's own although they were to be reduced.
    """

    table: SeriesTable
    series: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    histograms: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    local: bool = False

    def __len__(self) -> int:
        return len(self.series) + len(self.histograms)

    def value(self, layer: str, tensor: str, statistic: str) -> float | None:
        number = self.table.find(layer, tensor, statistic)
        return None if number is None else self._by_series.get(number)

    @cached_property
    def _by_series(self) -> Mapping[int, float]:
        return dict(zip(self.series.tolist(), self.values.tolist(), strict=True))

    def __iter__(self) -> Iterator[Measurement]:
        numbers = zip(self.series.tolist(), self.values.tolist(), strict=True)
        for number, value in itertools.chain(numbers, self.histograms.items()):
            series = self.table[number]
            yield Measurement(series.layer, series.family.tensor, series.family.statistic, value)


def log_name(layer: str, tensor: str, statistic: str) -> str:
    """Transformer Engine's name of a number: ``<layer>_<tensor>_<statistic>``."""
    return "_".join(part for part in (layer, tensor, statistic) if part)


def parsed_log_name(name: str, layers: Collection[str]) -> tuple[str, str, str]:
    """Layer, tensor and statistic of a :func:`log_name`; any other name is a user's own: ``("", "", name)``.

    ``layers`` are the names of all layers; the longest match counts.
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
