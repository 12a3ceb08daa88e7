"""Reading of text files that may be damaged or foreign."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MOST_ITERATION = 1 << 53
"""Upper bound of iterations: JavaScript's integers are exact up to here."""

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
    """Yield chunks of whole lines, without an incomplete last line, and the number of bytes read for each."""
    while lines := file.readlines(_PIECE):
        nbytes = sum(map(len, lines))
        if not lines[-1].endswith(b"\n"):
            lines.pop()
        yield b"".join(lines), nbytes
