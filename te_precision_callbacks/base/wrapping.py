"""Wrapping of table cells: words stay whole, and names break only after a separator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len

_SEPARATED = re.compile(r"(?<=[^\W_][._:-])(?=[^\W\d_{]|[{])|(?<=\w/)(?=\S)|(?<=[})\]][./:])(?=\S)")

_BLANK = re.compile(r"\s+(?!%)")


def fitted(columns: Sequence[Sequence[str]], width: int, widest: Sequence[int | None] = ()) -> list[int] | None:
    """Return the width of each column for a total width; None if a word would break.

    The widest column shrinks first, down to its longest word; then names break. ``widest`` limits columns.
    """
    widths, words, parts = ([_longest(column, part) for column in columns] for part in (str.splitlines, _words, _parts))
    for number, most in enumerate(widest):
        widths[number] = widths[number] if most is None else max(min(widths[number], most), parts[number])
    for floors in (words, parts):
        while sum(widths) > width and (wider := [n for n, floor in enumerate(floors) if widths[n] > floor]):
            widths[max(wider, key=widths.__getitem__)] -= 1
    return widths if sum(widths) <= width else None


def wrapped(text: str, width: int) -> str:
    """Wrap a text; longer parts of names stay whole. A line that fits keeps its indentation."""
    return "\n".join(line for given in text.splitlines() for line in _lines(given, width))


def _lines(text: str, width: int) -> Iterator[str]:
    if cell_len(text) <= width:
        yield text
        return
    line = ""
    for word in _words(text):
        between = " " if line else ""
        for part in (word,) if cell_len(word) <= width else _parts(word):
            if line and cell_len(line + between + part) > width:
                yield line
                line = part
            else:
                line += between + part
            between = ""
    yield line


def _longest(column: Sequence[str], pieces: Callable[[str], list[str]]) -> int:
    return max((cell_len(piece) for text in column for piece in pieces(text)), default=1)


def _words(text: str) -> list[str]:
    return _BLANK.split(text.strip())


def _parts(text: str) -> list[str]:
    return [part for word in _words(text) for part in _SEPARATED.split(word)]
