"""Messages among ranks over a tree of plain TCP sockets, apart from the process groups of the training.

A message goes up the tree, where each rank merges those of its children into its own, and the result of rank 0 comes
down again. So all ranks have the same bits, whatever is added. A rank has few neighbours: of 1,024 ranks, rank 0 has 22
and most have one; ranks of a node of eight talk to the first of the node.

Why not torch's process groups. The training's own must not be used: where ranks disagree about a message of ours, it
pairs with a gradient. A second NCCL communicator costs memory on the GPU, and its watchdog ends the process after a
timeout. A group of gloo's of our own (torch 2.13) ends the process too, where two ranks send messages of different
sizes; its ``abort`` and ``shutdown`` close no connection, so that the other ranks wait for their timeout; a worker of a
DataLoader that was forked from a rank holds its sockets open; and its wait keeps Python from handling a signal. Here a
message says what it is, and closing reaches the other ranks at once, whoever else has the socket.

A rank that fails anywhere leaves: it sends the reason to its neighbours and shuts the sockets down. They read that in
their current or next message, pass it on, and leave too. So nobody waits for a rank that is alive and has failed. A
rank that is silent costs the others a timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.errors import PrecisionDebugError

logger = logging.getLogger(__name__)

FAN = 8
"""The ranks that have one parent, with the parent."""

WAITING = 15.0
"""Seconds after which a rank warns that it waits for others."""

Numbers = npt.NDArray[np.float64]
Merge = Callable[[bytes, bytes], bytes]
"""Merges the texts of two ranks, the lower one first."""


def parent_of(rank: int) -> int:
    """The parent of a rank that is not 0: the rank without its last digit that is not 0, to the base :data:`FAN`."""
    step = 1
    while rank // step % FAN == 0:
        step *= FAN
    return rank - rank // step % FAN * step


def children_of(rank: int, size: int) -> list[int]:
    """The children of a rank in a tree of ``size`` ranks, in rising order; each with the ranks that follow it."""
    found: list[int] = []
    step = 1
    while step < size and rank % (step * FAN) == 0:
        found.extend(range(rank + step, min(rank + step * FAN, size), step))
        step *= FAN
    return found


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


class _Head(NamedTuple):
    """What precedes a message: what it is, how many numbers are added and how many merged by the maximum, and the
    length of its text."""

    magic: bytes
    kind: int
    sums: int
    maxima: int
    text: int


_HEAD = struct.Struct("!4sIQQQ")
_MESSAGE, _LEAVING = b"tepm", b"tepl"
_LONGEST_TEXT, _LONGEST_REASON = 4000, 32768
_EVERY_TREE: weakref.WeakSet[Tree] = weakref.WeakSet()


class _Neighbour:
    """A connection, and how much of the head of the next message has arrived.

    Args:
        rank: of the other side, in the group.
        name: how messages call it.
        connection: to it.
    """

    def __init__(self, rank: int, name: str, connection: socket.socket) -> None:
        self.rank, self.name = rank, name
        self.connection = connection
        self.head: _Head | None = None
        self._raw = bytearray(_HEAD.size)
        self._got = 0

    def read_head(self) -> bool:
        """Read what has arrived of the head of a message; whether it is complete.

        Raises:
            RanksLostError: the neighbour has left.
        """
        while self.head is None:
            count = self.read(memoryview(self._raw)[self._got :])
            if not count:
                return False
            self._got += count
            if self._got == _HEAD.size:
                self.head, self._got = _Head(*_HEAD.unpack(self._raw)), 0
        if self.head.magic == _LEAVING:
            raise RanksLostError(self._reason(self.head.text))
        return True

    def read(self, room: memoryview) -> int:
        """Read what has arrived into a room; how many bytes that were, which may be none.

        Raises:
            RanksLostError: the connection has ended.
        """
        try:
            count = self.connection.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost(str(error)) from error
        if not count:
            raise self.lost("the connection has ended")
        return count

    def lost(self, why: str) -> RanksLostError:
        """The error for a connection that has ended."""
        return RanksLostError(Departure(self.rank, f"{self.name.capitalize()} cannot be reached any more: {why}"))

    def _reason(self, length: int) -> Departure:
        raw = bytearray(min(length, _LONGEST_REASON))
        left = memoryview(raw)
        try:
            self.connection.settimeout(1.0)  # it was sent together with the head
            while left:
                left = left[self.read(left) :]
            return Departure(**json.loads(raw))
        except (RanksLostError, ValueError, TypeError):
            return Departure(self.rank, f"{self.name.capitalize()} has left")


class Tree:
    """The connections of a rank to its neighbours.

    Args:
        rank, size: the rank in its group, and how many there are.
        parent: the connection to the parent; None on rank 0.
        children: the connections to the children.
        name: how messages call a rank of the group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        parent: socket.socket | None,
        children: Mapping[int, socket.socket],
        name: Callable[[int], str],
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        above = parent_of(rank) if rank else 0
        self._parent = None if parent is None else _Neighbour(above, name(above), parent)
        self._children = [_Neighbour(child, name(child), children[child]) for child in sorted(children)]
        self._scratch = np.empty(0)
        for neighbour in self._neighbours():
            neighbour.connection.setblocking(False)
            neighbour.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            neighbour.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _EVERY_TREE.add(self)

    def _neighbours(self) -> Sequence[_Neighbour]:
        return self._children if self._parent is None else [self._parent, *self._children]

    # ------------------------------------------------------------------ a message

    def exchange(
        self, kind: str, why: str, numbers: Numbers, sums: int, text: bytes, merge: Merge, wait: float
    ) -> bytes:
        """Merge the messages of all ranks; all must call it alike.

        Args:
            kind: what the message is, equal on all ranks.
            why: what this rank waits for, for a warning: "to reduce statistics".
            numbers: contiguous; they are replaced by those of all ranks.
            sums: how many of them are added. Of the rest the maximum is taken.
            text: of this rank.
            merge: merges the texts of two ranks.
            wait: the seconds that this rank waits at most.

        Returns:
            The merged text.

        Raises:
            RanksLostError: a rank has left, is at another message, or has not come in time.
        """
        waiting = _Waiting(self, why, wait)
        expected = zlib.crc32(kind.encode()), sums, numbers.size - sums
        raw = _bytes_of(numbers)
        for number, child in enumerate(self._children):  # always in this order: so the sums have always the same bits
            while not child.read_head():
                waiting.for_a_head(self._neighbours(), self._children[number])
            other = self._read(child, expected, self._scratch_of(numbers.size), waiting)
            of_child = self._scratch[: numbers.size]
            np.add(numbers[:sums], of_child[:sums], out=numbers[:sums])
            np.maximum(numbers[sums:], of_child[sums:], out=numbers[sums:])
            text = merge(text, other)
        if self._parent is not None:
            self._send(self._parent, (_HEAD.pack(_MESSAGE, *expected, len(text)), raw, text), waiting)
            while not self._parent.read_head():
                waiting.for_a_head(self._neighbours(), self._parent)
            text = self._read(self._parent, expected, raw, waiting)
        for child in self._children:
            self._send(child, (_HEAD.pack(_MESSAGE, *expected, len(text)), raw, text), waiting)
        return text

    def _scratch_of(self, count: int) -> memoryview:
        if self._scratch.size < count:
            self._scratch = np.empty(count)
        return _bytes_of(self._scratch[:count])

    def _read(
        self, neighbour: _Neighbour, expected: tuple[int, int, int], room: memoryview, waiting: _Waiting
    ) -> bytes:
        """Read the rest of a message, whose head has arrived; its text."""
        head, neighbour.head = neighbour.head, None
        if head is None or (head.kind, head.sums, head.maxima) != expected:
            both = f"{self.name(self.rank).capitalize()} and {neighbour.name}"
            remedy = "Every rank must call step() for the same optimizer steps"
            raise RanksLostError(Departure(self.rank, f"{both} are at different places. {remedy}"))
        text = bytearray(head.text)
        for part in (room, memoryview(text)):
            left = part
            while left:
                count = neighbour.read(left)
                left = left[count:]
                if not count:
                    waiting.for_data(neighbour, select.POLLIN)
        return bytes(text)

    def _send(self, neighbour: _Neighbour, parts: Iterable[bytes | memoryview], waiting: _Waiting) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                try:
                    left = left[neighbour.connection.send(left) :]
                except BlockingIOError:
                    waiting.for_data(neighbour, select.POLLOUT)
                except OSError as error:
                    neighbour.read_head()  # it has the reason why the neighbour has left, if one was sent
                    raise neighbour.lost(str(error)) from error

    # ------------------------------------------------------------------ the end

    def leave(self, departure: Departure) -> None:
        """Tell the neighbours why this rank leaves, and close all connections."""
        fields = asdict(departure) | {"text": departure.text[:_LONGEST_TEXT]}
        reason = json.dumps(fields).encode()
        for neighbour in self._neighbours():
            with contextlib.suppress(OSError):
                neighbour.connection.send(_HEAD.pack(_LEAVING, 0, 0, 0, len(reason)) + reason)
        self.close()

    def close(self) -> None:
        """Close all connections. The other ranks learn of it even where another process has the sockets too."""
        for neighbour in self._neighbours():
            with contextlib.suppress(OSError):
                neighbour.connection.shutdown(socket.SHUT_RDWR)
            neighbour.connection.close()

    def forget(self) -> None:
        """Let the sockets go, in a process that was forked from the rank: they end with the rank."""
        for neighbour in self._neighbours():
            neighbour.connection.close()


def _bytes_of(numbers: Numbers) -> memoryview:
    buffer: Any = numbers
    return memoryview(buffer).cast("B") if numbers.size else memoryview(bytearray())


def _forget_inherited() -> None:
    for tree in list(_EVERY_TREE):
        tree.forget()


os.register_at_fork(after_in_child=_forget_inherited)


class _Waiting:
    """The time that a rank waits in one message: it warns after a while, and gives up after a timeout."""

    def __init__(self, tree: Tree, why: str, wait: float) -> None:
        self._tree = tree
        self._why = why
        self._wait = wait
        self._begun = time.monotonic()
        self._warned = False

    def for_a_head(self, watched: Sequence[_Neighbour], late: _Neighbour) -> None:
        """Wait until anything arrives, such as that a neighbour has left.

        Raises:
            RanksLostError: a neighbour has left, or nothing has come in time.
        """
        without = {neighbour.connection.fileno(): neighbour for neighbour in watched if neighbour.head is None}
        for descriptor in self._poll(dict.fromkeys(without, select.POLLIN), late):
            without[descriptor].read_head()

    def for_data(self, neighbour: _Neighbour, event: int) -> None:
        """Wait until more can be read from a neighbour, or sent to it.

        Raises:
            RanksLostError: that was not possible in time.
        """
        self._poll({neighbour.connection.fileno(): event}, neighbour)

    def _poll(self, events: Mapping[int, int], late: _Neighbour) -> Sequence[int]:
        poll = select.poll()
        for descriptor, event in events.items():
            poll.register(descriptor, event)
        while True:
            passed = time.monotonic() - self._begun
            if passed >= self._wait:
                why = f"{self._name} has waited {self._wait:g} s for {late.name}, {self._why}"
                raise RanksLostError(Departure(self._tree.rank, why))
            if passed >= WAITING and not self._warned:
                self._warned = True
                self._warn(late)
            until = self._wait if self._warned else min(WAITING, self._wait)
            ready = poll.poll(1000 * max(until - passed, 0) + 1)
            if ready:
                return [descriptor for descriptor, _ in ready]

    @property
    def _name(self) -> str:
        return self._tree.name(self._tree.rank).capitalize()

    def _warn(self, late: _Neighbour) -> None:
        """Warn, where it is known who is late: a rank that waits for its parent does not know for whom that waits."""
        if late.rank > self._tree.rank or self._tree.rank == 1:
            logger.warning("%s has waited %g s for %s, %s.", self._name, WAITING, late.name, self._why)
