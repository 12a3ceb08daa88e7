"""Reads text of a log folder that may be damaged, or not be a text at all."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MOST_ITERATION = 1 << 53
"""Iterations are below: the script of a page counts no further."""

_LONGEST_LINE = 1 << 24
"""The bytes of a line of a log, or of events.jsonl."""

_PIECE = 1 << 23
"""The bytes that are read at once."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe or a device, which may block or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, in which all text is :func:`writable`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no JSON object.
    """
    with open_regular(path) as file:
        return parse_json(file.read())


def parse_json(text: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text, in which all text is :func:`writable`.

    Raises:
        ValueError: it is not one.
    """
    try:
        found = writable(json.loads(text))
    except RecursionError:
        raise ValueError("its objects are nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def writable(value: Any) -> Any:
    """Escape lone surrogates, which UTF-8 cannot encode, in all texts of a JSON value."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [writable(each) for each in value]
    if isinstance(value, dict):
        return {writable(key): writable(each) for key, each in value.items()}
    return value


def pieces_of(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines of a file, many at once, and the number of bytes read for them.

    An incomplete last line, of a process that was killed while it wrote, is left out. A line that is too long becomes
    NUL and its end, which is not a line of any file.
    """
    rest = b""
    while piece := file.read(_PIECE):
        rest += piece
        end = rest.rfind(b"\n") + 1
        yield rest[:end], len(piece)
        rest = rest[end:] if len(rest) - end <= _LONGEST_LINE else b"\0"
