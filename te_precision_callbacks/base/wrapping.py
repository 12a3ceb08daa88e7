"""Wraps the cells of a table: words stay whole, and a name breaks only behind a separator.

widths = fitted([["layer", "layers.0.attention.qkv"], ["why not low", "not a TE layer"]], 30)
text = wrapped("layers.0.attention.qkv", widths[0])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len

_SEPARATED = re.compile(r"(?<=[^\W_][._:-])(?=[^\W\d_{]|[{])|(?<=\w/)(?=\S)|(?<=[})\]][./:])(?=\S)")
"""Where a name may break: ``layers.|{0-7}.|self_|attention``. The numbers 1.5 and 2e-05 stay whole."""

_BLANK = re.compile(r"\s+(?!%)")


def fitted(columns: Sequence[Sequence[str]], width: int, widest: Sequence[int | None] = ()) -> list[int] | None:
    """The width of each column of a table; None if a word would break.

    The widest column gives way first, down to its longest word. Only then do names break.

    Args:
        columns: the texts of each column, with its heading.
        width: for all columns together.
        widest: the largest width of each column, as far as its words allow; empty or None for no limit.
    """
    found, words, parts = ([_longest(column, part) for column in columns] for part in (str.splitlines, _words, _parts))
    for number, most in enumerate(widest):
        found[number] = found[number] if most is None else max(min(found[number], most), parts[number])
    for floors in (words, parts):
        while sum(found) > width and (wider := [n for n, floor in enumerate(floors) if found[n] > floor]):
            found[max(wider, key=found.__getitem__)] -= 1
    return found if sum(found) <= width else None


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most this width; a longer part of a name is left whole. A line that fits stays as it is,
    with its indentation."""
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
