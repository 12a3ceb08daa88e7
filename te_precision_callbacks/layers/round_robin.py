from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

AT_ONCE = 8
"""Number of modules checked per step without collection."""

MANY = 4_000
"""Number of modules above which a step checks only a quarter as many, since they no longer fit the CPU cache."""


class RoundRobin(Generic[ItemT]):
    def __init__(self, items: Sequence[ItemT]) -> None:
        self._items = items
        self._next = 0
        self._at_once = AT_ONCE if len(items) <= MANY else AT_ONCE // 4

    def take(self, more: int = 0) -> Sequence[ItemT]:
        begin = self._next
        end = self._next + self._at_once + more
        self._next = end if end < len(self._items) else 0
        return self._items[begin:end]
