"""Ends a process at SIGTERM while its main thread is blocked in a call, such as a collective that hangs.

Python runs the handler of a signal in the main thread, so a blocked main thread never handles it. Without a handler,
SIGTERM would have ended the process at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import ClassVar

BLOCKED_SECONDS = 5.0
"""Time after SIGTERM in which the main thread has to run the handler."""

LONGEST_END = 20.0
"""Time in seconds after which the process ends, even if its end is not complete. With :data:`BLOCKED_SECONDS`, less
than the 30 seconds after which torchrun and Slurm kill a process."""

_QUIT = b"\0"


class BlockedMainThread:
    """A thread that receives SIGTERM through a pipe: Python writes the number of each signal into it.

    Does nothing if other code, such as asyncio, has set a wakeup descriptor.

    Args:
        terminate: called in another thread if the main thread does not run the handler.
        is_handled: whether the process still has the handler of SIGTERM that sets ``handler_runs``.

    Attributes:
        handler_runs: to be set by the handler.
    """

    _running: ClassVar[BlockedMainThread | None] = None

    def __init__(self, terminate: Callable[[], None], is_handled: Callable[[], bool]) -> None:
        self.handler_runs = threading.Event()
        self._terminate = terminate
        self._is_handled = is_handled
        self._pipe = -1

    def begin(self) -> None:
        """Start the thread. Only possible in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = writing
        BlockedMainThread._running = self
        threading.Thread(target=self._run, args=(reading,), name="te-precision SIGTERM", daemon=True).start()

    def end(self) -> None:
        """End the thread; in another thread than the main thread, which ends the process, a no-op."""
        if self._pipe == -1 or threading.current_thread() is not threading.main_thread():
            return
        self._leave_pipe()
        os.write(self._pipe, _QUIT)
        os.close(self._pipe)
        self._pipe = -1
        BlockedMainThread._running = None

    def _leave_pipe(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current != self._pipe:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    @classmethod
    def leave_in_child(cls) -> None:
        """In a forked process: a signal to it must not arrive in the pipe of its parent."""
        if cls._running is not None and cls._running._pipe != -1:
            cls._running._leave_pipe()
            cls._running._pipe = -1

    def _run(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            if signal.SIGTERM in numbers and self._is_handled():
                self._end_process()
            if _QUIT in numbers:
                break
        os.close(reading)

    def _end_process(self) -> None:
        if self.handler_runs.wait(BLOCKED_SECONDS):
            threading.Event().wait(LONGEST_END)  # the handler ends the process
        else:
            ending = threading.Thread(target=self._terminate, name="te-precision end", daemon=True)
            ending.start()
            ending.join(LONGEST_END)
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal(signal.SIGTERM, None)  # signal.signal works only in the main thread
        os.kill(os.getpid(), signal.SIGTERM)


os.register_at_fork(after_in_child=BlockedMainThread.leave_in_child)
