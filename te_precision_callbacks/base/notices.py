"""Messages that are logged once, or collected instead of logged."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_PACKAGE = __name__.partition(".")[0]
_MOST_RECORDS = 1 << 20


class Notices:
    def __init__(self) -> None:
        self._reported: set[Hashable] = set()

    def first(self, what: Hashable) -> bool:
        first = what not in self._reported
        self._reported.add(what)
        return first


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect warnings instead of logging them; the list is filled at the end of the block."""
    texts: list[str] = []
    package = logging.getLogger(_PACKAGE)
    handler = logging.handlers.BufferingHandler(_MOST_RECORDS)
    propagate = package.propagate
    handler.setLevel(logging.WARNING)
    package.addHandler(handler)
    package.propagate = False
    try:
        yield texts
    finally:
        texts += [record.getMessage() for record in handler.buffer]
        package.removeHandler(handler)
        package.propagate = propagate
