"""Signals: Ctrl-C while a session ends, SIGTERM if no other handler is set, and notice of an end that others handle.

Python runs the handler of a signal in the main thread, between two instructions, wherever that thread is. Where it is
in a call that does not return, a thread that hears of signals all the same (``wakeup.py``) ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from te_precision_callbacks.base.threads import started
from te_precision_callbacks.session.wakeup import Wakeup

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
