"""Conditions on statistics of a tensor, such as ``underflows% > 5``, and on shares of multiply-adds.

A condition names a statistic as in the log, without layer and tensor. A condition on a share, such as
``fp8 wgrad >= 90%``, names a precision, and optionally a part of the products.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from te_precision_callbacks.base import debug_values
from te_precision_callbacks.base.suggestions import nearest, suggestion
from te_precision_callbacks.base.vocabulary import PRECISIONS
from te_precision_callbacks.statistics.names import (
    PREFIXES,
    Request,
    UnknownStatisticError,
    named_request,
)
from te_precision_callbacks.statistics.table import (
    BLOCKWISE,
    GEMM_STATISTICS,
    QUANTIZED_STATISTICS,
    STATISTICS,
    TENSOR_STATISTICS,
)

NONFINITE = "nonfinite"
ACTIVATION_OVERFLOW = debug_values.ACTIVATION_OVERFLOW


class EventCondition(Enum):
    NONFINITE = NONFINITE

    ACTIVATION_OVERFLOW = ACTIVATION_OVERFLOW

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class NumberComparison:
    """A comparison of a value with a number; ``text`` is the condition as written."""

    text: str
    comparison: str
    number: float

    def holds(self, value: float) -> bool:
        return _COMPARE[self.comparison](value, self.number)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Threshold(NumberComparison):
    """A condition on a statistic of a tensor; :data:`BLOCKWISE` without blocks matches any blocks."""

    statistic: Request

    def reads(self, request: Request) -> bool:
        if self.statistic.statistic.name == BLOCKWISE and self.statistic.blocks is None:
            return request.statistic is self.statistic.statistic
        return replace(self.statistic, label=request.label) == request  # the labels may differ


Condition = EventCondition | Threshold


@dataclass(frozen=True)
class Share(NumberComparison):
    """A condition on the share of multiply-adds in a precision; its number is from 0 to 1.

    Attributes:
        precision: one of :data:`te_precision_callbacks.base.vocabulary.PRECISIONS`.
        part: one of :data:`PARTS`; empty for all products.
    """

    precision: str
    part: str


_COMPARISON = re.compile(r"([^\s<>=]+)\s*(<=|>=|<|>)\s*(\S+)")

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

_FORMS = (
    f"A condition is {NONFINITE!r}, {ACTIVATION_OVERFLOW!r}, or a comparison with >, >=, < or <=, such as"
    " 'underflows% > 5'."
)


PARTS = ("fprop", "dgrad", "wgrad", "qk", "pv", "forward", "backward")

_SHARE = re.compile(r"(\w+)(?:\s+(\w+))?\s*(<=|>=|<|>)\s*(\S+?)\s*%")

_SHARE_FORM = "Write a condition such as 'fp8 >= 95%', or 'fp8 wgrad >= 90%' for a part of the products."


def parse_share(entry: object) -> Share:
    """Parse a condition of a contract; the message of a ValueError continues a sentence that starts with the key."""
    match = isinstance(entry, str) and _SHARE.fullmatch(entry.strip())
    if not match:
        raise ValueError(f"has {entry!r}. {_SHARE_FORM}")
    precision, part, comparison, number = match.groups(default="")
    if precision not in PRECISIONS:
        raise ValueError(f"has {entry!r}: there is no precision {precision!r}.{suggestion(precision, PRECISIONS)}")
    if part and part not in PARTS:
        raise ValueError(f"has {entry!r}: there is no part {part!r}.{suggestion(part, PARTS)}")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not 0 <= percent <= 100:
        raise ValueError(f"has {entry!r}, where {number!r} is not a number from 0 to 100. {_SHARE_FORM}")
    return Share(str(entry).strip(), comparison, percent / 100, precision, part)


def parse_condition(entry: object) -> Condition:
    """Parse a condition of a config; the message of a ValueError continues a sentence that starts with the key."""
    if entry in (NONFINITE, ACTIVATION_OVERFLOW):
        return EventCondition(entry)
    if not isinstance(entry, str):
        raise ValueError(f"has {entry!r}. {_FORMS}")
    match = _COMPARISON.fullmatch(entry.strip())
    if match is None:
        hint = ""
        if nearest(entry, (NONFINITE, ACTIVATION_OVERFLOW)):
            hint = suggestion(entry, (NONFINITE, ACTIVATION_OVERFLOW))
        raise ValueError(f"has {entry!r}. {_FORMS}{hint}")
    try:
        number = float(match[3])
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"has {entry!r}, where {match[3]!r} is not a number. {_FORMS}")
    return Threshold(str(entry), match[2], number, _statistic(str(entry), match[1]))


def _statistic(entry: str, name: str) -> Request:
    if name == BLOCKWISE:
        return Request(name, STATISTICS[name])
    try:
        request = named_request(name)
    except UnknownStatisticError:
        known = [*TENSOR_STATISTICS, BLOCKWISE, *QUANTIZED_STATISTICS, *GEMM_STATISTICS]
        prefixes = (f"{prefix}_" for prefix in itertools.chain(*PREFIXES.values()))
        prefix = max(filter(name.startswith, prefixes), key=len, default="")
        if prefix:
            known = [prefix + statistic for statistic in QUANTIZED_STATISTICS]
        hint = suggestion(name, known)
        raise ValueError(f"has {entry!r}: there is no statistic {name!r}.{hint}") from None
    if request.statistic.value is None:
        raise ValueError(f"has {entry!r}: {name} is a histogram, not a number.")
    return request
