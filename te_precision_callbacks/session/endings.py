"""The ends of a process that a session must precede: its exit, and signals.

Python runs the handler of a signal in the main thread, between two instructions. A main thread in a call that does not
return handles no signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any

from te_precision_callbacks.base.errors import SessionError

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any]


class Terminated(SessionError):
    """SIGTERM ends the process, as it ends the processes of all ranks: nothing has failed in this one."""


class ProcessEnded(SessionError):
    """The process has ended without an exception before the session was stopped."""


class ProcessEnds:
    """Stops a session before its process ends: at the exit, also by an uncaught exception, and by SIGTERM.

    Args:
        stop: called with the exception that ends the process.
        at_sigterm: whether to handle SIGTERM, if no other handler is set. Only the main thread can.

    Attributes:
        is_terminated: whether SIGTERM ends the process.
    """

    def __init__(self, stop: Callable[[BaseException], None], *, at_sigterm: bool) -> None:
        self.is_terminated = False
        self._stop = stop
        self._process = os.getpid()
        # Runs also at the end of a spawned process, which calls no atexit function.
        self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=100)
        if at_sigterm and _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def forget(self) -> None:
        self._at_exit.cancel()

    def leave_sigterm(self) -> None:
        """Restore the default action, unless other code has set a handler since."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stop_at_exit(self) -> None:
        error = uncaught()
        try:
            self._stop_before_the_end(error or ProcessEnded("The process ended before the session was stopped."))
        finally:
            if isinstance(error, KeyboardInterrupt):
                _end_by_sigint()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Stop the session; the process still ends by the signal, with its exit status."""
        is_own = os.getpid() == self._process  # a forked process ends at once
        if is_own and self.is_terminated:
            return  # it has come again
        try:
            if is_own:
                self.is_terminated = True
                self._stop_before_the_end(Terminated("The process was ended by SIGTERM while the session was running."))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

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


def uncaught() -> BaseException | None:
    """Return the exception that ends the process, which Python has shown by now.

    At an interactive prompt the process continues after an exception, so the last one does not end it.
    """
    prompted = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    return None if prompted else getattr(sys, "last_value", None)


def _end_by_sigint() -> None:
    """Let Python end the process by SIGINT after an uncaught Ctrl-C, as shells and schedulers expect.

    Python does so if the last source text that it ran ended with KeyboardInterrupt (3.11, ``Python/pythonrun.c:
    run_eval_code_obj``). Imports at the end of a session run texts, such as in ``collections.namedtuple``.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


class Uninterrupted:
    """A block that Ctrl-C and SIGTERM do not interrupt: they are handled at its end. A second Ctrl-C interrupts it.

    Outside the main thread the block does nothing.

    Args:
        ends: whose handling of SIGTERM ends with the block.
    """

    def __init__(self, ends: ProcessEnds | None = None) -> None:
        self._ends = ends
        self._handlers: dict[int, _Handler] = {}
        self._came: set[int] = set()

    def __enter__(self) -> None:
        if _is_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._take)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(signal.SIGTERM)
        if self._ends is not None:
            self._ends.leave_sigterm()
        self._restore(signal.SIGINT)  # last: Ctrl-C may come again at once

    def _restore(self, number: int) -> None:
        if handler := self._handlers.get(number):
            signal.signal(number, handler)
            if number in self._came:
                handler(number, None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came:
            self._came.remove(number)
            self._handlers[number](number, frame)
        else:
            self._came.add(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
