"""The messages among the ranks of a run: opened on all of them, closed at its end."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.ranks.meeting import (
    Meeting,
    MeetingFailed,
    Place,
    below,
    connect,
    say_gone,
    shared_store,
)
from te_precision_callbacks.base.ranks.tree import Departure, Numbers, RanksLostError, Tree

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=Hashable)

EXCHANGING = 60.0
"""The seconds that a rank waits for the others in a message of a step, but for the first one."""

FIRST_STEP = 300.0
"""The most seconds that a rank waits for the others in the messages of the first step, in which some compile. A rank
that leaves out its first ``step()`` holds the others up for as long, once."""

CONNECTING = 15.0
"""The seconds in which ranks that have met must connect."""

RECONNECTING = 10.0
"""The same for ranks that meet again, in the middle of training."""

POLLING, MOST_RETURNS = 8, 9
"""After how many steps ranks that are apart look for the others, and how often they meet again at most. With these they
are together again 26 to 34 steps after they parted."""


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
        self._tree: Tree | None = None
        self._wait = EXCHANGING
        self._noted: bool | None = None
        self._met: tuple[Any, str] | None = None
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
        return self._tree is not None

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
        meeting: Meeting | None = None
        try:
            self.close()
            self._return = None
            if dist.get_backend(self.group) == "fake":
                raise RanksLostError(Departure(self.rank, "The process group is fake, so there are no other ranks"))
            wait = _patience(self.group)
            meeting = self._meeting()
            keys, secret = meeting.meet(wait, why)
            self._connect(keys, secret, CONNECTING)
            self._wait, self._met = min(max(wait, EXCHANGING), FIRST_STEP), (keys, secret)
        except RanksLostError as error:
            raise self._apart(error.departure.text) from error
        except Exception as error:  # it must not be on this rank alone that anything is raised
            self.decline(error, meeting)
            raise self._apart(f"The ranks have not met: {_reason(error)}") from error
        except BaseException as error:
            self.decline(error, meeting)
            raise

    def decline(self, error: BaseException, meeting: Meeting | None = None) -> None:
        """Tell the other ranks that this one does not meet them because something failed on it.

        Args:
            error: what failed.
            meeting: the one at which this rank is; None if it has not come to it.
        """
        reason = _reason(error)
        own = reason if isinstance(error, MeetingFailed) else f"{self.name(self.rank)} has failed ({reason})"
        with contextlib.suppress(Exception):
            (meeting or self._meeting()).refuse(own)

    def _meeting(self) -> Meeting:
        return Meeting(shared_store(f"te_precision_callbacks/{self._purpose}/{self._group_name}"), self._at)

    def settle(self) -> None:
        """From now on ranks meet again where one of them has left; and from the next message on they come to messages
        at about the same time, as in steps of training. To that one they may not: in their first step some compile."""
        if self._tree is not None and self._met is not None:
            self._return = _Return(*self._met)

    def _connect(self, keys: Any, secret: str, wait: float) -> None:
        self._tree = connect(keys, secret, self._at, wait)
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
        if self._tree is not None:
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
        tree, self._tree = self._tree, None
        self.departure = departure
        if tree is not None:
            tree.leave(departure)
        if self._return is not None:
            self._return.put_off()

    def close(self) -> None:
        """End the messages of this rank."""
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.leave(Departure(self.rank, f"{self.name(self.rank).capitalize()} has ended its session"))

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
        self._exchange(kind, why, numbers, sums, b"", _first)

    def largest(self, kind: str, why: str, *numbers: float) -> tuple[float, ...]:
        """The largest of each number that the ranks give, which may be whole up to 2**53.

        Raises:
            RanksLostError: the ranks are apart.
        """
        own = np.array(numbers, np.float64)
        self.merge(kind, why, own, 0)
        return tuple(own.tolist())

    def pooled(self, own: Iterable[Entry], kind: str, why: str) -> list[Entry]:
        """The entries of all ranks, each once, in the same order everywhere: those of lower ranks first.

        A message grows with the number of different entries, not with the number of ranks.

        Args:
            own: this rank's; they must survive pickling.
            kind, why: as for :meth:`merge`.

        Raises:
            RanksLostError: the ranks are apart.
        """
        text = self._exchange(kind, why, np.empty(0), 0, _packed(own), _union)
        entries: list[Entry] = pickle.loads(text)
        return entries

    def by_rank(self, numbers: Sequence[int], kind: str, why: str) -> dict[int, tuple[int, ...]]:
        """The numbers of each rank, by its number among all ranks: for messages of errors, since it grows with them.

        Raises:
            RanksLostError: the ranks are apart.
        """
        found = self.pooled([(self._ranks[self.rank], tuple(numbers))], kind, why)
        return dict(sorted(found))

    def _exchange(self, kind: str, why: str, numbers: Numbers, sums: int, text: bytes, merge: Any) -> bytes:
        tree = self._tree
        if tree is None:
            raise RanksLostError(self.departure, self._in_words(self.departure))
        try:
            found = tree.exchange(kind, why, numbers, sums, text, merge, self._wait)
            if self._return is not None:
                self._wait = EXCHANGING
            return found
        except RanksLostError as error:
            self._leave(error.departure)
            raise RanksLostError(error.departure, self._in_words(error.departure)) from error
        except Exception as error:  # the others cannot know how far this rank has come: they go on, and it does too
            self.leave(error)
            raise RanksLostError(self.departure, self._in_words(self.departure)) from error
        except BaseException as error:
            self.leave(error)
            raise

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
        if self._tree is not None or found is None:
            return None
        try:
            if not found.is_time(self._at, iteration, optimizer_steps):
                return None
            self._connect(found.keys_of_attempt(), found.secret, RECONNECTING)
        except Exception as error:  # the store may be gone, or a rank
            with contextlib.suppress(Exception):
                say_gone(found.keys_of_attempt(), self._at)
            logger.info("%s has not met the other ranks again: %s.", self.name(self.rank).capitalize(), _reason(error))
            self._leave(Departure(self.rank, _reason(error)))
            return None
        try:
            wait, self._wait = self._wait, RECONNECTING
            (largest,) = self.largest("again", "to go on together", float(iteration))
        except Exception:
            return None
        finally:
            self._wait = wait
        return int(largest)


class _Return:
    """How ranks that are apart meet again.

    Args:
        keys: those of the last meeting, which each attempt has a part of.
        secret: of these ranks.
    """

    def __init__(self, keys: Any, secret: str) -> None:
        self.secret = secret
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


def _first(own: bytes, other: bytes) -> bytes:
    return own or other


def _packed(entries: Iterable[Hashable]) -> bytes:
    return pickle.dumps(list(dict.fromkeys(entries)))


def _union(own: bytes, other: bytes) -> bytes:
    return own if own == other else _packed([*pickle.loads(own), *pickle.loads(other)])


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
