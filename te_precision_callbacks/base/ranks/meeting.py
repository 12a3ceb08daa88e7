"""How ranks find one another: through the store in which the process group of the training has met.

Rank 0 opens a meeting, the others come, and rank 0 reports that all are there. Then each rank connects to its parent,
whose address is in the store too. So nobody waits in vain for a connection, and a rank that does not come costs the
others the time that they were given for it. A rank that cannot meet reports so once and waits for none: its word stays
in the store. Each rank needs the same few keys, however many ranks there are.

Read from torch 2.13: ``torch.distributed.distributed_c10d._get_default_store``, and of its ``Store`` ``clone``, whose
timeouts are not those of the training. ``wait`` is not used: it keeps Python from handling a signal, and a store warns
of each wait that ends without a key.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from te_precision_callbacks.base.ranks import tree
from te_precision_callbacks.base.ranks.tree import Tree, children_of, parent_of

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""The version of the messages. Ranks with different ones do not connect."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface; gloo has it too."""

_ANSWER = 10.0
"""Seconds after which the store should have answered."""

_LONGEST_PAUSE = 0.25


class MeetingFailed(Exception):
    """The ranks have not met; the text has the reason."""


@dataclass(frozen=True)
class Place:
    """A rank among those that meet.

    Attributes:
        rank, size: in the group.
        name: how messages call a rank of the group.
    """

    rank: int
    size: int
    name: Callable[[int], str]


def shared_store(prefix: str) -> Any:
    """The store of the training's process group, over its own connection, with our keys below a prefix."""
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(timedelta(seconds=_ANSWER))
    return below(prefix, store)


def below(prefix: str, store: Any) -> Any:
    """A part of a store: its keys that begin with a prefix."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


class Meeting:
    """One meeting of the ranks. Each rank counts the meetings that it is called to, so what it says in one of them is
    there for the ranks that come later, however late that is.

    Args:
        store: of all ranks that meet.
        at: this rank.
    """

    def __init__(self, store: Any, at: Place) -> None:
        self._store = store
        self._at = at
        self._number = 0

    @property
    def keys(self) -> Any:
        """The keys of this meeting."""
        if not self._number:
            self._number = self._store.add(f"meetings/{self._at.rank}", 1)
        return below(str(self._number), self._store)

    def meet(self, wait: float, why: str) -> tuple[Any, str]:
        """Meet all ranks.

        Args:
            wait: the seconds in which all must have come.
            why: what this rank waits for, for a warning.

        Returns:
            The keys of this meeting, and a secret of its ranks.

        Raises:
            MeetingFailed: not all came in time, one has refused, or some have other versions.
            RuntimeError: of the store.
        """
        keys, at = self.keys, self._at
        until, on_wait = time.monotonic() + wait, _warning(at, why)
        if at.rank == 0:
            secret = secrets.token_hex(16)
            keys.set("open", json.dumps([secret, PROTOCOL]))
            enough = _until(lambda: self._all_came() or keys.check(["refused"]), until, on_wait)
            verdict = "" if enough else f"not all of them have come within {wait:g} s"
            if keys.check(["refused"]):
                verdict = keys.get("refused").decode()
            keys.set("verdict", verdict)
        else:
            if not _until(lambda: keys.check(["open"]), until, on_wait):
                raise MeetingFailed(f"{at.name(0)} has not come within {wait:g} s")
            secret, protocol = json.loads(keys.get("open"))
            if protocol != PROTOCOL:
                other = f"they have different versions of te-precision-callbacks (messages {protocol} and {PROTOCOL})"
                keys.set("refused", other)
            keys.add("arrived", 1)
            if not _until(lambda: keys.check(["verdict"]), until + _ANSWER, on_wait):
                raise MeetingFailed(f"not all of them have come within {wait:g} s")
            verdict = keys.get("verdict").decode()
        if verdict:
            raise MeetingFailed(verdict)
        return keys, secret

    def _all_came(self) -> bool:
        return bool(self.keys.add("arrived", 0) >= self._at.size - 1)

    def refuse(self, why: str) -> None:
        """Tell all ranks that this one does not meet them, or has met them and does not connect. Nobody waits for it:
        those that wait now hear why, and so do those that come later."""
        keys = self.keys
        if self._at.rank:
            keys.set("refused", why)
        else:
            keys.set("verdict", why)
            keys.set("open", json.dumps(["", PROTOCOL]))
        say_gone(keys, self._at)


def say_gone(keys: Any, at: Place) -> None:
    """Tell the neighbours that connect, or soon will, that this rank does not."""
    keys.set(f"at/{at.rank}", json.dumps(None))
    if at.rank:
        keys.set(f"lacks/{parent_of(at.rank)}", at.name(at.rank))


def connect(store: Any, secret: str, at: Place, wait: float) -> Tree:
    """Connect the ranks that have met. A rank on which this fails reports it with :func:`say_gone`.

    Args:
        store: the keys of the meeting, or of a later attempt.
        secret: of the ranks.
        at: this rank.
        wait: the seconds in which all must have connected.

    Raises:
        MeetingFailed: a neighbour cannot be reached.
        OSError, RuntimeError: of sockets, or of the store.
    """
    until = time.monotonic() + wait
    parent: socket.socket | None = None
    children: dict[int, socket.socket] = {}
    left = set(children_of(at.rank, at.size))
    with ExitStack() as opened:
        listener = None
        if left:
            listener = opened.enter_context(_listening(len(left)))
            address = {"hosts": _own_hosts(), "port": listener.getsockname()[1], "machine": _machine()}
            store.set(f"at/{at.rank}", json.dumps(address))
        if at.rank:
            parent = _connected(store, parent_of(at.rank), at, until)
            opened.callback(parent.close)
            parent.sendall(secret.encode() + struct.pack("!I", at.rank))
        while listener is not None and left:
            listener.settimeout(min(max(until - time.monotonic(), 0.001), _LONGEST_PAUSE))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if store.check([f"lacks/{at.rank}"]):
                    raise MeetingFailed(f"{store.get(f'lacks/{at.rank}').decode()} has failed") from None
                if time.monotonic() < until:
                    continue
                who = at.name(min(left))
                raise MeetingFailed(f"cannot connect: {who} has not reached {at.name(at.rank)}") from None
            child = _introduced(connection, secret)
            if child not in left:
                connection.close()  # a stranger
                continue
            left.remove(child)
            children[child] = connection
            opened.callback(connection.close)
        made = Tree(at.rank, at.size, parent, children, at.name)
        opened.pop_all()
        if listener is not None:
            listener.close()
    return made


def _warning(at: Place, why: str) -> Callable[[], None]:
    """Warns once, on ranks 0 and 1, that not all ranks have come for a while: they may never do."""
    begun, said = time.monotonic(), at.rank > 1

    def warn() -> None:
        nonlocal said
        if not said and time.monotonic() - begun > tree.WAITING:
            said = True
            who = at.name(at.rank).capitalize()
            logger.warning("%s has waited %g s for the other ranks, %s together with them.", who, tree.WAITING, why)

    return warn


def _until(is_there: Callable[[], bool], until: float, on_wait: Callable[[], None]) -> bool:
    """Ask the store again and again, less and less often; whether the answer was yes in time."""
    pause = 0.001
    while not is_there():
        if time.monotonic() >= until:
            return False
        on_wait()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def _listening(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _connected(store: Any, parent: int, at: Place, until: float) -> socket.socket:
    if not _until(lambda: store.check([f"at/{parent}"]), until, lambda: None):
        raise MeetingFailed(f"cannot connect: {at.name(parent)} has not given its address")
    address = json.loads(store.get(f"at/{parent}"))
    if address is None:
        raise MeetingFailed(f"{at.name(parent)} has failed")
    hosts = [*(["127.0.0.1"] if address["machine"] == _machine() else []), *address["hosts"]]
    failures: list[str] = []
    for number, host in enumerate(hosts):
        share = max(until - time.monotonic(), 0.01) / (len(hosts) - number)
        try:
            return socket.create_connection((host, address["port"]), timeout=share)
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise MeetingFailed(f"cannot connect: {at.name(at.rank)} cannot reach {at.name(parent)} at {'; '.join(failures)}")


def _introduced(connection: socket.socket, secret: str) -> int:
    """The rank that has connected; -1 for a stranger."""
    connection.settimeout(2.0)
    found = b""
    with suppress(OSError):
        while len(found) < len(secret) + 4 and (more := connection.recv(len(secret) + 4 - len(found))):
            found += more
    known = len(found) == len(secret) + 4 and hmac.compare_digest(found[:-4], secret.encode())
    return int(struct.unpack("!I", found[-4:])[0]) if known else -1


def _machine() -> str:
    """A name that processes of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _own_hosts() -> list[str]:
    """The addresses under which other machines may reach this one, the best first.

    That of the interface which the user names; or the one from which this machine reaches the master, since the
    address of the host's name is 127.0.1.1 on many machines; then that.
    """
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for interface in filter(None, os.environ.get(INTERFACE, "").split(",")):
            with suppress(OSError):  # SIOCGIFADDR
                raw = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
                found.append(socket.inet_ntoa(raw[20:24]))
    if not found and (master := os.environ.get("MASTER_ADDR")):
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()]))
