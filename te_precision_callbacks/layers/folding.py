"""Names of layers in few words: those that differ in their numbers alone are one text.

folded(["layers.0.fc", "layers.1.fc", "layers.4.fc", "head"])     # ["layers.{0-1,4}.fc", "head"]
folded(f"h.{i}.experts.gemm_{e}" for i in range(32) for e in range(8))   # ["h.{0-31}.experts.gemm_{0-7}"]

A text stands for exactly its names, unless it has more than a few ranges of numbers.

short = ShortNames(["model.encoder.layers.0.attention.qkv", "model.encoder.layers.1.attention.qkv"])
short.of("model.encoder.layers.0.attention.qkv", 24)              # "…layers.0.attention.qkv"

A short name leaves out what all names share, and keeps what tells it apart from the others.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

_NUMBER = re.compile(r"(?<!\d)(?<!fc)(?:0|[1-9]\d*)(?!\d)")
"""A number in a name; those of fc1 and fc2 say which layer it is, and a leading zero would be lost."""

_MOST_RANGES = 4

_SEGMENT = re.compile(r"[^./]+[./]?|[./]")
"""A part of a path, with the dot or slash behind it."""

_LEFT_OUT = "…"

_LEAST_STEM, _MOST_SIBLINGS = 3, 200

_Numbers = tuple[int, ...]


def folded(names: Iterable[str], *, most: int | None = None, most_ranges: int | None = _MOST_RANGES) -> list[str]:
    """The names in few texts, in the order in which they come first.

    Args:
        names: the names; each counts once.
        most: the most texts; behind them one says how many are left.
        most_ranges: the most ranges of numbers in one place; None for all.
    """
    alike: dict[str, dict[_Numbers, None]] = {}
    for name in names:
        form, numbers = _parsed(name)
        alike.setdefault(form, {})[numbers] = None
    texts = [
        _filled(form, ranges, most_ranges)
        for form, numbers in alike.items()
        for ranges in _boxes(list(numbers), form.count("\0"))
    ]
    more = len(texts) - (len(texts) if most is None else most)
    return [*texts[:most], f"{more} more"] if more > 0 else texts


def in_sentence(*names: str, most: int | None = None) -> str:
    """Names in few words, for a sentence: in quotes where they have no letter, as the layers of a Sequential."""
    texts = folded(names, most=most)
    return " and ".join(text if any(map(str.isalpha, text)) else repr(text) for text in texts)


def form_of(name: str) -> str:
    """A key that is equal for names that differ in their numbers alone."""
    return _parsed(name)[0]


def numbers_of(name: str) -> tuple[int, ...]:
    """The numbers in a name, by which names that differ in their numbers alone are ordered."""
    return _parsed(name)[1]


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


def _filled(form: str, sets: Iterable[Sequence[int]], most_ranges: int | None) -> str:
    first, *rest = form.split("\0")
    return first + "".join(f"{_ranges(numbers, most_ranges)}{text}" for numbers, text in zip(sets, rest, strict=True))


def _ranges(numbers: Sequence[int], most: int | None) -> str:
    """``7``, ``{0-2,5}``, or of many ranges the first ones: ``{0,2,4,6 and 28 more}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    told, left = parts[:most], parts[most if most is not None else len(parts) :]
    more = sum(part[-1] - part[0] + 1 for part in left)
    return f"{{{','.join('-'.join(map(str, part)) for part in told)}{f' and {more} more' if more else ''}}}"


class ShortNames:
    """Short texts for the names of a model's layers, or of a trainer's numbers.

    A part of a name is left out first where no other name goes on differently at that place, then a part is cut to what
    its neighbours do not have. Names that differ in their numbers alone are shortened at the same places.

    Args:
        names: all names that are to be told apart, also those that are not shown.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._following: dict[str, set[str]] = {}
        self._alike: dict[str, list[str]] = {}
        self._known: set[str] = set()
        for name in dict.fromkeys(names):
            self._known.add(name)
            self._alike.setdefault(form_of(name), []).append(name)
            before = ""
            for segment in (*_SEGMENT.findall(name), ""):
                self._following.setdefault(before, set()).add(segment)
                before += segment
        self._texts: dict[tuple[str, int], dict[str, str]] = {}

    def of(self, name: str, most: int) -> str:
        """A name in at most so many characters; a name that fits is itself."""
        if len(name) <= most:
            return name
        if name not in self._known:
            return _without_middle(name, most)
        key = (form_of(name), most)
        if key not in self._texts:
            alike = self._alike[key[0]]
            self._texts[key] = dict(zip(alike, self._fitted(alike, most), strict=True))
        return self._texts[key][name]

    def _fitted(self, names: Sequence[str], most: int) -> list[str]:
        """Names of one form, with as little left out as fits all of them."""
        rows = [_SEGMENT.findall(name) for name in names]
        befores = [["".join(row[:place]) for place in range(len(row))] for row in rows]
        shortened: list[list[int]] = []
        for places in self._order(rows, befores):
            if max(map(_width, rows)) <= most:
                break
            for row, before, place in ((*both, place) for both in zip(rows, befores, strict=True) for place in places):
                siblings = self._following[before[place]]
                row[place] = _LEFT_OUT if len(siblings) == 1 else _stem(row[place], siblings)
            shortened.append(places)
        for (place,) in reversed(shortened[1:]):  # the last cut may have made more room than was needed
            longer = [
                [*row[:place], _SEGMENT.findall(name)[place], *row[place + 1 :]]
                for row, name in zip(rows, names, strict=True)
            ]
            if max(map(_width, longer)) <= most:
                rows = longer
        return [_without_middle(_joined(row), most) for row in rows]

    def _order(self, rows: Sequence[Sequence[str]], befores: Sequence[Sequence[str]]) -> Iterator[list[int]]:
        """The places of a name that are shortened together, those first that say the least."""
        places = range(len(rows[0]))
        shared = [all(len(self._following[before[place]]) == 1 for before in befores) for place in places]
        numbered = [bool(_NUMBER.fullmatch(segment.rstrip("./"))) for segment in rows[0]]

        def weight(place: int) -> tuple[bool, bool, bool]:
            # "layers" in front of a number, and the last part, are what a reader looks for.
            last = place + 1 == len(places)
            return not shared[place], last, not last and numbered[place + 1]

        ordered = sorted((place for place in places if shared[place] or not numbered[place]), key=weight)
        begin = [place for at, place in enumerate(ordered) if place == at and not any(weight(place))]
        yield begin  # at once, so that names of several forms begin alike
        yield from ([place] for place in ordered[len(begin) :])


def _stem(segment: str, siblings: Iterable[str]) -> str:
    """A part of a name, cut to a begin or an end that none of its siblings has."""
    text = segment.rstrip("./")
    others = {sibling.rstrip("./") for sibling in siblings} - {text}
    if len(others) > _MOST_SIBLINGS:
        return segment
    for size in range(_LEAST_STEM, len(text) - 1):
        if not any(other.startswith(text[:size]) for other in others):
            return text[:size] + _LEFT_OUT
        if not any(other.endswith(text[-size:]) for other in others):
            return f"{_LEFT_OUT}{text[-size:]}{segment[len(text) :]}"
    return segment


def _joined(segments: Iterable[str]) -> str:
    return re.sub(f"{_LEFT_OUT}+", _LEFT_OUT, "".join(segments))


def _width(segments: Iterable[str]) -> int:
    return len(_joined(segments))


def _without_middle(text: str, most: int) -> str:
    """A text in at most so many characters: its begin and, above all, its end."""
    if len(text) <= most:
        return text
    if most < 5:
        return text[len(text) - max(most, 0) :]
    head = (most - 1) // 3
    return f"{text[:head]}{_LEFT_OUT}{text[len(text) - (most - 1 - head) :]}"
