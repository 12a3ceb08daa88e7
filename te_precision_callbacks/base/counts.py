"""Formatting of counts and sizes: ``3,000 files``, ``1.5 GiB``; and grouping by a key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 or what == 'series' else 's'}"


def size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    number = float(count)
    unit = 0
    while abs(number) >= 999.5 and unit < len(units) - 1:
        number /= 1024
        unit += 1
    if not unit:
        return f"{count} B"
    return f"{number:.{max(0, 2 - len(str(abs(int(number)))) + 1)}f} {units[unit]}"


def first_of(texts: Iterable[str], most: int, others: str = "and {} more") -> list[str]:
    """Return the first texts, and then one with the number of others."""
    listed = list(texts)
    if len(listed) <= most:
        return listed
    return [*listed[:most], others.format(len(listed) - most)]


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Return the first names and the number of others: ``a, b, c and 4 more``."""
    listed = first_of(names, most)
    return " ".join([", ".join(listed[:most]), *listed[most:]])


def without_exponents(text: str) -> str:
    # 2.57e+05 -> 257,000
    return re.sub(r"\d(?:\.\d+)?e\+0\d\b", lambda number: f"{float(number[0]):,.0f}", text)


def group_by_key(pairs: Iterable[tuple[KeyT, ValueT]]) -> dict[KeyT, list[ValueT]]:
    """Return key -> values, in the order of the pairs."""
    values: dict[KeyT, list[ValueT]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values
