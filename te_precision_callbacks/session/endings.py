"""The ends of a process that a session must precede: its exit, an uncaught exception, signals.

Python runs the handler of a signal in the main thread, between two instructions, wherever that thread is. Where it is
in a call that does not return, a thread that still receives signals (:class:`Wakeup`) ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any

from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.threads import started

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any]

GRACE = 2.0
"""The seconds in which the main thread must begin to handle SIGTERM."""

LONGEST_STOP = 5.0
"""The seconds after SIGTERM in which the main thread must have stopped the session, if it has begun."""

LONGEST_FLUSH = 3.0
"""The seconds after a signal in which what the host has must be written."""

_LONGEST_MESSAGE = 0.5
_PAUSE = 0.01
_NOTICED = (signal.SIGTERM, signal.SIGUSR1)
"""Of SIGUSR1, Slurm's usual notice before it ends a job, a session hears only where the script has set a handler."""

_CREDENTIALS = struct.Struct("3i")
"""Linux, unix(7): process, user and group of the sender, which the kernel writes."""

_END = 0
"""No signal has this number."""

_LONGEST_END = 0.1
"""The seconds to wait for the thread, which keeps the session alive; it may be in the function that it calls."""


class Terminated(SessionError):
    """SIGTERM ends the process, as it ends those of all ranks: nothing has failed in this one."""


class ProcessEnded(SessionError):
    """The process has ended without an exception before the session was stopped."""


class ProcessEnds:
    """Stops a session before its process ends: at the exit, by SIGTERM, or by an uncaught exception.

    Args:
        stop: stops the session; called with the exception that ends the process.
        release: removes what a stopped session has left in place.
        flush: writes what was handed over to the log and the records, in so many seconds.
        at_sigterm: whether to handle SIGTERM, if the script has set no handler for it.

    Attributes:
        termination: what acts at SIGTERM and SIGUSR1.
    """

    def __init__(
        self,
        stop: Callable[[BaseException], None],
        release: Callable[[], None],
        flush: Callable[[float], Any],
        *,
        at_sigterm: bool,
    ) -> None:
        self._stop = stop
        self._release = release
        # Runs also at the end of a spawned process, which calls no atexit function, and whose trainer calls no hook.
        self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=100)
        self.termination = Termination(
            lambda: self._stop_before_the_end(
                Terminated("The process was ended by SIGTERM while the session was running.")
            ),
            flush,
            ends=at_sigterm,
        )
        self._uncaught = Uncaught(self._stop_before_the_end)

    def forget_exceptions(self) -> None:
        """Ignore exceptions from now on: the session has stopped."""
        self._uncaught.remove()

    def forget_exit(self) -> None:
        """Do nothing at the exit from now on: nothing is left in place."""
        self._at_exit.cancel()

    def _stop_at_exit(self) -> None:
        self._release()
        self._stop(ProcessEnded("The process ended before the session was stopped."))

    def _stop_before_the_end(self, error: BaseException) -> None:
        """Stop because an error ends the process; a failure here must not hide that error."""
        try:
            self._stop(error)
        except Exception as failure:
            logger.error(
                "The session could not be stopped after %s. What its files have so far stays readable.",
                type(error).__name__,
                exc_info=failure,
            )


class Uncaught:
    """Calls a function before Python shows an exception that ends the process.

    A function that runs at the exit of the process would log its messages below the traceback, which has been shown by
    then. At an interactive prompt the process continues after an exception, and the function is not called.

    Args:
        before: called with the exception; it must not raise.
    """

    def __init__(self, before: Callable[[BaseException], None]) -> None:
        self._before: Callable[[BaseException], None] | None = before
        self._shown_by = sys.excepthook
        sys.excepthook = self._show

    def remove(self) -> None:
        """Stop acting; a hook that other code has set around this one since then stays."""
        if sys.excepthook == self._show:
            sys.excepthook = self._shown_by
        self._before = None

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        prompted = bool(sys.flags.interactive) or hasattr(sys, "ps1")
        try:
            if self._before is not None and not prompted and threading.current_thread() is threading.main_thread():
                self._before(error)
        finally:
            self._shown_by(kind, error, trace)
            if isinstance(error, KeyboardInterrupt):
                _end_by_sigint()


def _end_by_sigint() -> None:
    """Let Python end the process by SIGINT after an uncaught Ctrl-C, as shells and schedulers expect.

    Python does so if the source text that it ran last has ended with KeyboardInterrupt (3.11, ``Python/pythonrun.c:
    run_eval_code_obj``). What the end of a session imports runs texts, such as those of ``collections.namedtuple``.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


class Uninterrupted:
    """A block that Ctrl-C interrupts only in parts that allow it; other signals are handled at the end of the block.

    with Uninterrupted(termination) as guard:
        try:
            with guard.interruptible():
                ...         # may wait: Ctrl-C ends it
        finally:
            ...             # runs to its end

    An interruption ends the part in which it comes, or, at the moment in which a part ends, the block around it. So
    ``finally`` is always reached, and runs to its end. SIGTERM waits for the end of the block. Outside the main thread
    the block does nothing.

    Args:
        termination: the handler of SIGTERM until the end of the block.
    """

    def __init__(self, termination: Termination | None) -> None:
        self._termination = termination
        self._handlers: dict[int, _Handler] = {}
        self._came: list[int] = []
        self._may_interrupt = False

    def __enter__(self) -> Uninterrupted:
        if threading.current_thread() is threading.main_thread():
            if self._termination is not None:
                self._termination.begin_stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in reversed(self._handlers.items()):  # Ctrl-C last: it may come again at once
            if number == signal.SIGINT and self._termination is not None:
                self._termination.remove()
            signal.signal(number, handler)
            if number in self._came:
                handler(number, None)
        if self._termination is not None:
            self._termination.remove()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A part that Ctrl-C may interrupt."""
        try:
            self._may_interrupt = True
            yield
        finally:
            self._may_interrupt = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt and number == signal.SIGINT:
            self._may_interrupt = False  # code after the part, on the way out, is not interrupted again
            self._handlers[number](number, frame)
            self._may_interrupt = True  # the handler has raised nothing
        else:
            self._came.append(number)


class Termination:
    """Calls a function before SIGTERM ends the process, if the signal would end it at once.

    It acts only in the main thread, where Python lets handlers be set, and only if no other handler is set. The process
    still ends by the signal, with its exit status. If the main thread has not begun in :data:`GRACE` seconds, or has
    not ended in :data:`LONGEST_STOP`, a thread ends the process; it cannot while C code runs that holds Python's lock.

    Where others handle SIGTERM, and SIGUSR1, nothing of theirs is changed: a thread writes what the host has.

    Args:
        before: the function; it must not raise.
        flush: writes what the host has, in so many seconds; called in a separate thread.
        ends: whether to handle SIGTERM.

    Attributes:
        came: whether SIGTERM has come, and ends the process.
    """

    def __init__(self, before: Callable[[], None], flush: Callable[[float], Any], *, ends: bool) -> None:
        self.came = False
        self._before = before
        self._flush = flush
        self._process = os.getpid()
        self._turn = threading.Lock()  # of whoever ends the process: never given back
        self._is_stopping = False
        self._installed = (
            ends
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        self._set_action = _of_c_library() if self._installed else None
        self._wakeup = Wakeup(self._hear)
        if self._installed:
            signal.signal(signal.SIGTERM, self._handle)

    def begin_stop(self) -> None:
        """Take note that the main thread stops the session: a SIGTERM that comes now waits for it."""
        self._is_stopping = self._is_set

    def remove(self) -> None:
        """Leave the signal to the system again, unless other code has set a handler since."""
        self._wakeup.remove()
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and self._is_set:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def _is_set(self) -> bool:
        return self._installed and signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_own = os.getpid() == self._process  # and not a forked process, which ends at once
        if is_own and not self._turn.acquire(blocking=False):
            return  # it has come again, or the thread is about to end the process
        try:
            if is_own:
                self.came = True
                self._before()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    # ------------------------------------------------------------------ in the thread that hears of signals

    def _hear(self, number: int) -> None:
        if number not in _NOTICED:
            return
        flushed = started("signal", lambda: self._flush(LONGEST_FLUSH))
        if number == signal.SIGTERM and (self._is_set or self._is_stopping):
            self.came = True
            self._end_in_time(time.monotonic(), flushed)

    def _end_in_time(self, came: float, flushed: threading.Thread | None) -> None:
        """End the process, unless the main thread does so before."""
        while not (self._has_begun or time.monotonic() > came + GRACE):
            time.sleep(_PAUSE)
        if not self._is_stopping and self._turn.acquire(blocking=False):
            _wait_for(flushed, came + LONGEST_FLUSH)
            _wait_for(started("signal", _say_where), time.monotonic() + _LONGEST_MESSAGE)
        else:
            time.sleep(max(0.0, came + LONGEST_STOP - time.monotonic()))
            _wait_for(started("signal", _say_unfinished), time.monotonic() + _LONGEST_MESSAGE)
        if self._set_action is not None:
            self._set_action(signal.SIGTERM, 0)  # Python's own function is for the main thread alone
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _has_begun(self) -> bool:
        return self._is_stopping or self._turn.locked()


def _wait_for(thread: threading.Thread | None, until: float) -> None:
    if thread is not None:
        thread.join(max(0.0, until - time.monotonic()))


def _of_c_library() -> Callable[[int, int], Any]:
    """``signal`` of the C library; 0 is the default action."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    found: Callable[[int, int], Any] = function
    return found


def _say_where() -> None:
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and "site-packages" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    places = dict.fromkeys(f"{at.f_code.co_filename}:{at.f_lineno}" for at in (frame, innermost) if at is not None)
    logger.warning(
        "SIGTERM ends the process. Its main thread is in a call that does not return (%s), so the session was not"
        " stopped. The log and the records have the steps that are complete, as far as the disk has taken them. The"
        " statistics gathered since the last step are lost.",
        ", in ".join(places) or "at an unknown place",
    )


def _say_unfinished() -> None:
    logger.warning(
        "SIGTERM ends the process: stop() has not ended within %.0f seconds of it, and what it was writing may be"
        " incomplete.",
        LONGEST_STOP,
    )


class Wakeup:
    """Calls a function in a daemon thread when a signal comes that has a handler of Python's.

    Python runs its handlers between two instructions of the main thread: not while that waits in C++ for another
    rank, a GPU or a store. But it also writes the signal's number into a descriptor (``signal.set_wakeup_fd``), at
    once and in whichever thread the signal came. Nobody's handler is replaced for this, and no signal is blocked: a
    thread that waits for signals (``sigwait``) would have to block them in all threads that exist, also in those of
    C++, and programs that are started inherit what is blocked, so that a SIGTERM would not end them.

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
        with suppress(ValueError, OSError):  # it was closed meanwhile
            signal.set_wakeup_fd(again)
        with suppress(OSError):
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
            with suppress(OSError):  # it is full
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
