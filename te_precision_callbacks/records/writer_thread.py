"""A thread that writes what the training's thread hands over, every few seconds.

thread = WriterThread("te-precision records", write)  # write(jobs) takes what waits from the left of a deque
thread.put(job)         # returns at once
thread.finish()         # waits until write() has returned True, as it does once it has taken the last job
thread.take_failure()   # the exception that has ended the thread, if any
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

FLUSH_SECONDS = 2.0
"""The seconds from one writing to the next."""

_PAUSE = 0.01
"""The seconds between two writings of a thread that is to finish, and waits for another process."""

JobT = TypeVar("JobT")


class WriterThread(Generic[JobT]):
    """A daemon thread, since the interpreter would wait for any other one before all else at its end.

    Args:
        name: of the thread.
        write: writes what waits; returns whether that was the last. An exception ends the thread, and drops what waits.
    """

    def __init__(self, name: str, write: Callable[[deque[JobT]], bool]) -> None:
        self._name = name
        self._write = write
        self._jobs: deque[JobT] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def put(self, job: JobT) -> None:
        """Hand over a job; nothing happens after a failure."""
        if self._failure is not None:
            return
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending, and no longer starts threads: finish() writes
                self._thread = None

    def finish(self) -> None:
        """Wait until everything is written; an interruption may end the waiting, and a second call goes on with it."""
        self._wake.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
        if self._jobs:
            self._run()

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended the thread."""
        return self._failure is not None

    def take_failure(self) -> BaseException | None:
        """The exception that has ended the thread; None the next time."""
        failure, self._failure = self._failure, None
        return failure

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                hurried = self._wake.wait(FLUSH_SECONDS)
                ended = self._write(self._jobs)
                if hurried and not ended:
                    time.sleep(_PAUSE)
        except BaseException as error:  # SystemExit, no memory, ...: in a thread nobody else would see it
            self._failure = error
            self._jobs.clear()
