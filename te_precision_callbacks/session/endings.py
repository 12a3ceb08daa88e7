"""The ends of a process that a session must precede: its exit, an uncaught exception, SIGTERM.

Python runs the handler of a signal in the main thread, between two instructions. If the main thread is in a call that
does not return, a thread that still receives the signal ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any

from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.threads import started

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any]

GRACE = 2.0
"""Seconds in which the main thread must begin to handle SIGTERM."""

LONGEST_STOP = 5.0
"""Seconds in which the main thread must have stopped the session, once it has begun."""

LONGEST_FLUSH = 3.0
"""Seconds after SIGTERM in which the log and the records must be written."""

_LONGEST_MESSAGE = 0.5
_LONGEST_END = 0.1
_PAUSE = 0.01


class Terminated(SessionError):
    """SIGTERM ends the process, as it ends the processes of all ranks: nothing has failed in this one."""


class ProcessEnded(SessionError):
    """The process has ended without an exception before the session was stopped."""


class ProcessEnds:
    """Stops a session before its process ends: at the exit, by SIGTERM, or by an uncaught exception.

    Args:
        stop: called with the exception that ends the process.
        flush: writes the log and the records within the given seconds.

    Attributes:
        termination: the handler of SIGTERM; None if another handler is set, or outside the main thread.
    """

    def __init__(
        self,
        stop: Callable[[BaseException], None],
        flush: Callable[[float], Any],
        *,
        at_sigterm: bool,
    ) -> None:
        self._stop = stop
        # Runs also at the end of a spawned process, which calls no atexit function.
        ended = ProcessEnded("The process ended before the session was stopped.")
        self._at_exit = Finalize(None, stop, args=(ended,), exitpriority=100)
        is_free = _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        by_signal = Terminated("The process was ended by SIGTERM while the session was running.")
        at_signal = functools.partial(self._stop_before_the_end, by_signal)
        self.termination = Termination(at_signal, flush) if at_sigterm and is_free else None
        self._uncaught = Uncaught(self._stop_before_the_end)

    @property
    def is_terminated(self) -> bool:
        return self.termination is not None and self.termination.came

    def forget(self) -> None:
        self._uncaught.remove()
        self._at_exit.cancel()

    def _stop_before_the_end(self, error: BaseException) -> None:
        """A failure here must not hide the error that ends the process."""
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

    A function that runs at the exit of the process would come too late for notes on the exception, and log below the
    traceback. At an interactive prompt the process continues after an exception, and the function is not called.
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
            if self._before is not None and not prompted and _is_main_thread():
                self._before(error)
        finally:
            self._shown_by(kind, error, trace)
            if isinstance(error, KeyboardInterrupt):
                _end_by_sigint()


def _end_by_sigint() -> None:
    """Let Python end the process by SIGINT after an uncaught Ctrl-C, as shells and schedulers expect.

    Python does so if the last source text that it ran ended with KeyboardInterrupt (3.11, ``Python/pythonrun.c:
    run_eval_code_obj``). Imports at the end of a session run texts, such as in ``collections.namedtuple``.
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

    An interruption ends the current part, or, if it comes between two parts, the block around it. So ``finally`` always
    runs to its end. SIGTERM waits for the end of the block. Outside the main thread the block does nothing.

    Args:
        termination: the handler of SIGTERM until the end of the block.
    """

    def __init__(self, termination: Termination | None) -> None:
        self._termination = termination
        self._handlers: dict[int, _Handler] = {}
        self._came: list[int] = []
        self._may_interrupt = False

    def __enter__(self) -> Uninterrupted:
        if _is_main_thread():
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
    """Stops a session before SIGTERM ends the process, which still ends by the signal, with its exit status.

    If the main thread has not begun in :data:`GRACE` seconds, or has not ended in :data:`LONGEST_STOP`, a thread ends
    the process. It cannot while C code holds Python's lock. Made in the main thread only.
    """

    def __init__(self, stop: Callable[[], None], flush: Callable[[float], Any]) -> None:
        self.came = False
        self._stop = stop
        self._flush = flush
        self._process = os.getpid()
        self._has_begun = self._is_handling = False
        self._writer: int | None = None
        self._thread: threading.Thread | None = None
        self._set_action = _signal_of_c()
        signal.signal(signal.SIGTERM, self._handle)
        self._watch()

    def begin_stop(self) -> None:
        """Note that the main thread stops the session: a SIGTERM that comes now waits for it."""
        self._has_begun = self._is_set

    def remove(self) -> None:
        """Restore the default action, unless other code has set a handler since."""
        if _is_main_thread():
            self.unwatch()
            if self._is_set:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def _is_set(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_own = os.getpid() == self._process  # a forked process ends at once
        if is_own and self._is_handling:
            return  # it has come again
        self._is_handling = True
        try:
            if is_own:
                self.came = self._has_begun = True
                self._stop()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Start the thread.

        Python writes the number of each signal into a descriptor at once, in whichever thread it comes, also while the
        main thread waits in C++ for another rank, a GPU or a store. If other code such as asyncio uses the descriptor,
        there is no thread.
        """
        former = signal.set_wakeup_fd(-1)
        if former != -1:
            signal.set_wakeup_fd(former)
            return
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _WATCHING.add(self)
        self._thread = started("signals", lambda: self._listen(reader))
        if self._thread is None:
            self.unwatch()
            os.close(reader)

    def unwatch(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            if (other := signal.set_wakeup_fd(-1)) != writer:
                signal.set_wakeup_fd(other)
            os.close(writer)
            if self._thread is not None:  # it keeps the session alive
                self._thread.join(_LONGEST_END)

    def _listen(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] == signal.SIGTERM and (self._is_set or self._has_begun):
                    self.came = True
                    self._end_in_time()

    def _end_in_time(self) -> None:
        came = time.monotonic()
        flushed = started("signal", lambda: self._flush(LONGEST_FLUSH))
        while not self._has_begun and time.monotonic() < came + GRACE:
            time.sleep(_PAUSE)
        if self._has_begun:
            time.sleep(LONGEST_STOP)
        elif flushed is not None:
            flushed.join(max(0.0, came + LONGEST_FLUSH - time.monotonic()))
        warning = started("signal", _warn_of_unfinished if self._has_begun else _warn_of_blocked)
        if warning is not None:
            warning.join(_LONGEST_MESSAGE)  # a handler of the log may wait for the main thread
        self._set_action(signal.SIGTERM, 0)
        os.kill(os.getpid(), signal.SIGTERM)


_WATCHING: weakref.WeakSet[Termination] = weakref.WeakSet()


def _unwatch_in_child() -> None:
    """Keep signals of a forked process from this process's thread."""
    for termination in list(_WATCHING):
        termination.unwatch()


os.register_at_fork(after_in_child=_unwatch_in_child)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal_of_c() -> Callable[[int, int], Any]:
    """``signal`` of the C library, which any thread may call; 0 is the default action."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_action: Callable[[int, int], Any] = function
    return set_action


def _warn_of_blocked() -> None:
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and "site-packages" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    places = dict.fromkeys(f"{at.f_code.co_filename}:{at.f_lineno}" for at in (frame, innermost) if at is not None)
    logger.warning(
        "SIGTERM ends the process. Its main thread is in a call that does not return (%s), so the session was not"
        " stopped. The log and the records have all complete steps. The statistics gathered since the last step are"
        " lost.",
        ", in ".join(places) or "at an unknown place",
    )


def _warn_of_unfinished() -> None:
    logger.warning(
        "SIGTERM ends the process: stop() has not ended within %.0f seconds, and its last files may be incomplete.",
        LONGEST_STOP,
    )
