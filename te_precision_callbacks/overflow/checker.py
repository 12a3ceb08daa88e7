"""Checks the recorded events, agrees with other ranks, and stops the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.ranks import is_distributed, is_initialized, own_rank
from te_precision_callbacks.base.ranks.messages import Messages, RanksLostError
from te_precision_callbacks.overflow.analysis import DetectedOverflow, Reader, advice_on_parameters
from te_precision_callbacks.overflow.errors import (
    AbortAfterBatch,
    ActivationOverflowError,
    DetectionFailedError,
    text_of,
)
from te_precision_callbacks.overflow.journal import DetectorOptions, Interval, Journal

logger = logging.getLogger(__name__)

MOST_SLOTS = 65_536
"""The number of slots after which a rank checks its frames alone, before the next forward.

If ranks stop together, an overflow found there waits for the next common check.
"""


class OverflowChecker:
    """Checks events and stops a run: the only part that waits for the device and other ranks, and that raises.

    Attributes:
        messages: the messages to the ranks that stop together; a session sets them, or the first common check opens
            them.
    """

    def __init__(
        self, roots: Sequence[tuple[str, torch.nn.Module]], options: DetectorOptions, journal: Journal
    ) -> None:
        self.reader = Reader(options)
        self.handles = contextlib.ExitStack()
        self.reports = 0
        self.has_looked = False
        self._roots = roots
        self._options = options
        self._journal = journal
        self._pending: DetectedOverflow | None = None
        self._dropped = 0  # events that this rank has checked alone since the last common check
        self.messages: Messages | None = None
        self._owns_messages = False

    def check(self, *, may_be_skipped: bool = True) -> None:
        """Check the training events since the last check; if ranks stop together, call this on all of them.

        Args:
            may_be_skipped: whether a GradScaler that has scaled the loss can still skip the step.
        """
        journal = self._journal
        if journal.closed or is_capturing():  # earlier events wait for the first check after the capture
            return
        self.has_looked = True
        together = self._is_collective()
        if not journal.due and (together or journal.failure is None):
            return
        messages = self._open_messages() if together else None
        try:
            journal.thread.current = None  # an interrupt may have left a call open
            journal.due = False
            find = self._look_at_training(may_be_skipped=may_be_skipped)
            if messages is not None:
                find = self._agree(find, messages)
        except BaseException as error:  # the other ranks must not wait for this one
            if messages is not None:
                messages.leave(error)
            raise
        self._stop_if(find)
        if journal.batches.is_over:
            self._abort()

    def _open_messages(self) -> Messages:
        """Return the messages to the ranks that stop together, which connect in their first common check."""
        if self.messages is None:
            self._owns_messages = True
            self.messages = Messages(self._options.process_group, "overflow")
            try:
                self.messages.open("to check for activation overflow")
            except RanksLostError as error:
                self._warn_disconnected(error)
        return self.messages

    def _agree(
        self, own: DetectedOverflow | DetectionFailedError | None, messages: Messages
    ) -> DetectedOverflow | DetectionFailedError | None:
        """Return the earliest overflow of all ranks, or else a failure of any rank."""
        if not messages.is_open:
            return own
        why = "to check for activation overflow. A rank may not have trained in this step"
        try:
            sent = (own.failure, own.rank) if isinstance(own, DetectionFailedError) else own
            entries = messages.pool([] if sent is None else [sent], "overflow", why, DetectedOverflow | tuple[str, int])
        except RanksLostError as error:
            self._warn_disconnected(error)
            return own
        finds = [entry for entry in entries if isinstance(entry, DetectedOverflow)]
        if finds:
            return min(finds, key=lambda find: find.sequence)
        failures = (entry for entry in entries if isinstance(entry, tuple))
        return next((DetectionFailedError(failure, rank=rank) for failure, rank in failures), None)

    def _warn_disconnected(self, error: RanksLostError) -> None:
        logger.warning(
            "Activation overflow: this rank checks alone from now on. %s. If it finds an overflow, only this rank"
            " stops, and the others wait until the timeout of their process group.",
            str(error).removesuffix("."),
        )

    def before_forward(self, *, is_root: bool, evaluation: bool) -> None:
        """Free slots before an outermost forward, and count the batch; see :meth:`Batches.begins`."""
        training = self._journal.training
        if training.slots.used >= MOST_SLOTS and not is_capturing():
            self._make_room()
        if self._journal.batches.begins(is_root=is_root, evaluation=evaluation):
            self.next_batch()

    def next_batch(self) -> None:
        if self._journal.batches.is_over:
            self._abort()
        self._journal.batches.next()

    def check_evaluation(self) -> None:
        batches = self._journal.batches
        if self._journal.closed:
            return
        batches.all_checked = batches.all_checked or not batches.trains
        find = self._look_at(self._journal.evaluation)
        if find is None and batches.trains and self._is_collective():
            return  # the next common check raises a failure
        self._stop_if(find or self._own_failure())
        if batches.is_over and not batches.trains:
            self._abort()

    def close(self, error: BaseException | None = None) -> None:
        journal = self._journal
        if journal.closed:
            return
        find = self._look_at_training()
        failure = journal.failure
        journal.closed = True
        self.handles.close()
        if self.messages is not None and self._owns_messages:
            self.messages.close()
        if error is None:
            self._stop_if(find)
        self._reset()
        if isinstance(find, DetectedOverflow):
            self.reports += 1
            logger.error(find.report)
        elif find is not None:
            logger.error("Activation overflow detection has failed (%s).", find.failure, exc_info=failure)

    def _is_collective(self) -> bool:
        return self._options.distributed and is_distributed(self._options.process_group)

    def _look_at_training(self, *, may_be_skipped: bool = True) -> DetectedOverflow | DetectionFailedError | None:
        find = self._look_at(self._journal.training, may_be_skipped=may_be_skipped)
        find = self._pending or find
        self._pending = None
        self._dropped = 0
        self._journal.batches.all_checked = True
        return find or self._own_failure()

    def _own_failure(self) -> DetectionFailedError | None:
        failure = self._journal.failure
        if failure is None:
            return None
        return DetectionFailedError(text_of(failure), rank=own_rank())

    def _make_room(self) -> None:
        """Check events to free the slots. If ranks stop together, an overflow is kept for the next common check."""
        events = len(self._journal.training.events)
        find = self._look_at(self._journal.training)
        if not self._is_collective():
            self._stop_if(find or self._own_failure())
        self._pending = self._pending or find
        self._dropped += events

    def _look_at(self, interval: Interval, *, may_be_skipped: bool = True) -> DetectedOverflow | None:
        journal = self._journal
        evaluation = interval is journal.evaluation
        try:
            return self.reader.read(
                interval,
                evaluation=evaluation,
                traces=not (evaluation and journal.batches.trains),
                may_be_skipped=may_be_skipped,
                before=self._dropped,
            )
        except Exception as error:
            journal.fail(error)
            return None
        finally:
            interval.clear()

    def _stop_if(self, find: DetectedOverflow | DetectionFailedError | None) -> None:
        if find is None:
            return
        if isinstance(find, DetectionFailedError):
            cause = self._journal.failure if find.rank == own_rank() else None
            self._reset()
            raise find from cause
        self.reports += 1
        advice = self._advice_on_parameters(find) or find.advice
        self._reset()
        if find.rank == own_rank():
            logger.error("%s", find.report)
        over = (f" ({find.step})" if find.step else "") + (f" on rank {find.rank}" if is_initialized() else "")
        raise ActivationOverflowError(
            f"{find.headline}, in {'evaluation ' if find.evaluation else ''}batch {find.batch}{over}. The report, in"
            f" the log and in the exception's 'report', has the frames before it. {advice}",
            path=find.path,
            class_name=find.class_name,
            role=find.role,
            batch=find.batch,
            evaluation=find.evaluation,
            rank=find.rank,
            report=find.report,
        )

    def _advice_on_parameters(self, find: DetectedOverflow) -> str:
        try:
            return advice_on_parameters(self._roots, find.path)
        except Exception as error:  # the overflow must still be reported
            logger.warning("Activation overflow: the parameters could not be checked (%s).", text_of(error))
            return ""

    def _abort(self) -> None:
        self.close()
        raise AbortAfterBatch(self._journal.batches.number)

    def _reset(self) -> None:
        self._journal.clear()
        self.reader.history.clear()
