"""Reading of text files that may be damaged or foreign."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MOST_ITERATION = 1 << 53
"""Upper bound of iterations: JavaScript's integers are exact up to here."""

_LONGEST_LINE = 1 << 24

_PIECE = 1 << 23


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, and make its texts :func:`writable`; raises OSError or ValueError."""
    facts = writable(json.loads(path.read_bytes()))
    if not isinstance(facts, dict):
        raise ValueError("no JSON object")
    return facts


def writable(value: Any) -> Any:
    """Escape lone surrogates, which UTF-8 cannot encode, in all texts of a JSON value."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [writable(item) for item in value]
    if isinstance(value, dict):
        return {writable(key): writable(item) for key, item in value.items()}
    return value


def pieces_of(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of whole lines, and the number of bytes read for each.

    An incomplete last line is left out. A line that is too long is replaced by NUL and its end, which is not a valid
    line of any file.
    """
    rest = b""
    while piece := file.read(_PIECE):
        rest += piece
        end = rest.rfind(b"\n") + 1
        yield rest[:end], len(piece)
        rest = rest[end:] if len(rest) - end <= _LONGEST_LINE else b"\0"
