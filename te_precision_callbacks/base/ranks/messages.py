"""The messages among the ranks of a run: opened on all of them, closed at its end.

A message begins with a header of fixed size, reduced by the maximum together with its negative: so all ranks see
whether they are at the same message, with numbers of the same sizes and with equal texts. If not, nobody sends
anything more. Numbers are then added, or merged by the maximum. Texts that differ are gathered on rank 0, and its
union is broadcast. They are JSON: nothing that arrives is unpickled.

A rank on which anything fails leaves: it writes the reason into the store and closes its group. The others notice
that in their current or next message, read the reason, and leave too. So nobody waits for a rank that is alive and has
failed. A rank that is silent costs the others a timeout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from pydantic import TypeAdapter

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.ranks import meeting, ranks_in_words
from te_precision_callbacks.base.ranks.group import Group
from te_precision_callbacks.base.ranks.meeting import Meeting, MeetingFailed, Place, below, connect, shared_store

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=Hashable)
Numbers = npt.NDArray[np.float64]

EXCHANGING = 60.0
"""The seconds that a rank waits for the others in a message of a step, but for the first one."""

FIRST_STEP = 300.0
"""The most seconds that a rank waits for the others in the messages of the first step, in which some compile. A rank
that leaves out its first ``step()`` holds the others up for as long, once."""

CONNECTING = 15.0
"""The seconds in which ranks that have met must connect."""

RECONNECTING = 10.0
"""The same for ranks that meet again, in the middle of training."""

POLLING, MOST_RETURNS = 8, 5
"""After how many steps ranks that are apart look for the others, and how often they meet again at most. With these they
are together again 26 to 34 steps after they parted."""

_HEADER = 9
"""Numbers in the header of a message: what it is, how many numbers are added, and merged by the maximum, and a hash of
the text; the same negated; and the length of the text."""

_ROOM = 500
"""Maxima that travel with the header, so that a small message is one reduction."""

_LEFT, _WAITS = "left", "waits"
"""Keys in the store: why a rank has left, and in which message a rank waits."""

_LONGEST_TEXT = 4000
"""Characters of the reason why a rank has left."""


@dataclass(frozen=True)
class Departure:
    """Why a rank has left.

    Attributes:
        rank: which one, in the group.
        text: the reason.
        kind: the name of the class of its exception; empty if it has none.
        raises: whether its caller gets the exception, so that those of all ranks should.
    """

    rank: int
    text: str
    kind: str = ""
    raises: bool = False


class RanksLostError(PrecisionDebugError, RuntimeError):
    """The ranks exchange no messages any more.

    Attributes:
        departure: of the rank that was the first to leave, as far as it is known.
    """

    def __init__(self, departure: Departure, message: str = "") -> None:
        super().__init__(message or departure.text)
        self.departure = departure


class Messages:
    """The messages of this rank to the others of a group. All ranks must make the same calls in the same order.

    While the ranks are apart, before :meth:`open` and after any of them has left, nothing is sent.

    Args:
        group: the process group of the training that has these ranks; None for all. Nothing is sent on it.
        purpose: which messages of a process these are, equal on all ranks: each has its own meeting.

    Attributes:
        rank, size: this rank's number in the group, and how many ranks it has.
        meetings: how often the ranks have met.
        departure: why the ranks are apart.
        note: sent along with the numbers of a step: whether this rank wants all to do something.
        wants_stop: likewise, whether it wants all to stop.
        stop_is_wanted: whether some rank wanted that in the last numbers of a step.
        timeout: the seconds that this rank waits in a message at most.
    """

    def __init__(self, group: dist.ProcessGroup | None, purpose: str) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.meetings = 0
        self.departure = Departure(self.rank, "they have not met yet")
        self.note = False
        self.wants_stop = False
        self.stop_is_wanted = False
        self._purpose = purpose
        self._ranks = range(self.size) if group is None else dist.get_process_group_ranks(group)
        self._at = Place(self.rank, self.size, self.name)
        self._group: Group | None = None
        self._keys: Any = None
        self._count = 0
        self.timeout = EXCHANGING
        self._noted: bool | None = None
        self._on_one_machine = False
        self._return: _Return | None = None

    def name(self, rank: int) -> str:
        """How messages call a rank of the group."""
        return f"rank {self._ranks[rank]}"

    def number(self, rank: int) -> int:
        """The number among all ranks of a rank of the group."""
        return self._ranks[rank]

    @property
    def _group_name(self) -> str:
        return "all" if self.group is None else "-".join(map(str, self._ranks))

    @property
    def is_open(self) -> bool:
        """Whether the ranks exchange messages."""
        return self._group is not None

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks, which speaks and writes for all."""
        return self.rank == 0

    # ------------------------------------------------------------------ the beginning and the end

    def open(self, why: str) -> None:
        """Meet the other ranks; all must call it.

        Args:
            why: what this rank waits for, for a warning: "to attach a session".

        Raises:
            RanksLostError: the ranks have not met. They are apart from then on.
        """
        called: Meeting | None = None
        try:
            self.close()
            self._return = None
            if dist.get_backend(self.group) == "fake":
                raise RanksLostError(Departure(self.rank, "The process group is fake, so there are no other ranks"))
            wait = _patience(self.group)
            called = self._meeting()
            self._on_one_machine = called.meet(wait, why)
            self._connect(called.keys, CONNECTING)
            self.timeout = min(max(wait, EXCHANGING), FIRST_STEP)
        except RanksLostError as error:
            raise self._apart(error.departure.text) from error
        except Exception as error:  # it must not be on this rank alone that anything is raised
            self.decline(error, called)
            raise self._apart(f"The ranks have not met: {_reason(error)}") from error
        except BaseException as error:
            self.decline(error, called)
            raise

    def decline(self, error: BaseException, called: Meeting | None = None) -> None:
        """Tell the other ranks that this one does not meet them because something failed on it.

        Args:
            error: what failed.
            called: the meeting at which this rank is; None if it has not come to it.
        """
        reason = _reason(error)
        own = reason if isinstance(error, MeetingFailed) else f"{self.name(self.rank)} has failed ({reason})"
        with contextlib.suppress(Exception):
            (called or self._meeting()).refuse(own)

    def _meeting(self) -> Meeting:
        return Meeting(shared_store(f"te_precision_callbacks/{self._purpose}/{self._group_name}"), self._at)

    def settle(self) -> None:
        """From now on ranks meet again where one of them has left; and from the next message on they come to messages
        at about the same time, as in steps of training. To that one they may not: in their first step some compile."""
        if self._group is not None:
            self._return = _Return(self._keys)

    def _connect(self, keys: Any, wait: float) -> None:
        self._group = connect(keys, self._at, wait, 2 * FIRST_STEP, on_one_machine=self._on_one_machine)
        self._keys, self._count = keys, 0
        self.meetings += 1

    def _apart(self, why: str) -> RanksLostError:
        self.departure = Departure(self.rank, why)
        self.close()
        return RanksLostError(self.departure)

    def leave(self, error: BaseException, *, raises: bool = False) -> None:
        """Leave the other ranks, which then leave too, because something failed on this rank.

        Args:
            error: what failed.
            raises: whether the caller of this rank gets the exception, so that those of all ranks should.
        """
        if self._group is not None:
            own = str(error) if isinstance(error, PrecisionDebugError) else _reason(error)
            self._leave(Departure(self.rank, own, type(error).__name__, raises))

    def part(self, why: str, *, for_good: bool) -> None:
        """End the messages on all ranks, which do this for the same reason at the same time.

        Args:
            why: the reason.
            for_good: whether the ranks never meet again.
        """
        self._apart(why)
        if for_good:
            self._return = None
        elif self._return is not None:
            self._return.put_off()

    def _leave(self, departure: Departure) -> None:
        self.departure = departure
        self._close(departure)
        if self._return is not None:
            self._return.put_off()

    def close(self) -> None:
        """End the messages of this rank."""
        self._close(Departure(self.rank, f"{self.name(self.rank).capitalize()} has ended its session"))

    def _close(self, departure: Departure) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        try:
            if group.is_whole:  # this rank is the first to leave; the store may be gone with another one
                self._keys.set(_LEFT, json.dumps(asdict(departure) | {"text": departure.text[:_LONGEST_TEXT]}))
        except Exception as error:
            logger.info("%s cannot report why it has left: %s.", self.name(self.rank).capitalize(), _reason(error))
        finally:
            group.close()

    # ------------------------------------------------------------------ messages

    def merge(self, kind: str, why: str, numbers: Numbers, sums: int) -> None:
        """Replace numbers by those of all ranks.

        Args:
            kind: what they are, equal on all ranks.
            why: what this rank waits for, for a warning: "to reduce statistics".
            numbers: contiguous.
            sums: how many of them are added. Of the rest the maximum is taken.

        Raises:
            RanksLostError: the ranks are apart.
        """
        self._exchange(kind, why, numbers, sums)

    def largest(self, kind: str, why: str, *numbers: float) -> tuple[float, ...]:
        """The largest of each number that the ranks give, which may be whole up to 2**53.

        Raises:
            RanksLostError: the ranks are apart.
        """
        own = np.array(numbers, np.float64)
        self.merge(kind, why, own, 0)
        return tuple(own.tolist())

    def pooled(self, own: Iterable[Entry], kind: str, why: str, of: Any) -> list[Entry]:
        """The entries of all ranks, each once, in the same order everywhere: those of lower ranks first.

        Args:
            own: this rank's.
            kind, why: as for :meth:`merge`.
            of: the type of an entry, which pydantic can read from JSON.

        Raises:
            RanksLostError: the ranks are apart.
        """
        text = _written(own, of)
        found: list[Entry] = _read(self._exchange(kind, why, np.empty(0), 0, text, of), of)
        return found

    def by_rank(self, numbers: Sequence[int], kind: str, why: str) -> dict[int, tuple[int, ...]]:
        """The numbers of each rank, by its number among all ranks: for messages of errors, since it grows with them.

        Raises:
            RanksLostError: the ranks are apart.
        """
        found = self.pooled([(self._ranks[self.rank], tuple(numbers))], kind, why, tuple[int, tuple[int, ...]])
        return dict(sorted(found))

    def _exchange(self, kind: str, why: str, numbers: Numbers, sums: int, text: bytes = b"", of: Any = None) -> bytes:
        """Merge numbers, and return the union of texts."""
        group = self._group
        if group is None:
            raise RanksLostError(self.departure, self._in_words(self.departure))
        self._count += 1
        try:
            found = self._exchanged(group, _Waiting(self, why), kind, numbers, sums, text, of)
            if self._return is not None:
                self.timeout = EXCHANGING
            return found
        except RanksLostError as error:
            self._leave(error.departure)
            raise RanksLostError(error.departure, self._in_words(error.departure)) from error
        except _GroupFailed as error:
            self._leave(self._departure_of_another(error))
            raise RanksLostError(self.departure, self._in_words(self.departure)) from error
        except Exception as error:  # the others cannot know how far this rank has come: they go on, and it does too
            self.leave(error)
            raise RanksLostError(self.departure, self._in_words(self.departure)) from error
        except BaseException as error:
            self.leave(error)
            raise

    def _exchanged(
        self, group: Group, waiting: _Waiting, kind: str, numbers: Numbers, sums: int, text: bytes, of: Any
    ) -> bytes:
        ranked = _ranked(numbers[sums:])
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        equal = zlib.crc32(kind.encode()), sums, ranked.size, digest
        header = np.zeros(_HEADER + _ROOM, np.int64)
        header[:_HEADER] = *equal, *(-number for number in equal), len(text)
        header[_HEADER : _HEADER + ranked.size] = ranked[:_ROOM]
        group.maximum(header)
        waiting.finish(group)
        alike = header[: len(equal)] == -header[len(equal) : 2 * len(equal)]
        if not alike[:-1].all():
            remedy = "Every rank must call step() for the same optimizer steps"
            raise RanksLostError(Departure(self.rank, f"The ranks are at different places. {remedy}"))
        if sums:
            group.add(numbers[:sums])
        if ranked.size > _ROOM:
            group.maximum(ranked[_ROOM:])
        waiting.finish(group)
        ranked[:_ROOM] = header[_HEADER : _HEADER + ranked.size]
        numbers[sums:] = _numbers_of(ranked)
        return text if alike[-1] else self._union(group, waiting, text, int(header[_HEADER - 1]), of)

    def _union(self, group: Group, waiting: _Waiting, text: bytes, longest: int, of: Any) -> bytes:
        padded = np.frombuffer(text.ljust(longest), np.uint8).copy()  # JSON may end with blanks
        gathered = group.gather(padded)
        waiting.finish(group)
        union = b""
        if gathered:
            texts = dict.fromkeys(each.tobytes() for each in gathered)
            union = _written((entry for each in texts for entry in _read(each, of)), of)
        size = np.array([len(union)])
        group.broadcast(size)
        waiting.finish(group)
        shared = np.frombuffer(union.ljust(int(size[0])), np.uint8).copy()
        group.broadcast(shared)
        waiting.finish(group)
        return shared.tobytes()

    def _departure_of_another(self, error: Exception) -> Departure:
        """Why another rank has left: what it has written, or else that it cannot be reached."""
        try:
            if self._keys.check([_LEFT]):
                found = json.loads(self._keys.get(_LEFT))
                return Departure(int(found["rank"]), str(found["text"]), str(found["kind"]), bool(found["raises"]))
        except Exception as failure:  # of the store, which may be gone with the rank
            logger.info("Why a rank has left is unknown: %s.", _reason(failure))
        why = str(error).partition("]")[2].partition(". This is")[0].strip() or str(error)
        return Departure(self.rank, f"A rank cannot be reached any more: {why}")

    def waiting_ranks(self) -> set[int]:
        """The ranks of the group that wait in the current message, and have done so for a while."""
        keys = {rank: f"{_WAITS}/{rank}" for rank in range(self.size)}
        there = {rank for rank, key in keys.items() if self._keys.check([key])}
        return {rank for rank in there if int(self._keys.get(keys[rank])) == self._count}

    def note_waiting(self) -> None:
        """Report to the other ranks that this one waits in the current message."""
        self._keys.set(f"{_WAITS}/{self.rank}", str(self._count))

    def _in_words(self, departure: Departure) -> str:
        who = self.name(departure.rank).capitalize()
        return f"{who} has failed: {departure.text}" if departure.kind else departure.text

    # ------------------------------------------------------------------ notes

    def take_noted(self) -> bool | None:
        """Whether any rank had a :attr:`note` in a message since the last call; None if there was none."""
        noted, self._noted = self._noted, None
        return noted

    def put_noted(self, noted: bool, *, stops: bool) -> None:
        """What has come of the ranks' notes, and whether some rank wants all to stop."""
        self._noted = noted
        self.stop_is_wanted = stops

    # ------------------------------------------------------------------ together again

    def tick(self, iteration: int, optimizer_steps: int) -> int | None:
        """Look for the other ranks, at the end of a step in which this rank is apart; this hardly costs anything.

        All ranks that are ready say so in the store. When rank 0 sees that all are, it names the step in which they
        connect: an optimizer step, which training counts alike on all ranks, or an iteration where there are none.

        Args:
            iteration: the iteration that comes next.
            optimizer_steps: how many optimizer steps this rank has done; negative if that does not count them alike.

        Returns:
            Where the ranks are together again, the largest iteration of them; else None.
        """
        found = self._return
        if self._group is not None or found is None:
            return None
        try:
            if not found.is_time(self._at, iteration, optimizer_steps):
                return None
            self._connect(found.keys_of_attempt(), RECONNECTING)
        except Exception as error:  # the store may be gone, or a rank
            with contextlib.suppress(Exception):
                found.keys_of_attempt().set("gone", f"{self.name(self.rank)} has failed ({_reason(error)})")
            logger.info("%s has not met the other ranks again: %s.", self.name(self.rank).capitalize(), _reason(error))
            self._leave(Departure(self.rank, _reason(error)))
            return None
        try:
            wait, self.timeout = self.timeout, RECONNECTING
            (largest,) = self.largest("again", "to go on together", float(iteration))
        except Exception:
            return None
        finally:
            self.timeout = wait
        return int(largest)


class _Return:
    """How ranks that are apart meet again.

    Args:
        keys: those of the last meeting, which each attempt has a part of.
    """

    def __init__(self, keys: Any) -> None:
        self._keys = keys
        self._attempt = 0
        self._ready_at: int | None = None
        self._is_ready = self._has_published = False
        self._polled = -1
        self._meets: tuple[bool, int] | None = None

    def keys_of_attempt(self) -> Any:
        """The part of the store that the current attempt has."""
        return below(f"again/{self._attempt}", self._keys)

    def put_off(self) -> None:
        """Try again later, and each time twice as late."""
        self._attempt += 1
        self._ready_at = self._meets = None
        self._is_ready = self._has_published = False

    def is_time(self, at: Place, iteration: int, optimizer_steps: int) -> bool:
        """Whether the ranks connect now."""
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
            keys.add("ready", 1)
            self._is_ready = True
        if at.rank == 0 and not self._has_published and keys.add("ready", 0) == at.size:
            by_iteration = keys.check(["by_iteration"])
            when = (iteration if by_iteration else optimizer_steps) + POLLING + 2  # all others have looked until then
            keys.set("when", f"{int(by_iteration)} {when}")
            self._has_published = True
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
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[of])


def _written(entries: Iterable[Hashable], of: Any) -> bytes:
    """Entries as JSON, each once; inf and nan as Python's json writes them."""
    return json.dumps(_adapter(of).dump_python(list(dict.fromkeys(entries)), mode="json")).encode()


def _read(text: bytes, of: Any) -> list[Any]:
    found: list[Any] = _adapter(of).validate_python(json.loads(text))
    return found


def _ranked(numbers: Numbers) -> npt.NDArray[np.int64]:
    """Whole numbers in the order of the given ones, nan the largest: gloo's own maximum may lose a nan."""
    bits = np.where(np.isnan(numbers), np.nan, numbers).view(np.int64)
    return bits ^ ((bits >> 63) & np.iinfo(np.int64).max)


def _numbers_of(ranked: npt.NDArray[np.int64]) -> Numbers:
    bits = ranked ^ ((ranked >> 63) & np.iinfo(np.int64).max)
    return bits.view(np.float64)


class _GroupFailed(Exception):
    """An operation of the group has failed: another rank has left or died."""


class _Waiting:
    """The time that a rank waits in one message: it warns after a while, and gives up after a timeout.

    Args:
        messages: those of the rank.
        why: what it waits for.
    """

    def __init__(self, messages: Messages, why: str) -> None:
        self._messages = messages
        self._why = why
        self._begun = time.monotonic()
        self._is_noted = self._has_warned = False

    def finish(self, group: Group) -> None:
        """Wait for the operations of a group.

        Raises:
            RanksLostError: that took too long.
            _GroupFailed: they have failed.
        """
        try:
            group.finish(self._check)
        except RuntimeError as error:
            if isinstance(error, RanksLostError):
                raise
            raise _GroupFailed(str(error).partition("\n")[0]) from error

    def _check(self) -> None:
        messages, passed = self._messages, time.monotonic() - self._begun
        if passed >= min(meeting.WAITING, messages.timeout) / 2 and not self._is_noted:
            self._is_noted = True
            messages.note_waiting()
        if passed >= messages.timeout:
            text = f"{self._who} has waited {messages.timeout:g} s for {self._late()}, {self._why}"
            raise RanksLostError(Departure(messages.rank, text))
        if passed >= meeting.WAITING and not self._has_warned:
            self._has_warned = True
            if messages.rank <= 1:
                logger.warning("%s has waited %g s for %s, %s.", self._who, meeting.WAITING, self._late(), self._why)

    @property
    def _who(self) -> str:
        return self._messages.name(self._messages.rank).capitalize()

    def _late(self) -> str:
        """The ranks that are not at this message; not asked by all ranks, since each is asked for."""
        messages = self._messages
        late = set(range(messages.size)) - messages.waiting_ranks() if messages.rank <= 1 else set()
        return ranks_in_words(sorted(map(messages.number, late))) if late else "other ranks"


def _patience(group: dist.ProcessGroup | None) -> float:
    """The seconds that a rank waits for the others to come at all: half of the time that the training's messages have.

    Ranks load a model at different speeds. A rank that waits in a message of the training for one that waits here must
    not lose its patience first.
    """
    try:
        training: Any = dist.group.WORLD if group is None else group
        found = [training._get_backend(device).options._timeout for device in training._device_types]
        return float(min(found).total_seconds()) / 2
    except (RuntimeError, AttributeError, ValueError):  # a backend without options
        return timedelta(minutes=5).total_seconds()
