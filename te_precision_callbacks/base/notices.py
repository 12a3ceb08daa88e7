"""Messages that are logged once, or collected instead of logged."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_PACKAGE = __name__.partition(".")[0]


class Notices:
    def __init__(self) -> None:
        self._said: set[Hashable] = set()

    def first(self, what: Hashable) -> bool:
        first = what not in self._said
        self._said.add(what)
        return first


class _Gathering(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


@contextmanager
def gathered_warnings() -> Iterator[list[str]]:
    texts: list[str] = []
    handler, package = _Gathering(texts), logging.getLogger(_PACKAGE)
    propagate = package.propagate
    package.addHandler(handler)
    package.propagate = False
    try:
        yield texts
    finally:
        package.removeHandler(handler)
        package.propagate = propagate
