"""Message exchange and common decisions of the ranks that reduce statistics together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.ranks.messages import Messages, Numbers, RanksLostError, Requests

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=Hashable)
ResultT = TypeVar("ResultT")


def leads(group: torch.distributed.ProcessGroup | None, *, reduce: bool) -> bool:
    return not (reduce and is_distributed(group)) or torch.distributed.get_rank(group) == 0


class Ranks:
    """The ranks that reduce their statistics together, or only this rank.

    They exchange messages from :meth:`meet` on. After a failure, each rank continues with local values.

    Args:
        report: called with failures; raises in a strict session.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None,
        *,
        reduce: bool,
        report: Report,
    ) -> None:
        self.messages: Messages | None = None
        self._group = group
        self._reduce = reduce
        self._report = report
        self._errors: tuple[type[PrecisionDebugError], ...] = ()
        self._several: bool | None = None  # within together()

    @property
    def several(self) -> bool:
        """Return whether there are other ranks; the process group may be created after the start of a session."""
        if self._several is None:
            return self._reduce and is_distributed(self._group)
        return self._several

    @property
    def size(self) -> int:
        if self.several:
            return torch.distributed.get_world_size(self._group)
        return 1

    @property
    def are_connected(self) -> bool:
        return self.messages is not None and self.messages.is_open

    @property
    def leads(self) -> bool:
        """Return whether this rank writes and logs for all ranks; without reduction, each rank does."""
        return leads(self._group, reduce=self._reduce)

    # ------------------------------------------------------------------ connecting and leaving

    def meet(self) -> None:
        if not self.several:
            return
        try:
            if self.messages is None:
                self.messages = Messages(self._group, "session")
            self.messages.open("to attach a session")
        except RanksLostError as error:
            self._handle_lost_ranks("meeting", error)
        except Exception as error:  # this rank has not announced itself yet
            self.messages = self.messages or Messages(self._group, "session")
            self.messages.decline(error)
            self._report("meeting", "together with the other ranks", error)

    @contextmanager
    def together(
        self, doing: str, *errors: type[PrecisionDebugError], agree: bool, on_all: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Surround code that all ranks run. A rank that fails leaves the others, so that they do not wait for it.

        Args:
            doing: the action, for messages.
            errors: exception classes that the other ranks may raise: the class of the failure, or else the first one.
            agree: whether all ranks raise if one of them fails.
            on_all: exceptions that all ranks raise anyway.
        """
        self._errors = errors if agree else ()
        self._several = self.several
        try:
            yield
            if agree:
                self._agree(doing)
        except on_all:
            raise
        except BaseException as failure:
            self.leave(failure, raises=agree)
            raise
        finally:
            self._errors = ()
            self._several = None

    def _agree(self, doing: str) -> None:
        """Raise if another rank failed. A failure of the exchange itself is only reported: no other rank raises it."""
        try:
            self.any("agreement", doing, own=False)
        except PrecisionDebugError:  # another rank failed
            raise
        except Exception as failure:
            self.leave(failure)
            self._report(doing, "together with the other ranks", failure)

    def leave(self, error: BaseException, *, raises: bool = False) -> None:
        if self.messages is not None:
            self.messages.leave(error, raises=raises)

    def settle(self) -> None:
        """Prepare for the steps of training. A failure is only reported, since no other rank would raise it."""
        if self.messages is None:
            return
        try:
            self.messages.settle()
        except Exception as error:
            self.leave(error)
            self._report("settling", "together with the other ranks", error)

    def reconnect(self, iteration: int, optimizer_steps: int) -> int | None:
        if self.messages is None or self.messages.is_open:
            return None
        rejoined = self.messages.tick(iteration, optimizer_steps)
        if rejoined is not None and self.leads:
            logger.warning("The ranks are connected again: statistics are reduced from iteration %d on.", rejoined)
        return rejoined

    def end(self) -> None:
        if self.messages is not None:
            self.messages.close()

    def _handle_lost_ranks(self, doing: str, error: RanksLostError) -> None:
        departure = error.departure
        if departure.raises and self._errors:
            kind = next((error for error in self._errors if error.__name__ == departure.kind), self._errors[0])
            raise kind(f"On rank {departure.rank}: {departure.text}") from None
        self._report(doing, "together with the other ranks", error)

    # ------------------------------------------------------------------ exchanges

    def pool(self, entries: Iterable[Entry], kind: str, entry_type: Any) -> list[Entry]:
        """Return the entries of all ranks, without duplicates; ``kind`` must be equal on all ranks."""
        rank_entries = list(entries)
        return self._exchange(
            f"exchanging {kind}",
            lambda messages: messages.pool(rank_entries, kind, f"to broadcast {kind}", entry_type),
            rank_entries,
        )

    def merge(self, numbers: Numbers, kind: str, sums: int = 0) -> Numbers | None:
        """Return the sums of the first numbers over all ranks, and the maxima of the others.

        None without other ranks, or if they disconnect.
        """
        merged = numbers.copy()

        def exchange(messages: Messages) -> Numbers:
            messages.merge(kind, f"to compare {kind}", merged, sums)
            return merged

        return self._exchange(f"comparing {kind}", exchange, None)

    def any(self, kind: str, doing: str, *, own: bool) -> bool:
        return self._exchange(doing, lambda messages: messages.largest(kind, f"in {doing}", own) == 1, own)

    def _exchange(self, doing: str, exchange: Callable[[Messages], ResultT], alone_result: ResultT) -> ResultT:
        if self.messages is None or not self.messages.is_open:
            return alone_result
        try:
            return exchange(self.messages)
        except RanksLostError as error:
            self._handle_lost_ranks(doing, error)
            return alone_result

    def check_connected(self) -> bool:
        self.any("agreement", "checking", own=False)
        return not self.several or self.are_connected

    @property
    def requested(self) -> Requests:
        """The requests of all ranks in this step, combined; none without a message."""
        return (self.messages and self.messages.requested) or Requests()

    def request(self, **requests: bool) -> None:
        """Set fields of :class:`Requests`, which are sent with the values of this step."""
        if self.messages is not None:
            self.messages.requests = self.messages.requests._replace(**requests)
            self.messages.requested = None

    def check_requested(self, *, send: bool) -> bool:
        """Return whether a rank requests a check. In a step without values, ``send`` sends an extra message."""
        messages = self.messages
        if send and messages is not None and messages.is_open and messages.requested is None:
            check = self.any("notes", "to check whether precision has changed", own=messages.requests.check)
            messages.requested = Requests(check=check)
        return self.are_connected and self.requested.check

    def request_stop(self, *, own: bool) -> bool:
        """Return whether a rank requests it. A request is sent with the next values, so all get it in the same step."""
        if not self.several:
            return own
        is_requested = self.are_connected and self.requested.stop
        self.request(stop=own)
        return is_requested

    def differing(self, numbers: Sequence[int], kind: str) -> dict[int, tuple[int, ...]]:
        """Return rank -> numbers if the ranks differ, else an empty mapping."""
        why = f"to compare {kind}"

        def by_rank(messages: Messages) -> dict[int, tuple[int, ...]]:
            if len(messages.pool([tuple(numbers)], kind, why, tuple[int, ...])) == 1:
                return {}
            return messages.by_rank(numbers, f"{kind} by rank", why)

        return self._exchange(f"comparing {kind}", by_rank, {})
