from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Thing = TypeVar("Thing")

AT_ONCE = 8
"""The number of modules checked in a step without collection."""

MANY = 4_000
"""Above this number of modules, a step checks a quarter as many, since they are no longer in the CPU's cache."""


class RoundRobin(Generic[Thing]):
    def __init__(self, things: Sequence[Thing]) -> None:
        self._things = things
        self._next = 0
        self._at_once = AT_ONCE if len(things) <= MANY else AT_ONCE // 4

    def take(self, more: int = 0) -> Sequence[Thing]:
        begin, end = self._next, self._next + self._at_once + more
        self._next = end if end < len(self._things) else 0
        return self._things[begin:end]
