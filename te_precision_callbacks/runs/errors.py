"""Exceptions of the record store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.errors import PrecisionDebugError


class RunError(PrecisionDebugError, ValueError):
    """A recorded run cannot be read."""


class NotARunError(RunError): ...


class UnknownSubjectError(RunError):
    """A run has no values for the requested layer, tensor, statistic, GEMM, scope or rank."""


class SeveralRunsError(RunError):
    """A folder holds several runs, and the caller chose none.

    Attributes:
        runs: the names of the runs.
    """

    def __init__(self, message: str, runs: Sequence[str]) -> None:
        super().__init__(message)
        self.runs = tuple(runs)


_MOST_NAMES = 8


def it_has(name: str, known: Iterable[str]) -> str:
    """Return a sentence with known names for an error about an unknown one: all if few, else similar ones."""
    from difflib import get_close_matches

    names = list(known)
    near = names if len(names) <= _MOST_NAMES else get_close_matches(name, names, 3, 0.4) or names[:3]
    more = len(names) - len(near)
    listed = ", ".join(map(repr, near)) + (f" and {more} more" if more > 0 else "")
    return f" It has {listed}." if names else ""
