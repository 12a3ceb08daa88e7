"""Hears of signals in a thread, while the main thread is in a call that does not return.

    wakeup = Wakeup(hear)       # hear(number) runs in a daemon thread, for each signal that has a handler of Python's
    wakeup.remove()

Python runs its handlers between two instructions of the main thread: not while that waits in C++ for another rank, a
GPU or a store. But it also writes the signal's number into a descriptor (``signal.set_wakeup_fd``), at once and in
whichever thread the signal came. Nobody's handler is replaced for this, and no signal is blocked: a thread that waits
for signals (``sigwait``) would have to block them in all threads that exist, also in those of C++, and programs that
are started inherit what is blocked, so that a SIGTERM would not end them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

from te_precision_callbacks.base.threads import started

_CREDENTIALS = struct.Struct("3i")
"""Linux, unix(7): process, user and group of the sender, which the kernel writes."""

_END = 0
"""No signal has this number."""

_LONGEST_END = 0.1
"""The seconds to wait for the thread, which keeps the session alive; it may be in the function that it calls."""


class Wakeup:
    """Calls a function in a daemon thread when a signal comes that has a handler of Python's.

    It acts only where it is made in the main thread, and on Linux. A forked process has the same descriptor and no such
    thread: what its signals write has another sender, and is ignored.

    Args:
        hear: called with the signal's number.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._socket: socket.socket | None = None
        if threading.current_thread() is threading.main_thread() and hasattr(socket, "SO_PASSCRED"):
            self._begin()

    def _begin(self) -> None:
        """Listen; a descriptor that somebody else has set, such as asyncio's, gets each number from here."""
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        writer.setblocking(False)
        thread = started("signals", lambda: self._listen(reader))
        if thread is None:  # signals are handled as without it
            reader.close()
            writer.close()
            return
        self._socket, self._thread = writer, thread
        self._former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._former_file = _file_of(self._former)

    def remove(self) -> None:
        """Stop listening, and set the former descriptor again unless other code has set one since. Only the main thread
        can do that; a second call does nothing."""
        if self._socket is None or threading.current_thread() is not threading.main_thread():
            return
        writer, self._socket = self._socket, None
        found = signal.set_wakeup_fd(-1)
        again = found if found != writer.fileno() else self._former if self._former_is_there() else -1
        with contextlib.suppress(ValueError, OSError):  # it was closed meanwhile
            signal.set_wakeup_fd(again)
        with contextlib.suppress(OSError):
            writer.send(bytes([_END]))
        writer.close()
        self._thread.join(_LONGEST_END)

    # ------------------------------------------------------------------ in the thread

    def _listen(self, reader: socket.socket) -> None:
        process = os.getpid()
        with reader:
            while True:
                told, ancillary, _, _ = reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                if _sender(ancillary) != process:
                    continue
                if not told or told[0] == _END:
                    return
                self._pass_on(told)
                self._hear(told[0])

    def _pass_on(self, told: bytes) -> None:
        if self._former_is_there():
            with contextlib.suppress(OSError):  # it is full
                os.write(self._former, told)

    def _former_is_there(self) -> bool:
        """Whether the former descriptor is still what it was: the number of one that was closed is given again."""
        return self._former != -1 and _file_of(self._former) == self._former_file


def _sender(ancillary: Iterable[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size:
            process: int = _CREDENTIALS.unpack(data)[0]
            return process
    return None


def _file_of(descriptor: int) -> Any:
    """What identifies the open file of a descriptor; None if there is none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
