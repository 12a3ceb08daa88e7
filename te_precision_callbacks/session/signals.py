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
    still ends by the signal, with its exit status.

    Args:
        before: the function; it must not raise.
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
        """Leave the signal to the system again, unless other code has set a handler since."""
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
