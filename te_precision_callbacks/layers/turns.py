"""A few of many things in each step, and all of them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Thing = TypeVar("Thing")

AT_ONCE = 2
"""How many modules a step looks at if nothing is due in it, however large the model is."""


class Turns(Generic[Thing]):
    """Gives a few of many things at a time, so that each has its turn.

    Args:
        things: the things, which are kept.
    """

    def __init__(self, things: Sequence[Thing]) -> None:
        self._things = things
        self._next = 0

    def take(self, count: int) -> Sequence[Thing]:
        """The next things, ``count`` of them or, before the first thing's turn comes again, fewer."""
        begin, end = self._next, self._next + count
        self._next = end if end < len(self._things) else 0
        return self._things[begin:end]
