"""What the files of a run may be at most, so that a damaged number, or a foreign file, costs its reader little.

A writer holds to what is promised here, and a reader leaves out what exceeds it, with a note.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MOST_APPENDED = 32 << 20
"""The bytes that are appended to a tail at once."""

MOST_PART = 128 << 20
"""The bytes of the rows of a part in memory: a tail that lacks one byte to be sealed, and once more appended to."""

MOST_TAIL = MOST_PART
"""The bytes of the file of a tail."""

MOST_THINNED = 256 << 20
"""The same for a thinned part, which has rows of up to ten others."""

MOST_FACTS = 1 << 19
"""The rows of a table of facts."""

MOST_ITERATION = 1 << 53
"""Iterations are below: a page's script counts no further."""

_MOST_JSON = 64 << 20
"""The bytes of run.json, which has a config and an environment."""

_DEEPEST_JSON = 64
"""The objects and lists within each other in a file of JSON."""

_LONGEST_LINE = 1 << 24
"""The bytes of a line of a log, or of events.jsonl."""

_PIECE = 1 << 23
"""The bytes that are read at once."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe or a device, which may never end, or never begin.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer is opened too
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def require_regular(path: Path) -> None:
    """Raise OSError for what :func:`open_regular` does not open."""
    open_regular(path).close()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON, in which all text is :func:`writable`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no JSON object.
    """
    with open_regular(path) as file:
        text = file.read(_MOST_JSON + 1)
    if len(text) > _MOST_JSON:
        raise ValueError(f"it has more than {_MOST_JSON:,} bytes")
    return parse_json(text)


def parse_json(text: bytes | str) -> dict[str, Any]:
    """The object that a text of JSON is, in which all text is :func:`writable`.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its objects are nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return {writable(key): writable_value(value, 1) for key, value in found.items()}


def writable(text: str) -> str:
    """A text that can be written: half of a surrogate pair, which UTF-8 does not have, becomes an escape."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def writable_value(value: Any, depth: int = 0) -> Any:
    """A value of JSON in which all text is :func:`writable`.

    Args:
        value: the value.
        depth: in how many others it is.

    Raises:
        ValueError: it is nested too deeply.
    """
    if depth > _DEEPEST_JSON:
        raise ValueError("its objects are nested too deeply")
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, list | tuple):
        return [writable_value(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {writable(key): writable_value(each, depth + 1) for key, each in value.items()}
    return value


def pieces_of(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Whole lines of a file, many at once, and how many bytes were read for them.

    Half a line at the end, which a process was writing when it was killed, is left out. Of a line that is longer than
    any, NUL and its end are left, which is no line of any file.
    """
    rest = b""
    while piece := file.read(_PIECE):
        rest += piece
        end = rest.rfind(b"\n") + 1
        yield rest[:end], len(piece)
        rest = rest[end:] if len(rest) - end <= _LONGEST_LINE else b"\0"
