"""Rendezvous of the ranks, through the store of the training's process group.

Rank 0 opens a meeting, the others arrive, and rank 0 confirms that all are there. Then all connect. Each rank needs
the same few keys, however many ranks there are. A rank that cannot meet writes a refusal into the store and waits for
nobody; a rank that does not arrive costs the others a timeout.

Read from torch 2.13: ``torch.distributed.distributed_c10d._get_default_store``, and ``Store.clone``, which allows
separate timeouts. ``Store.wait`` is not used: it blocks Python's signal handlers, and warns after each timeout.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from te_precision_callbacks.base.ranks.group import Group, NoAddressError, devices

logger = logging.getLogger(__name__)

PROTOCOL = 2
"""The version of the messages; ranks with different versions do not connect."""

WAITING = 15.0
"""Seconds of waiting after which a rank warns."""

_ANSWER = 10.0
"""Seconds in which the store should respond."""

_LONGEST_PAUSE = 0.25


class MeetingFailed(Exception):
    """The ranks have not met; the text has the reason."""


@dataclass(frozen=True)
class Place:
    """A rank of the group.

    Attributes:
        name: formats a rank for messages.
    """

    rank: int
    size: int
    name: Callable[[int], str]


def shared_store(prefix: str) -> Any:
    """Clone the store of the training's process group, and limit it to keys below a prefix."""
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(timedelta(seconds=_ANSWER))
    return below(prefix, store)


def below(prefix: str, store: Any) -> Any:
    """Return a part of a store: the keys that begin with a prefix."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


class Meeting:
    """A meeting of the ranks. Each rank counts its meetings, so a late rank still finds the messages of this one."""

    def __init__(self, store: Any, at: Place) -> None:
        self._store = store
        self._at = at
        self._number = 0

    @property
    def keys(self) -> Any:
        if not self._number:
            self._number = self._store.add(f"meetings/{self._at.rank}", 1)
        return below(str(self._number), self._store)

    def meet(self, wait: float, why: str) -> bool:
        """Wait for all ranks.

        Args:
            wait: timeout in seconds.
            why: the purpose, for a warning.

        Returns:
            Whether all ranks are on one machine.

        Raises:
            MeetingFailed: not all came in time, one has refused, or versions differ.
            RuntimeError: the store failed.
        """
        keys, at = self.keys, self._at
        until, on_wait = time.monotonic() + wait, _warning(at, why)
        if at.rank == 0:
            keys.set("open", json.dumps([PROTOCOL, _machine()]))
            enough = _until(lambda: keys.add("arrived", 0) >= at.size - 1 or keys.check(["refused"]), until, on_wait)
            verdict = "" if enough else f"not all of them have come within {wait:g} s"
            if keys.check(["refused"]):
                verdict = keys.get("refused").decode()
            keys.set("verdict", verdict)
        else:
            if not _until(lambda: keys.check(["open"]), until, on_wait):
                raise MeetingFailed(f"{at.name(0)} has not come within {wait:g} s")
            protocol, machine = json.loads(keys.get("open"))
            if protocol != PROTOCOL:
                other = f"they have different versions of te-precision-callbacks (messages {protocol} and {PROTOCOL})"
                keys.set("refused", other)
            if machine != _machine():
                keys.set("several machines", "")
            keys.add("arrived", 1)
            if not _until(lambda: keys.check(["verdict"]), until + _ANSWER, on_wait):
                raise MeetingFailed(f"not all of them have come within {wait:g} s")
            verdict = keys.get("verdict").decode()
        if verdict:
            raise MeetingFailed(verdict)
        return not keys.check(["several machines"])

    def refuse(self, why: str) -> None:
        """Tell all ranks, now or later, not to wait for this one, and why."""
        keys = self.keys
        if self._at.rank:
            keys.set("refused", why)
        else:
            keys.set("verdict", why)
            keys.set("open", json.dumps([PROTOCOL, _machine()]))
        keys.set("gone", why)


def connect(keys: Any, at: Place, wait: float, longest: float, *, on_one_machine: bool) -> Group:
    """Connect the ranks that have met. If this fails, the rank writes the reason to the key ``gone``.

    Args:
        keys: the keys of the meeting, or of a later attempt.
        at: this rank.
        wait: timeout in seconds.
        longest: see :class:`Group`.
        on_one_machine: whether all ranks are.

    Raises:
        MeetingFailed: a rank cannot be reached.
        RuntimeError: the store or gloo failed.
    """
    until = time.monotonic() + wait
    try:
        listening = devices(on_one_machine=on_one_machine)
    except NoAddressError as error:
        text = f"cannot be reached by the other ranks: {error}"
        logger.warning("%s %s.", at.name(at.rank).capitalize(), text)
        raise MeetingFailed(f"{at.name(at.rank)} {text}") from error
    _all_are(keys, "ready", at, until, wait)
    group = Group(below("gloo", keys), at.rank, at.size, listening, max(until - time.monotonic(), 1.0), longest)
    try:
        _all_are(keys, "connected", at, until, wait)  # else a rank could leave before another one has connected to it
    except BaseException:
        group.close()
        raise
    return group


def _all_are(keys: Any, where: str, at: Place, until: float, wait: float) -> None:
    keys.add(where, 1)
    if not _until(lambda: keys.add(where, 0) >= at.size or keys.check(["gone"]), until, lambda: None):
        raise MeetingFailed(f"not all of them have connected within {wait:g} s")
    if keys.add(where, 0) < at.size:
        raise MeetingFailed(keys.get("gone").decode())


def _warning(at: Place, why: str) -> Callable[[], None]:
    """Return a function that warns once, on ranks 0 and 1, after a long wait."""
    begun, said = time.monotonic(), at.rank > 1

    def warn() -> None:
        nonlocal said
        if not said and time.monotonic() - begun > WAITING:
            said = True
            who = at.name(at.rank).capitalize()
            logger.warning("%s has waited %g s for the other ranks, %s together with them.", who, WAITING, why)

    return warn


def _until(is_there: Callable[[], bool], until: float, on_wait: Callable[[], None]) -> bool:
    """Poll the store with increasing pauses; return whether the condition held in time."""
    pause = 0.001
    while not is_there():
        if time.monotonic() >= until:
            return False
        on_wait()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _machine() -> str:
    """Return an ID that processes of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
