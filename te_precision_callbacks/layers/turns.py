"""Round robin over many objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Thing = TypeVar("Thing")

AT_ONCE = 8
"""How many modules a step looks at if nothing is due in it."""

MANY = 4_000
"""Of more modules than this a step looks at a quarter as many: each look then waits for memory that is in no cache."""


class Turns(Generic[Thing]):
    """Returns a few of many objects at a time, round robin.

    Args:
        things: the objects, which are kept.
    """

    def __init__(self, things: Sequence[Thing]) -> None:
        self._things = things
        self._next = 0
        self._at_once = AT_ONCE if len(things) <= MANY else AT_ONCE // 4

    def take(self, more: int = 0) -> Sequence[Thing]:
        """The next objects, plus ``more``; fewer at the end of a round."""
        begin, end = self._next, self._next + self._at_once + more
        self._next = end if end < len(self._things) else 0
        return self._things[begin:end]
