"""Page-locked host memory for snapshots from a GPU: allocated once, and used again when a snapshot is done with it.

    ring = Ring(1 << 30)
    place = ring.take(tensor.nbytes)            # None: no room at the moment
    place.memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
    ring.give_back([place], events)             # from any thread; used again once the events have passed

Only a copy to page-locked memory runs while the host goes on. Locking pages takes the driver milliseconds, in which it
may wait for the device: done for each tensor, as torch does it until it has kept enough, it stops training in the first
dumps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LARGEST = 1 << 30
"""The most bytes that a ring has, whatever ``max_memory`` allows."""

_ALIGNED = 256


def _page_locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@dataclass(eq=False)
class Place:
    """A part of a ring.

    Attributes:
        memory: its bytes.
        begin, end: where it lies.
        events: once it was given back, what must have passed on the GPU before it is used again.
    """

    memory: torch.Tensor
    begin: int
    end: int
    events: Sequence[Any] | None = None


class Ring:
    """Memory that is taken in turn, and that is free again in the same order.

    Args:
        nbytes: its size.
        allocate: gives the memory.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], torch.Tensor] = _page_locked) -> None:
        self._memory = allocate(nbytes)
        self._next = 0
        self._taken: deque[Place] = deque()
        self._lock = threading.Lock()  # forward and backward are two threads

    def take(self, nbytes: int) -> Place | None:
        """So many bytes, or None where there is no room for them now. Never waits."""
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        with self._lock:
            while self._taken and _is_free(self._taken[0]):
                self._taken.popleft()
            begin = self._room_for(size)
            if begin is None or not nbytes:
                return None
            self._next = begin + size
            place = Place(self._memory[begin : begin + nbytes], begin, begin + size)
            self._taken.append(place)
            return place

    def _room_for(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        oldest = self._taken[0].begin
        if self._next <= oldest:  # what was taken goes over the end
            return self._next if self._next + size <= oldest else None
        if self._next + size <= len(self._memory):
            return self._next
        return 0 if size <= oldest else None

    @staticmethod
    def give_back(places: Iterable[Place], events: Sequence[Any]) -> None:
        """Let places be used again, once the events have passed. From any thread, and while memory is collected."""
        for place in places:
            place.events = events


def _is_free(place: Place) -> bool:
    return place.events is not None and all(event.query() for event in place.events)
