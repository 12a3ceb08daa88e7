"""Names of layers in few words: those that differ in their numbers alone are one text.

folded(["layers.0.fc", "layers.1.fc", "layers.4.fc", "head"])     # ["layers.{0-1,4}.fc", "head"]
folded(f"h.{i}.experts.gemm_{e}" for i in range(32) for e in range(8))   # ["h.{0-31}.experts.gemm_{0-7}"]

A text stands for exactly its names, unless it has more than a few ranges of numbers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<!\d)(?<!fc)(?:0|[1-9]\d*)(?!\d)")
"""A number in a name; those of fc1 and fc2 say which layer it is, and a leading zero would be lost."""

_MOST_RANGES = 4

_Numbers = tuple[int, ...]


def folded(names: Iterable[str], *, most: int | None = None) -> list[str]:
    """The names in few texts, in the order in which they come first.

    Args:
        names: the names; each counts once.
        most: the most texts; behind them one says how many are left.
    """
    alike: dict[str, dict[_Numbers, None]] = {}
    for name in names:
        form, numbers = _parsed(name)
        alike.setdefault(form, {})[numbers] = None
    texts = [
        _filled(form, ranges) for form, numbers in alike.items() for ranges in _boxes(list(numbers), form.count("\0"))
    ]
    more = len(texts) - (len(texts) if most is None else most)
    return [*texts[:most], f"{more} more"] if more > 0 else texts


def form_of(name: str) -> str:
    """A key that is equal for names that differ in their numbers alone."""
    return _parsed(name)[0]


@functools.lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> tuple[str, _Numbers]:
    """A name without its numbers, and the numbers. The names of a model are folded many times."""
    return _NUMBER.sub("\0", name), tuple(map(int, _NUMBER.findall(name)))


def _boxes(numbers: Sequence[_Numbers], width: int) -> list[list[list[int]]]:
    """All numbers as few products of sets: for each of them the sets, one for each number of a name."""
    if not width:
        return [[]]
    sets = [sorted({each[place] for each in numbers}) for place in range(width)]
    if math.prod(map(len, sets)) == len(numbers):
        return [sets]
    rests: dict[int, list[_Numbers]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[_Numbers, ...], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(tuple(sorted(found)), []).append(first)
    return [[sorted(these), *box] for found, these in firsts.items() for box in _boxes(found, width - 1)]


def _filled(form: str, sets: Iterable[Sequence[int]]) -> str:
    first, *rest = form.split("\0")
    return first + "".join(f"{_ranges(numbers)}{text}" for numbers, text in zip(sets, rest, strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    """``7``, ``{0-2,5}``, or of many ranges the first ones: ``{0,2,4,6 and 28 more}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    told, left = parts[:_MOST_RANGES], parts[_MOST_RANGES:]
    more = sum(part[-1] - part[0] + 1 for part in left)
    return f"{{{','.join('-'.join(map(str, part)) for part in told)}{f' and {more} more' if more else ''}}}"
