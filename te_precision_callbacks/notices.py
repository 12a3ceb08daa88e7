"""Messages that are logged once."""

from __future__ import annotations

from collections.abc import Hashable


class Notices:
    """Remembers the messages that have been logged, for one run or another owner."""

    def __init__(self) -> None:
        self._said: set[Hashable] = set()

    def first(self, what: Hashable) -> bool:
        """Whether a message has not been logged yet; from now on it counts as logged."""
        first = what not in self._said
        self._said.add(what)
        return first
