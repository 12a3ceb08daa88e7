"""When a feature acts: ``freq``, ``start_step``, ``end_step`` and ``start_end_list`` of its options.

    schedule = Schedule.of({"freq": 10, "start_step": 5})
    schedule.at(7)      # (False, 10): not in iteration 7, next in iteration 10

The meaning is Transformer Engine's (2.20.2, ``debug/features/utils/__init__.py: next_enabled_iter``): an iteration is
in the schedule if it is a multiple of ``freq`` and lies in an interval, both ends included. Unlike there, an end of -1
means no end, as its documentation says.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """The iterations in which something is due.

    Attributes:
        freq: only multiples of it.
        intervals: first and last iteration of each, increasing.
    """

    freq: int = 1
    intervals: tuple[tuple[int, float], ...] = ((0, math.inf),)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Schedule:
        """The schedule that a feature's options ask for."""
        pairs = options.get("start_end_list")
        if not pairs:
            pairs = [(options.get("start_step"), options.get("end_step"))]
        intervals = sorted((int(start or 0), _end(end)) for start, end in pairs)
        return cls(int(options.get("freq", 1)), tuple(intervals))

    def at(self, iteration: int) -> tuple[bool, int | None]:
        """Whether something is due in an iteration, and the next iteration after it in which it is; None for never."""
        due = iteration % self.freq == 0 and any(start <= iteration <= end for start, end in self.intervals)
        for start, end in self.intervals:
            first = max(iteration + 1, start)
            candidate = first + -first % self.freq
            if candidate <= end:
                return due, candidate
        return due, None


@functools.lru_cache(maxsize=4)
def fingerprint(schedules: frozenset[Schedule]) -> int:
    """A number below 2**52, the same in every process for the same schedules, and another one for others."""
    text = repr(sorted((schedule.freq, schedule.intervals) for schedule in schedules))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


def _end(end: int | None) -> float:
    return math.inf if end is None or end == -1 else end
