"""The schedule of a feature: the keys ``freq``, ``start_step``, ``end_step`` and ``start_end_list``.

    Schedule.of(freq=10, start_step=5).at(7)      # (False, 10): not due in iteration 7, next due in iteration 10

As in Transformer Engine (2.20.2, ``debug/features/utils/__init__.py: next_enabled_iter``), an iteration is due if it is
a multiple of ``freq`` and in an interval, both ends included. An end of -1 means no end, as in its documentation, but
not in its code. Early steps are an extension of this project.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    """A set of due iterations.

    Attributes:
        freq, intervals: multiples of ``freq`` in ascending intervals are due.
        early: other iterations in the intervals that are due.
    """

    freq: int = 1
    intervals: tuple[tuple[int, float], ...] = ((0, math.inf),)
    early: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        freq: int = 1,
        start_step: int | None = None,
        end_step: int | None = None,
        start_end_list: Sequence[Sequence[int | None]] | None = None,
    ) -> Schedule:
        pairs = start_end_list or [(start_step, end_step)]
        intervals = ((start or 0, math.inf if end in (None, -1) else end) for start, end in pairs)
        return _shared(cls(freq, tuple(sorted(intervals))))

    def with_early(self, steps: Iterable[int]) -> Schedule:
        added = {step for step in steps if step % self.freq and self._within(step)}
        return _shared(replace(self, early=tuple(sorted(added.union(self.early)))))

    def at(self, iteration: int) -> tuple[bool, int | None]:
        """Return whether an iteration is due, and the next due iteration, if any."""
        following = [step for step in self.early if step > iteration]
        for start, end in self.intervals:
            first = max(iteration + 1, start)
            candidate = first + -first % self.freq
            if candidate <= end:
                following.append(candidate)
                break
        return self._holds(iteration), min(following, default=None)

    def meets(self, other: Schedule) -> bool:
        if any(map(other._holds, self.early)) or any(map(self._holds, other.early)):
            return True
        both = math.lcm(self.freq, other.freq)
        for start, end in self.intervals:
            for other_start, other_end in other.intervals:
                first = max(start, other_start)
                if first + -first % both <= min(end, other_end):
                    return True
        return False

    def _within(self, iteration: int) -> bool:
        return any(start <= iteration <= end for start, end in self.intervals)

    def _holds(self, iteration: int) -> bool:
        return (iteration % self.freq == 0 and self._within(iteration)) or iteration in self.early

    def __str__(self) -> str:
        if self.freq == 1 and self.intervals == ((0, math.inf),):
            return "every step"
        parts = []
        for start, end in self.intervals:
            if math.isinf(end):
                parts.append(f"{start} on")
            elif start == end:
                parts.append(str(start))
            else:
                parts.append(f"{start} to {end:.0f}")
        text = f"steps {' and '.join(parts)}"
        if parts == ["0 on"]:
            text = "steps"
        elif parts == [str(self.intervals[0][0])] and self.freq == 1:
            text = f"step {parts[0]}"
        if self.freq > 1:
            text += f" that are multiples of {self.freq}"
        if self.early:
            text += f", and step{'s' * (len(self.early) > 1)} {', '.join(map(str, self.early))}"
        return text


@functools.lru_cache(maxsize=256)
def _shared(schedule: Schedule) -> Schedule:
    """Return the same object for equal schedules. Each is evaluated once per step."""
    return schedule


EVERY_STEP = _shared(Schedule())


def any_due(schedules: Iterable[Schedule], iteration: int) -> bool:
    return any(schedule.at(iteration)[0] for schedule in schedules)


@functools.lru_cache(maxsize=4)
def fingerprint(schedules: frozenset[Schedule]) -> int:
    """Return a hash below 2**52, equal in all processes for equal schedules."""
    text = repr(sorted((schedule.freq, schedule.intervals, schedule.early) for schedule in schedules))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12
