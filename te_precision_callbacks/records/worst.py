"""Which of many numbers are the worst, by the direction that the table of statistics gives each of them.

What delayed scaling does in a layer's first step, with the scale 1, is left out: ``StepRecords.unscaled``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, zip_longest
from typing import NamedTuple

from te_precision_callbacks.records.model import Row, StepRecords
from te_precision_callbacks.statistics.names import OWN_RECIPE, logged_request
from te_precision_callbacks.statistics.table import Worse

WORST_OF_ALL: Mapping[str, str] = {
    "worst_underflows%": "underflows%",
    "worst_overflows%": "overflows%",
    "worst_sqnr_db": "sqnr_db",
    "nonfinite_num": "nonfinite_num",
}
"""Last part of the metric's name, and the statistic whose worst value it is, of any layer, tensor, recipe, element
format and direction."""

_DELAYED_SCALING = "fp8_delayed_scaling"


def badness(statistic: str, value: float) -> float:
    """A key that grows as a value gets worse. nan is the worst, and of an SQNR inf the best.

    Args:
        statistic: the name in the records. One that is not in the table of statistics, or of which neither direction is
            worse, goes by size.
        value: its value.
    """
    if math.isnan(value):
        return math.inf
    match direction(statistic):
        case Worse.HIGH:
            return value
        case Worse.LOW:
            return -value
        case _:
            return abs(value)


def direction(statistic: str) -> Worse | None:
    """The direction in which a statistic gets worse; None where it is not in the table, a user's own."""
    request = logged_request(statistic)
    return None if request is None else request.statistic.worse


class Family(NamedTuple):
    """What the series of different layers have in common."""

    tensor: str
    gemm: str | None
    statistic: str


Values = Mapping[str, float]
"""Layer -> value."""


def by_family(records: StepRecords) -> dict[Family, Values]:
    """The numbers of a step by tensor and statistic."""
    found: dict[tuple[str, str | None, str], dict[str, float]] = {}
    columns = (records.layers, records.tensors, records.gemms, records.statistics, records.values)
    for layer, tensor, gemm, statistic, value in zip(*columns, strict=True):
        found.setdefault((tensor, gemm, statistic), {})[layer] = value
    return {Family(*family): values for family, values in found.items()}


def judged(families: Mapping[Family, Values], unscaled: Set[str]) -> Mapping[Family, Values]:
    """The numbers that tell something of the run: without those of delayed scaling before it has a scale.

    Args:
        families: of a step.
        unscaled: its :attr:`StepRecords.unscaled`.
    """
    if not unscaled:
        return families
    return {
        family: {layer: value for layer, value in values.items() if layer not in unscaled}
        if _is_of_delayed_scaling(family.statistic)
        else values
        for family, values in families.items()
    }


def _is_of_delayed_scaling(statistic: str) -> bool:
    """Whether it is what the recipe of a layer that runs delayed scaling did."""
    request = logged_request(statistic)
    return request is not None and request.recipe in (OWN_RECIPE, _DELAYED_SCALING)


def worst_of_all(families: Mapping[Family, Values]) -> dict[str, Row]:
    """The worst number for each name of :data:`WORST_OF_ALL` of which there is one.

    Args:
        families: of a step, those that are :func:`judged`.
    """
    found: dict[str, Row] = {}
    keys = {statistic: key for key, statistic in WORST_OF_ALL.items()}
    for family, values in families.items():
        request = logged_request(family.statistic)
        if request is None or request.statistic.name not in keys:
            continue
        key = keys[request.statistic.name]
        for layer in _worst(1, family.statistic, values):
            row = Row(layer, *family, values[layer])
            bad = badness(*row[3:])
            # An SQNR of inf is nobody's worst: the quantized tensor is exact.
            if bad > (badness(*found[key][3:]) if key in found else -math.inf):
                found[key] = row
    return found


class Worst(NamedTuple):
    """The worst value of a statistic of one tensor.

    Attributes:
        row: the layer, the tensor, the statistic, and the value.
        iteration: the debug iteration in which it was first seen.
    """

    row: Row
    iteration: int


class WorstOfRun:
    """The worst value so far of each statistic that has a worse direction; iterating gives :class:`Worst` objects."""

    def __init__(self) -> None:
        self._worst: dict[tuple[str, Family], tuple[float, Worst]] = {}

    def add(self, records: StepRecords) -> None:
        """Take the numbers of a step."""
        for family, values in judged(by_family(records), records.unscaled).items():
            if direction(family.statistic) in (None, Worse.NEITHER):
                continue
            for layer, value in values.items():
                bad = badness(family.statistic, value)
                known = self._worst.get((layer, family))
                if known is None or bad > known[0]:
                    self._worst[layer, family] = (bad, Worst(Row(layer, *family, value), records.iteration))

    def __iter__(self) -> Iterator[Worst]:
        return (worst for _, worst in self._worst.values())


def worst_layers(most: int, statistic: str, values: Values, beside: Mapping[str, Values]) -> list[str]:
    """The worst layers by a statistic, the worst first.

    An SQNR or a squared error tells little of elements that are lost beside an outlier. There the layers with the most
    underflows and overflows take turns with those that are worst by the statistic itself.

    Args:
        most: how many.
        statistic: the name in the records.
        values: of the layers.
        beside: the name of another statistic of the same tensor -> its values.
    """
    lists = [_worst(most, statistic, values)]
    request = logged_request(statistic)
    for name in () if request is None else request.statistic.misses:
        label = request.beside(name) if request is not None else name
        lost = {layer: value for layer, value in beside.get(label, {}).items() if layer in values and value != 0}
        lists.append(_worst(most, label, lost))
    taking_turns: Sequence[str | None] = list(chain.from_iterable(zip_longest(*lists)))
    return list(dict.fromkeys(layer for layer in taking_turns if layer is not None))[:most]


def _worst(most: int, statistic: str, values: Values) -> list[str]:
    return heapq.nlargest(most, values, key=lambda layer: badness(statistic, values[layer]))
