"""Signals: Ctrl-C while a session ends, and SIGTERM if no other handler is set.

Python runs the handler of a signal in the main thread, between two instructions, wherever that thread is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """A block that Ctrl-C interrupts in those of its parts alone that allow it; what else comes is handled at its end.

    with Uninterrupted(termination) as guard:
        try:
            with guard.interruptible():
                ...         # may wait: Ctrl-C ends it
        finally:
            ...             # runs to its end

    Each interruption ends the part in which it comes, or the block around it in the moment in which the part ends. So
    ``finally`` is reached in any case, and runs whole. SIGTERM waits for the end of the block. In another thread than
    the main one there is nothing to do.

    Args:
        termination: what takes SIGTERM until the end of the block.
    """

    def __init__(self, termination: Termination | None) -> None:
        self._termination = termination
        self._handlers: dict[int, _Handler] = {}
        self._came: list[int] = []
        self._may_interrupt = False

    def __enter__(self) -> Uninterrupted:
        if threading.current_thread() is threading.main_thread():
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
            self._may_interrupt = False  # what comes behind the part, on the way out of it, is not interrupted again
            self._handlers[number](number, frame)
            self._may_interrupt = True  # the handler has raised nothing
        else:
            self._came.append(number)


class Termination:
    """Does something before SIGTERM ends the process, where the signal would end it at once.

    Only in the main thread, where Python lets handlers be set, and where nobody has set one. The process ends by the
    signal all the same, with the exit status of one.

    Args:
        before: what is done; it must not raise.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._process = os.getpid()
        self._installed = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._installed:
            signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Leave the signal to the system again, unless somebody else has taken it since."""
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == self._process:
                self._before()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
