"""Short texts for many layer names: names that differ only in numbers are folded.

fold_names(["layers.0.fc", "layers.1.fc", "layers.4.fc", "head"])     # ["layers.{0-1,4}.fc", "head"]
fold_names(f"h.{i}.experts.gemm_{e}" for i in range(32) for e in range(8))   # ["h.{0-31}.experts.gemm_{0-7}"]
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.counts import first_of

_NUMBER = re.compile(r"(?<!\d)(?<!fc)(?:0|[1-9]\d*)(?!\d)")
"""A number in a name, except with a leading zero, and except in fc1 and fc2, where it identifies the layer."""

_MOST_RANGES = 4

_SEGMENT = re.compile(r"[^./]+[./]?|[./]")
"""A part of a path, with the following dot or slash."""

_LEFT_OUT = "…"

_Numbers = tuple[int, ...]


def fold_names(names: Iterable[str], *, most: int | None = None, most_ranges: int | None = _MOST_RANGES) -> list[str]:
    """Fold names into few texts, in order of first appearance.

    Args:
        most: maximum number of texts; another text then has the number of dropped texts.
        most_ranges: maximum number of ranges within braces.
    """
    numbers_by_form: dict[str, dict[_Numbers, None]] = {}
    for name in names:
        form, numbers = _parsed(name)
        numbers_by_form.setdefault(form, {})[numbers] = None
    texts: list[str] = []
    for form, form_numbers in numbers_by_form.items():
        boxes = _boxes(list(form_numbers), form.count("\0"))
        texts += [_filled(form, ranges, most_ranges) for ranges in boxes]
    if most is None:
        return texts
    return first_of(texts, most, "{} more")


def fold_for_sentence(*names: str, most: int | None = None) -> str:
    """Fold names for a sentence. Names without letters, such as the layers of a Sequential, are quoted."""
    texts = fold_names(names, most=most)
    for index, text in enumerate(texts):
        if not any(map(str.isalpha, text)):
            texts[index] = repr(text)
    return " and ".join(texts)


def form_of(name: str) -> str:
    """Return a key that is equal for names that differ only in numbers."""
    return _parsed(name)[0]


def block_of(name: str) -> str:
    """Return the path up to the first number; the whole name without one."""
    number = _NUMBER.search(name)
    return name if number is None else name[: number.end()]


def numbers_of(name: str) -> tuple[int, ...]:
    return _parsed(name)[1]


@functools.lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> tuple[str, _Numbers]:
    """Return the name without its numbers, and the numbers; cached, since the same names are folded often."""
    return _NUMBER.sub("\0", name), tuple(map(int, _NUMBER.findall(name)))


def _boxes(numbers: Sequence[_Numbers], width: int) -> list[list[list[int]]]:
    if not width:
        return [[]]
    sets = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, sets)) == len(numbers):
        return [sets]
    rests: dict[int, list[_Numbers]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[_Numbers, ...], list[int]] = {}
    for first, rest_numbers in rests.items():
        firsts.setdefault(tuple(sorted(rest_numbers)), []).append(first)
    boxes: list[list[list[int]]] = []
    for shared, same in firsts.items():
        boxes += [[sorted(same), *box] for box in _boxes(shared, width - 1)]
    return boxes


def _filled(form: str, sets: Iterable[Sequence[int]], most_ranges: int | None) -> str:
    first, *rest = form.split("\0")
    return first + "".join(f"{_ranges(numbers, most_ranges)}{text}" for numbers, text in zip(sets, rest, strict=True))


def _ranges(numbers: Sequence[int], most: int | None) -> str:
    """Format numbers as ``7``, as ``{0-2,5}``, or for many ranges as ``{0,2,4,6 and 28 more}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    shown = parts[:most]
    hidden_parts = parts[most if most is not None else len(parts) :]
    more = sum(part[-1] - part[0] + 1 for part in hidden_parts)
    return f"{{{','.join('-'.join(map(str, part)) for part in shown)}{f' and {more} more' if more else ''}}}"


class ShortNames:
    """Shortens names of layers or metrics so that they stay distinct.

    Only parts that do not distinguish names are dropped; the last part, and parts before a number, are dropped last.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._following: dict[str, set[str]] = {}
        for name in dict.fromkeys(names):
            prefix = ""
            for segment in (*_SEGMENT.findall(name), ""):
                self._following.setdefault(prefix, set()).add(segment)
                prefix += segment

    def of(self, name: str, most: int) -> str:
        parts = _SEGMENT.findall(name)
        prefix = ""
        shared = list[int]()
        for index, part in enumerate(parts):
            if len(self._following.get(prefix, ())) == 1:
                shared.append(index)
            prefix += part
        shared.sort(key=lambda index: index + 1 == len(parts) or bool(_NUMBER.match(parts[index + 1])))
        text = name
        for index in shared:
            if len(text) <= most:
                break
            parts[index] = _LEFT_OUT
            text = re.sub(f"{_LEFT_OUT}+", _LEFT_OUT, "".join(parts))
        return _without_middle(text, most)


def _without_middle(text: str, most: int) -> str:
    """Cut the middle of a text that is too long, keeping more of the end than of the beginning."""
    if len(text) <= most:
        return text
    if most < 5:
        return text[len(text) - max(most, 0) :]
    head = (most - 1) // 3
    return f"{text[:head]}{_LEFT_OUT}{text[len(text) - (most - 1 - head) :]}"
