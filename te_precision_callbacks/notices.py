"""Messages that are logged once."""

from __future__ import annotations

from collections.abc import Hashable


class Notices:
    """Remembers what has been said, of a run or of whatever has one of these."""

    def __init__(self) -> None:
        self._said: set[Hashable] = set()

    def first(self, what: Hashable) -> bool:
        """Whether something has not been said yet; from now on it has."""
        first = what not in self._said
        self._said.add(what)
        return first
