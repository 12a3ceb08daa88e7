"""Failures in observation: reported once, loudly, and counted after that; raised with ``strict=True``."""

from __future__ import annotations

import logging

from te_precision_callbacks.session.errors import ObservationError

logger = logging.getLogger(__name__)


class ObservationFailures:
    """What went wrong while watching a run.

    Args:
        strict: raise the first failure as :class:`ObservationError` instead of reporting it.
        rank: named in the report.
    """

    def __init__(self, *, strict: bool, rank: int) -> None:
        self._strict = strict
        self._rank = rank
        self._count = 0

    def report(self, where: str, error: BaseException) -> None:
        """Take note of a failure; call it in an ``except`` block.

        Raises:
            ObservationError: with ``strict=True``.
        """
        if self._strict:
            raise ObservationError(f"{where}: {_text(error)}") from error
        self._count += 1
        if self._count == 1:
            logger.error(
                "Precision debugging failed on rank %d: %s: %s. Training goes on; what failed is missing in the"
                " statistics. Further failures are counted only. strict=True would end the run here.",
                self._rank,
                where,
                _text(error),
                exc_info=error,
            )

    def summarize(self) -> None:
        """Say at the end how many failures were only counted."""
        if self._count > 1:
            logger.error("Precision debugging failed %d times on rank %d.", self._count, self._rank)


def _text(error: BaseException) -> str:
    """The type and text of an error. Transformer Engine's asserts have no text; the type alone then says more."""
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} (without a message)"
