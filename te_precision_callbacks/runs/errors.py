"""The exceptions of the record store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.errors import PrecisionDebugError


class RunError(PrecisionDebugError, ValueError):
    """A recorded run cannot be read."""


class NotARunError(RunError):
    """There is no recorded run at a path."""


class UnknownSubjectError(RunError):
    """A run has nothing of a layer, tensor, statistic, GEMM, scope or rank that is asked for."""


class SeveralRunsError(RunError):
    """A folder holds several runs, and none of them was chosen.

    Attributes:
        runs: their names, the oldest first.
    """

    def __init__(self, message: str, runs: Sequence[str]) -> None:
        super().__init__(message)
        self.runs = tuple(runs)


_MOST_NAMES = 8
"""As many names as this are listed whole."""


def it_has(name: str, known: Iterable[str]) -> str:
    """What follows the message that there is nothing of a name: all names where they are few, else those like
    it, else some; a sentence."""
    from difflib import get_close_matches

    names = list(known)
    near = names if len(names) <= _MOST_NAMES else get_close_matches(name, names, 3, 0.4) or names[:3]
    more = len(names) - len(near)
    listed = ", ".join(map(repr, near)) + (f" and {more} more" if more > 0 else "")
    return f" It has {listed}." if names else ""
