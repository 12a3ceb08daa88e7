"""Failures of observation: each kind is reported once, then counted; with ``strict=True`` it raises."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.base.devices import is_lost, lost_message
from te_precision_callbacks.base.errors import (
    FeatureError,
    ObservationError,
    QuantizationError,
    RaisedInTraining,
    ReductionError,
)
from te_precision_callbacks.base.ranks.group import INTERFACE

logger = logging.getLogger(__name__)

Report = Callable[[str, str, Exception], None]
"""Gets what failed, of which subject, and the exception."""

MAX_REPORTS = 20
"""Maximum number of kinds of failures reported; further kinds are only counted."""


@dataclass(frozen=True)
class Guard:
    """Gives an exception of the block to a function, and goes on after it; no generator, for use in each module.

    Attributes:
        raised: the exceptions that leave the block.
    """

    fail: Callable[[Exception], None]
    raised: type[Exception] | tuple[type[Exception], ...] = RaisedInTraining

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self.raised):
            return False
        self.fail(error)
        return True


class ObservationFailures:
    """Failures of a run.

    Args:
        strict: raise the first failure as :class:`ObservationError`.
        leads: whether this rank logs for all ranks that reduce statistics together.

    Attributes:
        lost_folder: a log folder that is not writable.
    """

    def __init__(self, *, strict: bool, rank: int, leads: Callable[[], bool] = lambda: True) -> None:
        self.iteration = 0
        self._strict = strict
        self._rank = rank
        self._leads = leads
        self._count = 0
        self._lost = False
        self.lost_folder: Path | None = None
        self._lost_by: OSError | None = None  # until reported
        self._reported: set[tuple[object, ...]] = set()
        self._new: list[tuple[int, str]] = []

    def take(self) -> list[tuple[int, str]]:
        new = self._new
        self._new = []
        return new

    def guard(self, operation: str, subject: str) -> Guard:
        """Report an exception of the block, as :meth:`report` does, and go on after it. Not for what runs per GEMM."""
        return Guard(functools.partial(self.report, operation, subject))

    def report(self, operation: str, subject: str, error: BaseException) -> None:
        """Report a failure.

        A lost GPU is reported once; the next operation of training raises it.

        Args:
            operation: the operation that failed.
            subject: the layer and tensor, the iteration, or another object of the operation. Failures that differ only
                in their subject are of one kind.

        Raises:
            ObservationError: with ``strict=True``.
            RuntimeError: with ``strict=True``, the exception itself if the GPU is lost.
        """
        where = f"{operation} {subject}"
        if self.lost_folder is not None and _concerns_folder(self.lost_folder, error):
            self._report_lost_folder()
            return
        if is_lost(error):
            if self._strict:
                raise error
            if not self._lost:
                self._lost = True
                logger.warning("%s", lost_message(error, "Observation"))
            return
        if self._strict:
            raise ObservationError(f"{where}: {_format_error(error)}") from error
        kind = (operation, type(error), error.kind if isinstance(error, FeatureError) else _format_error(error))
        is_known = kind in self._reported or len(self._reported) >= MAX_REPORTS
        if not is_known:
            self._reported.add(kind)
        if isinstance(error, QuantizationError):  # a statistic that the layer cannot have
            if not is_known:
                text = str(error).removesuffix(".")
                logger.warning("%s cannot be observed: %s. Training continues without it.", where, text)
            return
        self._count += 1
        if not is_known:
            self._new.append((self.iteration, f"{where}: {_format_error(error)}"))
        if isinstance(error, ReductionError):
            if not is_known:
                self._report_disconnected(where, error)
        elif self._count == 1 or not is_known:
            # If the operating system refused to read or write, a traceback does not explain that.
            is_of_disk = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            logger.error(
                "Precision debugging failed on rank %d: %s: %s. Training continues without this part. This failure"
                " is reported once; strict=True raises it.",
                self._rank,
                where,
                _format_error(error).removesuffix("."),
                exc_info=error if self._count == 1 and not is_of_disk else None,
            )

    def lose_folder(self, folder: Path, error: OSError) -> None:
        """Report once that a log folder is not writable: on rank 0 now, on other ranks when they fail to write."""
        self.lost_folder = folder.absolute()
        self._lost_by = error
        if self._rank == 0:
            self._report_lost_folder()

    def _report_lost_folder(self) -> None:
        error = self._lost_by
        self._lost_by = None
        if error is not None:
            logger.error(
                "log_dir=%r cannot be written to: %s. Training continues, but rank %d writes no records, logs, dumps"
                " or report; loggers and sinks still get values. Set log_dir= to a writable folder.",
                str(self.lost_folder),
                error,
                self._rank,
            )

    def _report_disconnected(self, where: str, error: BaseException) -> None:
        text = str(error).removesuffix(".")
        if self._leads():
            logger.error(
                "The ranks no longer exchange statistics (%s): %s. Training continues; until the ranks reconnect,"
                " only rank %d writes values, marked as local. Call step() on all ranks after the same optimizer"
                " steps. If ranks cannot connect, set %s=<network interface>.",
                where,
                text,
                self._rank,
                INTERFACE,
            )
        else:
            logger.info("%s: %s.", where, text)

    def summarize(self) -> None:
        if self._count > 1:
            logger.error("Precision debugging failed %d times on rank %d.", self._count, self._rank)


def _concerns_folder(folder: Path, error: BaseException | None) -> bool:
    """Return whether an error's path is in the folder, or is one of its parents."""
    while error is not None:
        if isinstance(error, OSError) and isinstance(error.filename, (str, Path)):
            cause = Path(error.filename).absolute()
            return cause.is_relative_to(folder) or folder.is_relative_to(cause)
        error = error.__cause__
    return False


def _format_error(error: BaseException) -> str:
    """Transformer Engine's asserts have no text."""
    try:
        text = str(error)
    except Exception:  # of a feature or sink: it must not end training
        text = ""
    if text:
        return f"{type(error).__name__}: {text}"
    return f"{type(error).__name__} (without a message)"
