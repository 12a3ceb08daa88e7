"""The exceptions of the record store."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.errors import PrecisionDebugError


class RunError(PrecisionDebugError, ValueError):
    """A recorded run cannot be read."""


class NotARunError(RunError):
    """There is no recorded run at a path."""


class SeveralRunsError(RunError):
    """A folder holds several runs, and none of them was chosen.

    Attributes:
        runs: their names, the oldest first.
    """

    def __init__(self, message: str, runs: Sequence[str]) -> None:
        super().__init__(message)
        self.runs = tuple(runs)
