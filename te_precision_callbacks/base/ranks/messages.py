"""Messages among the ranks of a run.

A message starts with a header of fixed size, which contains values and their negatives, and is reduced by maximum. If
kinds and sizes are equal on all ranks, the payload follows: values are summed, or reduced by maximum; texts that differ
are gathered on rank 0, which broadcasts their union. A text has a line of JSON for each entry: nothing is unpickled.

A rank that fails writes the reason into the store, and closes its group. The other ranks detect this in their current
or next message, and leave too. If a rank hangs, the others leave after a timeout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from pydantic import TypeAdapter

from te_precision_callbacks.base.errors import PrecisionDebugError, ReductionError
from te_precision_callbacks.base.ranks import format_ranks, has_other_ranks, meeting
from te_precision_callbacks.base.ranks.group import Group
from te_precision_callbacks.base.ranks.meeting import (
    MeetingFailed,
    RankPlace,
    meet,
    next_keys,
    prefixed_store,
    refuse,
    shared_store,
)

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=Hashable)
Numbers = npt.NDArray[np.float64]

EXCHANGING = 60.0
"""Timeout in seconds of a message, except in the first step."""

FIRST_STEP = 300.0
"""Maximum timeout of messages in the first step, in which some ranks may compile. A rank that skips its first
``step()`` blocks the others for this time, once."""

RECONNECTING = 10.0
"""Timeout for connecting during training."""

POLLING = 8
MOST_RETURNS = 5
"""Interval, in steps, at which disconnected ranks look for each other, and maximum number of reconnections. Ranks are
connected again 26 to 34 steps after they were disconnected."""

_HEADER = 9
"""Length of the header: kind, number of sums, number of maxima, hash of the text; their negatives; length of the text.
"""

_HEADER_MAXIMA = 500
"""Number of maxima that are sent with the header, so that a small message needs only one reduction."""

_LEFT = "left"
_WAITS = "waits"
"""Keys in the store: why a rank has left, and the number of the message in which a rank waits."""

_LONGEST_TEXT = 4000


@dataclass(frozen=True)
class Departure:
    """The reason why a rank has left.

    Attributes:
        rank: its rank in the run.
        kind: the class name of the rank's exception, if any.
        raises: whether the rank raises this exception to its caller, so that all ranks should raise it.
    """

    rank: int
    text: str
    kind: str = ""
    raises: bool = False

    def __str__(self) -> str:
        if self.kind:
            return f"Rank {self.rank} has failed: {self.text}"
        return self.text


class Requests(NamedTuple):
    """Requests of a rank to all ranks, sent with the values of a step.

    Attributes:
        check: check the contract.
        stop: stop the run.
        losses: send the training losses to rank 0.
        origins: send where inf and nan began.
    """

    check: bool = False
    stop: bool = False
    losses: bool = False
    origins: bool = False


class RanksLostError(ReductionError):
    """The ranks no longer exchange messages; ``departure`` is the first rank's departure, if known."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(str(departure))
        self.departure = departure


class Messages:
    """Messages among the ranks of a group. All ranks must make the same calls in the same order.

    Nothing is sent before :meth:`open`, or after a rank has left.

    Args:
        group: the training's process group with these ranks; None for all ranks. Messages are not sent over it.
        purpose: identifies these messages on all ranks.

    Attributes:
        rank: this rank in the group.
        meetings: how often the ranks have connected.
        departure: why the ranks are disconnected.
        requests: this rank's requests.
        requested: the requests of all ranks in this step, combined; None without a message.
        timeout: the timeout of a message in seconds.
    """

    def __init__(self, group: dist.ProcessGroup | None, purpose: str) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self.meetings = 0
        self._ranks = range(size) if group is None else dist.get_process_group_ranks(group)
        self._rank_in_run = self._ranks[self.rank]
        self._who = f"Rank {self._rank_in_run}"
        self.departure = Departure(self._rank_in_run, "the ranks are not connected yet")
        self.requests = Requests()
        self.requested: Requests | None = None
        self._purpose = purpose
        self._at = RankPlace(self.rank, size, f"rank {self._rank_in_run}")
        self._group: Group | None = None
        self._keys: Any = None
        self._count = 0
        self.timeout = EXCHANGING
        self._reconnection: _Reconnection | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    # ------------------------------------------------------------------ connecting and leaving

    def open(self, why: str) -> None:
        """Connect to the other ranks. All ranks must call this.

        Args:
            why: the purpose, for a warning: "to attach a session".

        Raises:
            RanksLostError: the ranks could not connect, and stay disconnected.
        """
        keys: Any = None
        try:
            self.close()
            self._reconnection = None
            if not has_other_ranks(self.group):
                raise MeetingFailed("the process group is fake, so there are no other ranks")
            wait = _meeting_timeout(self.group)
            keys = self._new_meeting()
            self._connect(keys, wait, why)
            self.timeout = min(max(wait, EXCHANGING), FIRST_STEP)
        except BaseException as error:
            self.decline(error, keys)
            if not isinstance(error, Exception):
                raise
            self.part(f"The ranks could not connect: {_reason(error)}")  # all ranks must raise
            raise RanksLostError(self.departure) from error

    def decline(self, error: BaseException, keys: Any = None) -> None:
        """Refuse to connect because of a failure; ``keys`` are the keys of the meeting, if it has begun."""
        reason = _reason(error)
        rank_reason = reason if isinstance(error, MeetingFailed) else f"{self._at.name} has failed ({reason})"
        with contextlib.suppress(Exception):
            refuse(self._new_meeting() if keys is None else keys, rank_reason)

    def _new_meeting(self) -> Any:
        group = "all" if self.group is None else "-".join(map(str, self._ranks))
        return next_keys(shared_store(f"te_precision_callbacks/{self._purpose}/{group}"), self.rank)

    def settle(self) -> None:
        """Allow reconnecting, and use a shorter timeout after the next message, which may wait for compilation."""
        if self._group is not None:
            self._reconnection = _Reconnection(self._keys)

    def _connect(self, keys: Any, wait: float, why: str) -> None:
        self._group = meet(keys, self._at, wait, why)
        self._keys = keys
        self._count = 0
        self.meetings += 1

    def leave(self, error: BaseException, *, raises: bool = False) -> None:
        """Leave the group because of a failure, so that the other ranks leave too.

        Args:
            raises: see :class:`Departure`.
        """
        if self._group is not None:
            rank_reason = str(error) if isinstance(error, PrecisionDebugError) else _reason(error)
            self.part(rank_reason, type(error).__name__, raises=raises)

    def part(self, why: str, kind: str = "", *, raises: bool = False, for_good: bool = False) -> None:
        """Leave the group; see :class:`Departure`.

        Args:
            for_good: never reconnect.
        """
        self._leave(Departure(self._rank_in_run, why, kind, raises))
        if for_good:
            self._reconnection = None

    def _leave(self, departure: Departure) -> None:
        self.departure = departure
        self._close(departure)
        if self._reconnection is not None:
            self._reconnection.put_off()

    def close(self) -> None:
        self._close(Departure(self._rank_in_run, f"{self._who} has ended its session"))

    def _close(self, departure: Departure) -> None:
        group = self._group
        self._group = None
        if group is None:
            return
        try:
            if group.is_whole:  # this rank is the first to leave; after another rank, the store may be gone
                self._keys.set(_LEFT, json.dumps(asdict(departure) | {"text": departure.text[:_LONGEST_TEXT]}))
        except Exception as error:
            logger.info("%s cannot report why it left: %s.", self._who, _reason(error))
        finally:
            group.close()

    # ------------------------------------------------------------------ messages

    def merge(self, kind: str, why: str, numbers: Numbers, sums: int, text: bytes = b"") -> bytes:
        """Reduce values over the ranks, in place, and return the union of the lines of their texts.

        Args:
            kind: the kind of message, equal on all ranks.
            why: the purpose, for a warning: "to reduce statistics".
            numbers: a contiguous array.
            sums: number of leading values that are summed; the others are reduced by maximum.

        Raises:
            RanksLostError: the ranks are disconnected.
        """
        group = self._group
        if group is None:
            raise RanksLostError(self.departure)
        self._count += 1
        try:
            finish = functools.partial(group.finish, functools.partial(next, self._wait(why)))
            union = _exchange(group, finish, kind, numbers, sums, text)
            if self._reconnection is not None:
                self.timeout = EXCHANGING
            return union
        except _OutOfStep as error:
            self.part(str(error))
            raise RanksLostError(self.departure) from error
        except Exception as error:
            if type(error) is RuntimeError or isinstance(error, dist.DistError):  # from gloo or the store
                self._leave(self._departure_of_another(error))
            else:  # this rank failed
                self.leave(error)
            raise RanksLostError(self.departure) from error
        except BaseException as error:
            self.leave(error)
            raise

    def _wait(self, why: str) -> Iterator[None]:
        """Warn once which ranks are late, and end the wait for a message when one has left or failed.

        Each step of the iterator is a check, and may raise _OutOfStep.
        """
        begun = time.monotonic()
        count = str(self._count)
        patience = min(meeting.WAITING, self.timeout)
        while time.monotonic() - begun < patience / 2:
            yield
        self._keys.set(f"{_WAITS}/{self.rank}", count)
        while time.monotonic() - begun < patience:
            yield
        if self.rank <= 1 and patience < self.timeout:
            logger.warning("%s has waited %g s for %s, %s.", self._who, patience, self._late_ranks(count), why)
        while time.monotonic() - begun < self.timeout:
            yield
        raise _OutOfStep(f"{self._who} has waited {self.timeout:g} s for {self._late_ranks(count)}, {why}")

    def _late_ranks(self, count: str) -> str:
        """Format the ranks that are late. Only two ranks query the store, since this takes a request per rank."""
        late = []
        for rank, in_run in enumerate(self._ranks if self.rank <= 1 else ()):
            key = f"{_WAITS}/{rank}"
            if not (self._keys.check([key]) and self._keys.get(key).decode() == count):
                late.append(in_run)
        if late:
            return format_ranks(sorted(late))
        return "other ranks"

    def largest(self, kind: str, why: str, number: float) -> float:
        """Return the maximum over the ranks; exact for integers up to 2**53."""
        maximum = np.array([number], np.float64)
        self.merge(kind, why, maximum, 0)
        return float(maximum[0])

    def pool(self, entries: Iterable[Entry], kind: str, why: str, entry_type: Any) -> list[Entry]:
        """Return the union of all ranks' entries, lower ranks first; ``of`` is their type, which pydantic parses."""
        adapter = _adapter(entry_type)
        # inf and nan are in the notation of Python's json
        lines = dict.fromkeys(json.dumps(adapter.dump_python(entry, mode="json")) for entry in entries)
        union = self.merge(kind, why, np.empty(0), 0, "\n".join(lines).encode())
        return [adapter.validate_python(json.loads(line)) for line in union.splitlines()]

    def by_rank(self, numbers: Sequence[int], kind: str, why: str) -> dict[int, tuple[int, ...]]:
        """Return global rank -> numbers; only for error messages, since the message grows with the number of ranks."""
        rank_entry = self._rank_in_run, tuple(numbers)
        return dict(sorted(self.pool([rank_entry], kind, why, tuple[int, tuple[int, ...]])))

    def _departure_of_another(self, error: Exception) -> Departure:
        try:
            if self._keys.check([_LEFT]):
                return Departure(**json.loads(self._keys.get(_LEFT)))
        except Exception as failure:  # of the store, which may be gone with the rank
            logger.info("It is unknown why a rank left: %s.", _reason(failure))
        line = str(error).partition("\n")[0]
        why = line.partition("]")[2].partition(". This is")[0].strip() or line
        return Departure(self._rank_in_run, f"A rank is no longer reachable: {why}")

    # ------------------------------------------------------------------ reconnecting

    def tick(self, iteration: int, optimizer_steps: int) -> int | None:
        """Try to reconnect at the end of a step, while the ranks are disconnected; costs almost nothing.

        Ranks announce in the store that they are ready. The last one sets the step to connect in: a number of optimizer
        steps if all ranks count them equally, otherwise an iteration.

        Args:
            iteration: the next iteration.
            optimizer_steps: number of optimizer steps on this rank; negative if ranks do not count them equally.

        Returns:
            The largest iteration of all ranks, if they have reconnected; otherwise None.
        """
        attempts = self._reconnection
        if self._group is not None or attempts is None:
            return None
        try:
            if not attempts.is_time(self._at, iteration, optimizer_steps):
                return None
            self._connect(attempts.keys_of_attempt(), RECONNECTING, "to reconnect")
        except Exception as error:  # the store may be gone, or a rank
            self.decline(error, attempts.keys_of_attempt())
            logger.info("%s could not reconnect to the other ranks: %s.", self._who, _reason(error))
            self.part(_reason(error))
            return None
        self.timeout = RECONNECTING  # of the first message
        with contextlib.suppress(RanksLostError):
            return int(self.largest("again", "to continue together", iteration))
        return None


class _Reconnection:
    """Time and keys of the next attempt of the ranks to connect after messages have failed."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys  # of the last meeting
        self._attempt = 0
        self._ready_at: int | None = None
        self._is_ready = False
        self._polled = -1
        self._meets: tuple[bool, int] | None = None

    def keys_of_attempt(self) -> Any:
        return prefixed_store(f"again/{self._attempt}", self._keys)

    def put_off(self) -> None:
        self._attempt += 1  # the interval doubles
        self._ready_at = None
        self._meets = None
        self._is_ready = False

    def is_time(self, rank_place: RankPlace, iteration: int, optimizer_steps: int) -> bool:
        clock = iteration if optimizer_steps < 0 else optimizer_steps
        if self._attempt > MOST_RETURNS:
            return False
        if self._ready_at is None:
            self._ready_at = clock + POLLING * 2**self._attempt
        if self._meets is not None:
            by_iteration, when = self._meets
            return (iteration if by_iteration else optimizer_steps) >= when
        if clock // POLLING == self._polled or clock < self._ready_at:
            return False
        self._polled = clock // POLLING
        keys = self.keys_of_attempt()
        if not self._is_ready:
            if optimizer_steps < 0:
                keys.set("by_iteration", "")
            self._is_ready = True
            if keys.add("ready", 1) == rank_place.size:
                by_iteration = keys.check(["by_iteration"])
                when = (iteration if by_iteration else optimizer_steps) + POLLING + 2  # all ranks poll before then
                keys.set("when", f"{int(by_iteration)} {when}")
        if keys.check(["when"]):
            which, when = map(int, keys.get("when").split())
            self._meets = bool(which), when
            if (iteration if which else optimizer_steps) > when:
                raise MeetingFailed("this rank is ahead of the others")
        return False


def _reason(error: BaseException) -> str:
    text = str(error).partition("\n")[0].removesuffix(".")
    if isinstance(error, (MeetingFailed, RanksLostError)):
        return text
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


@functools.cache
def _adapter(entry_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(entry_type)


class _OutOfStep(Exception):
    """Other ranks are late, or send another message."""


def _exchange(group: Group, finish: Callable[[], None], kind: str, numbers: Numbers, sums: int, text: bytes) -> bytes:
    maxima = numbers[sums:]
    # nan is the largest, since gloo's maximum may drop a nan.
    ranked = _in_order(np.where(np.isnan(maxima), np.nan, maxima).view(np.int64))
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    equal = zlib.crc32(kind.encode()), sums, ranked.size, digest
    header = np.zeros(_HEADER + _HEADER_MAXIMA, np.int64)
    header[:_HEADER] = *equal, *(-number for number in equal), len(text)
    header[_HEADER : _HEADER + ranked.size] = ranked[:_HEADER_MAXIMA]
    group.reduce(header, dist.ReduceOp.MAX)
    finish()
    is_equal = header[: len(equal)] == -header[len(equal) : 2 * len(equal)]
    if not is_equal[:-1].all():
        raise _OutOfStep(
            "The ranks are at different points of the training. Call step() on all ranks, after the same optimizer"
            " steps"
        )
    if sums:
        group.reduce(numbers[:sums], dist.ReduceOp.SUM)
    if ranked.size > _HEADER_MAXIMA:
        group.reduce(ranked[_HEADER_MAXIMA:], dist.ReduceOp.MAX)
    finish()
    ranked[:_HEADER_MAXIMA] = header[_HEADER : _HEADER + ranked.size]
    numbers[sums:] = _in_order(ranked).view(np.float64)
    if is_equal[-1]:
        return text
    padded = text.ljust(int(header[_HEADER - 1]), b"\n")
    gathered = group.gather(np.frombuffer(padded, np.uint8).copy())
    finish()
    lines = itertools.chain.from_iterable(array.tobytes().splitlines() for array in gathered)
    union = b"\n".join(dict.fromkeys(filter(None, lines)))
    size = np.array([len(union)])
    group.broadcast(size)
    finish()
    shared = np.frombuffer(union.ljust(int(size[0])), np.uint8).copy()
    group.broadcast(shared)
    finish()
    return shared.tobytes()


def _in_order(bits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Map the bits of floats to integers in the same order, and these integers back."""
    return bits ^ ((bits >> 63) & np.iinfo(np.int64).max)


def _meeting_timeout(group: dist.ProcessGroup | None) -> float:
    """Return the timeout of a meeting in seconds: half of the timeout of the training's process group.

    Ranks load a model at different speeds. A rank in a collective of the training, which waits for a rank in this
    meeting, must not time out first.
    """
    try:
        training: Any = dist.group.WORLD if group is None else group
        timeouts = [training._get_backend(device).options._timeout for device in training._device_types]
        return float(min(timeouts).total_seconds()) / 2
    except (RuntimeError, AttributeError, ValueError):  # a backend without options
        return timedelta(minutes=5).total_seconds()
