"""The private gloo process group for messages among the ranks of a run.

In the training's process groups, a message could pair with a gradient if ranks disagree. :class:`Group` therefore
constructs a ``ProcessGroupGloo`` over keys of the training's store, as TorchFT does; ``new_group`` would change the
training's group counters.

Three properties of gloo need care (torch 2.13):

- If ranks send different sizes, gloo aborts the process. Callers agree on sizes before they send a payload.
- ``abort`` and ``shutdown`` do not close connections, and the destructor waits for running operations.
  :meth:`Group.close` therefore shuts down the sockets, which ends the operations on all ranks.
- A forked process, such as a DataLoader worker, inherits the sockets. It closes its copies, and never runs the
  destructor, which would wait for threads that do not exist in it.

Operations are polled, since ``Work.wait`` blocks Python's signal handlers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface; torch's own gloo groups use it too."""

_LONGEST_OPERATION = timedelta(minutes=10)
"""Timeout of an operation; callers give up earlier."""

_LONGEST_PAUSE = 0.005
_OPEN: weakref.WeakSet[Group] = weakref.WeakSet()

AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])


def devices() -> list[Any]:
    """Create gloo devices on the user's interfaces, the address that reaches ``MASTER_ADDR``, or torch's default."""
    create = dist.ProcessGroupGloo.create_device
    names = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    if names:
        return [create(interface=name) for name in names]
    try:
        family, kind, _, _, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(master)
            return [create(hostname=probe.getsockname()[0])]
    except (KeyError, OSError):
        return [dist.ProcessGroupGloo.create_default_device()]


class Group:
    """The connections of a rank to all others.

    Args:
        store: a store with keys for this group only.
        timeout: seconds for all ranks to connect.

    Raises:
        RuntimeError: a rank does not connect.
    """

    def __init__(self, store: Any, rank: int, size: int, devices: Sequence[Any], timeout: float) -> None:
        former_inodes = _sockets().values()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = list(devices)
        options._threads = 1
        options._timeout = timedelta(seconds=timeout)
        self._gathers = size if rank == 0 else 0
        self._running: list[Any] = []
        self._gloo: Any = gloo(store, rank, size, options)
        self._sockets = _connections(
            descriptor for descriptor, inode in _sockets().items() if inode not in former_inodes
        )
        if len(self._sockets) != size - 1:  # another thread has opened sockets too; they cannot be told apart
            self._sockets = {}
        _OPEN.add(self)

    # ------------------------------------------------------------------ operations, in place; the default root is 0

    def reduce(self, array: npt.NDArray[Any], operation: Any) -> None:
        """Start a sum or maximum over the ranks, in place, bit-identical on all ranks."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        self._start(self._gloo.allreduce, [torch.from_numpy(array)], options)

    def gather(self, array: AnyArray) -> list[AnyArray]:
        """Start a gather of arrays of equal size; the returned arrays are filled on rank 0."""
        gathered = [np.empty_like(array) for _ in range(self._gathers)]
        tensors = [list(map(torch.from_numpy, gathered))] if gathered else []
        self._start(self._gloo.gather, tensors, [torch.from_numpy(array)], dist.GatherOptions())
        return gathered

    def broadcast(self, array: npt.NDArray[Any]) -> None:
        self._start(self._gloo.broadcast, [torch.from_numpy(array)], dist.BroadcastOptions())

    def _start(self, operation: Callable[..., Any], *arguments: Any) -> None:
        arguments[-1].timeout = _LONGEST_OPERATION
        self._running.append(operation(*arguments))

    def finish(self, check: Callable[[], None]) -> None:
        """Wait for all started operations; ``check`` is called repeatedly, and may raise an exception to give up.

        Raises:
            RuntimeError: an operation failed, because another rank has closed its group or has died.
        """
        begun = time.monotonic()
        while not all(work.is_completed() for work in self._running):
            check()
            time.sleep(min((time.monotonic() - begun) / 8, _LONGEST_PAUSE))
        done = self._running
        self._running = []
        for work in done:
            work.wait()

    # ------------------------------------------------------------------ the end

    @property
    def is_whole(self) -> bool:
        """True if all connections are open, as far as this process can detect; False in a forked process."""
        return self._gloo is not None and _connections(self._sockets) == self._sockets

    def close(self) -> None:
        gloo = self._gloo
        self._gloo = None
        for descriptor, ends in self._sockets.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if _ends(connection) == ends:  # otherwise gloo has closed it, and the descriptor is another file's
                    connection.shutdown(socket.SHUT_RDWR)
        if self._running and not self._sockets:  # the destructor would wait for the operations
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_wait_for_operations, args=(gloo, self._running), daemon=True).start()
        self._running = []

    def forget(self) -> None:
        for descriptor, ends in _connections(self._sockets).items():
            if self._sockets[descriptor] == ends:
                os.close(descriptor)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))  # so that its destructor never runs
        self._gloo = None
        self._sockets = {}


def _wait_for_operations(gloo: Any, running: Sequence[Any]) -> None:
    for work in running:
        with contextlib.suppress(RuntimeError):
            work.wait()


def _sockets() -> dict[int, str]:
    """Return descriptor -> inode of this process's sockets; empty if the system does not list them."""
    sockets = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                inode = os.readlink(f"/proc/self/fd/{name}")
                if inode.startswith("socket:"):
                    sockets[int(name)] = inode
    return sockets


_Ends = tuple[Any, Any]


def _connections(descriptors: Iterable[int]) -> dict[int, _Ends]:
    connections = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connections[descriptor] = _ends(connection)
    return connections


def _ends(connection: socket.socket) -> _Ends:
    return connection.getsockname(), connection.getpeername()


def _forget_inherited() -> None:
    for group in list(_OPEN):
        group.forget()


os.register_at_fork(after_in_child=_forget_inherited)
