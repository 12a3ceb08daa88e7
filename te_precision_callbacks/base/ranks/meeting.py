"""Rendezvous of the ranks, through the store of the training's process group.

Ranks arrive, then connect. In both phases, the last rank decides that all ranks are present; a rank that waits too
long, or fails, decides that they are not. The first decision holds for all ranks, even for late ones. The number of
keys does not grow with the number of ranks.

Read from torch 2.13: ``torch.distributed.distributed_c10d._get_default_store``, and ``Store.clone``, which allows
separate timeouts. ``Store.wait`` is not used: it blocks Python's signal handlers, and warns after each timeout.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from te_precision_callbacks.base.ranks.group import Group, devices

logger = logging.getLogger(__name__)

PROTOCOL = 3
"""Version of the protocol; ranks with different versions do not connect."""

WAITING = 15.0
"""Seconds of waiting after which a rank logs a warning."""

CONNECTING = 15.0
"""Timeout in seconds for connecting after all ranks have arrived."""

_ANSWER = 10.0
"""Timeout in seconds of the store."""

_LONGEST_PAUSE = 0.25

# The phases: keys in the store, and words of messages.
_ARRIVED = "arrived"
_CONNECTED = "connected"


class MeetingFailed(Exception): ...


@dataclass(frozen=True)
class RankPlace:
    """A rank in its group, and its name for messages."""

    rank: int
    size: int
    name: str


def shared_store(prefix: str) -> Any:
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(timedelta(seconds=_ANSWER))
    return prefixed_store(prefix, store)


def prefixed_store(prefix: str, store: Any) -> Any:
    return dist.distributed_c10d.PrefixStore(prefix, store)


def next_keys(store: Any, rank: int) -> Any:
    """Return the keys of this rank's next meeting. Each rank counts its own, so a late rank finds earlier decisions."""
    return prefixed_store(str(store.add(f"meetings/{rank}", 1)), store)


def meet(keys: Any, rank_place: RankPlace, wait: float, why: str) -> Group:
    """Wait for all ranks, and connect to them.

    Args:
        wait: timeout in seconds.
        why: the purpose, for a warning: "to attach a session".

    Raises:
        MeetingFailed: a rank did not arrive or connect in time, a rank refused, or versions differ.
        RuntimeError: the store or gloo failed.
    """
    listening = devices()
    keys.add("versions", PROTOCOL)
    _wait_for_all(keys, _ARRIVED, rank_place, wait, why)
    if keys.add("versions", 0) != PROTOCOL * rank_place.size:
        raise MeetingFailed(
            f"the ranks have different versions of te-precision-callbacks ({rank_place.name} has message version"
            f" {PROTOCOL})"
        )
    group = Group(prefixed_store("gloo", keys), rank_place.rank, rank_place.size, listening, CONNECTING)
    try:
        # Else a rank could leave before another one has connected to it.
        _wait_for_all(keys, _CONNECTED, rank_place, CONNECTING)
    except BaseException:
        group.close()
        raise
    return group


def refuse(keys: Any, why: str) -> None:
    """Record why this rank does not meet the others, so that no rank waits for it."""
    for phase in (_ARRIVED, _CONNECTED):
        keys.add(f"{phase}/decisions", 1)
        if not keys.check([f"{phase}/decision"]):  # this rank may have failed while it decided
            keys.set(f"{phase}/decision", why)


def _wait_for_all(keys: Any, phase: str, rank_place: RankPlace, wait: float, why: str = "") -> None:
    begun = time.monotonic()
    warns = why != "" and rank_place.rank <= 1
    if keys.add(phase, 1) == rank_place.size:
        _decide(keys, phase, "")
    pause = 0.001
    while not keys.check([f"{phase}/decision"]):
        waited = time.monotonic() - begun
        if waited >= wait:
            _decide(keys, phase, f"not all ranks {phase} within {wait:g} s")
            break
        if warns and waited > WAITING:
            warns = False
            who = rank_place.name.capitalize()
            logger.warning("%s has waited %g s for the other ranks, %s together with them.", who, WAITING, why)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    decision = keys.get(f"{phase}/decision").decode()
    if decision:
        raise MeetingFailed(decision)


def _decide(keys: Any, phase: str, decision: str) -> None:
    """Set the decision of a phase, unless another rank has: empty if all ranks are present, or the reason."""
    if keys.add(f"{phase}/decisions", 1) == 1:
        keys.set(f"{phase}/decision", decision)
