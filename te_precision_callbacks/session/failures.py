"""Failures in observation: each kind is reported once, then counted; with ``strict=True`` it raises."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed

from te_precision_callbacks.devices import is_lost, lost_in_words
from te_precision_callbacks.engine.quantization import QuantizationError
from te_precision_callbacks.errors import FeatureError
from te_precision_callbacks.session.errors import ObservationError

logger = logging.getLogger(__name__)

MOST_REPORTS = 20
"""The most kinds of failures that are reported; further ones are only counted."""


class ObservationFailures:
    """Collects the failures while observing a run.

    Args:
        strict: raise the first failure as :class:`ObservationError` instead of reporting it.
        rank: named in the report.
    """

    def __init__(self, *, strict: bool, rank: int) -> None:
        self._strict = strict
        self._rank = rank
        self._count = 0
        self._lost = False
        self._reported: set[tuple[object, ...]] = set()
        self.on_report: Callable[[str], None] | None = None
        """Called with the text of each failure that is reported."""

    def report(self, doing: str, of: str, error: BaseException) -> None:
        """Note a failure.

        Args:
            doing: what failed.
            of: the layer and tensor, the iteration, or another subject. Failures that differ only in ``of`` are of one
                kind.
            error: the exception.

        Raises:
            ObservationError: with ``strict=True``.
            RuntimeError: with ``strict=True``, the exception itself if the GPU is lost.

        A lost GPU is no failure of observation: it is said once, and the next operation of training raises it.
        """
        where = f"{doing} {of}"
        if is_lost(error):
            if self._strict:
                raise error
            if not self._lost:
                self._lost = True
                logger.warning("%s", lost_in_words(error, "Observation"))
            return
        if self._strict:
            raise ObservationError(f"{where}: {_text(error)}") from error
        kind = (doing, type(error), error.kind if isinstance(error, FeatureError) else str(error))
        known = kind in self._reported or len(self._reported) >= MOST_REPORTS
        if not known:
            self._reported.add(kind)
        if isinstance(error, QuantizationError):  # a statistic that the layer cannot have: nothing is broken
            if not known:
                text = str(error).removesuffix(".")
                logger.warning("%s cannot be observed: %s. Training goes on without it.", where, text)
            return
        self._count += 1
        if not known and self.on_report is not None:
            self.on_report(f"{where}: {_text(error)}")
        if not known and _is_lost_connection(error):
            logger.error(
                "%s: rank %d cannot reach the other ranks. One of them has probably ended: its own output says why. %s",
                where,
                self._rank,
                _text(error),
            )
        elif self._count == 1:
            logger.error(
                "Precision debugging failed on rank %d: %s: %s. Training goes on without what failed. The same failure"
                " is not reported again. strict=True would end the run here.",
                self._rank,
                where,
                _text(error).removesuffix("."),
                exc_info=error,
            )
        elif not known:
            logger.error(
                "Precision debugging also failed on rank %d: %s: %s.",
                self._rank,
                where,
                _text(error).removesuffix("."),
            )

    def summarize(self) -> None:
        """Log at the end how many failures were only counted."""
        if self._count > 1:
            logger.error("Precision debugging failed %d times on rank %d.", self._count, self._rank)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective lost its connection: NCCL has an exception for this, and gloo's text begins with its
    file."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _text(error: BaseException) -> str:
    """The type and text of an error. Transformer Engine's asserts have no text; the type alone then says more."""
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} (without a message)"
