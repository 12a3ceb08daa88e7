"""Facts that hold for spans of iterations."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from te_precision_callbacks.base.errors import PrecisionDebugError


class IterationError(PrecisionDebugError, LookupError): ...


def whole_number(value: object) -> int | None:
    """Convert a Python or numpy integer; None for anything else, including bool."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor or an array that is not an integer
        return None


class Iterations:
    """The iterations that have run, as spans: those before a resume that skips some, and those after it."""

    def __init__(self) -> None:
        self._ran: list[list[int]] = []  # first and last of each span

    def __contains__(self, iteration: object) -> bool:
        number = whole_number(iteration)
        return number is not None and any(first <= number <= last for first, last in self._ran)

    @property
    def first(self) -> int | None:
        if self._ran:
            return self._ran[0][0]
        return None

    @property
    def last(self) -> int | None:
        if self._ran:
            return self._ran[-1][1]
        return None

    def ran(self, iteration: int) -> bool:
        """Record that an iteration has run; return whether this dropped later iterations, as after a resume."""
        returned = bool(self._ran) and iteration < self._ran[-1][1]
        if returned:
            self._ran = [[first, min(last, iteration - 1)] for first, last in self._ran if first < iteration]
        if self._ran and iteration - self._ran[-1][1] in (0, 1):
            self._ran[-1][1] = iteration
        else:
            self._ran.append([iteration, iteration])
        return returned

    def require(self, what: str, iteration: int) -> None:
        if iteration not in self:
            observed = "No iteration has run yet."
            if self._ran:
                spans = (str(first) if first == last else f"{first} to {last}" for first, last in self._ran)
                observed = f"Observed: {', '.join(spans)}."
            raise IterationError(f"{what}(at={iteration!r}): this session did not observe that iteration. {observed}")
