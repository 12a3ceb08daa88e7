"""A thread that writes jobs of the training thread, every few seconds.

The training thread touches no file and never waits for a disk, except in ``wait`` and ``finish``, which have a
deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

FLUSH_SECONDS = 2.0
"""The seconds from one writing to the next."""

LONGEST_STILL = 10.0
"""The seconds without any progress after which ``finish`` no longer waits for the disk."""

_PAUSE = 0.01
"""The seconds between two writings of a thread that is to finish, and waits for another process."""

logger = logging.getLogger(__name__)

JobT = TypeVar("JobT")
JobT_contra = TypeVar("JobT_contra", contravariant=True)


class Writing(Protocol[JobT_contra]):
    """Writes jobs, in the thread. An exception ends the thread, and drops queued jobs."""

    def take(self, job: JobT_contra) -> bool:
        """Write a job, or keep it for :meth:`flush`; False to get it again after the next pause."""

    def flush(self) -> None:
        """Write the jobs that were taken; called when the queue is empty."""

    def leave(self) -> None:
        """Close the files, after everything is written or writing has failed."""


class WriterThread(Generic[JobT]):
    """A daemon thread; the interpreter would wait for a normal thread before all else at its end.

    Args:
        what: the name of the file, for messages and for the thread.
        writing: writes the jobs.
        most_waiting: the number of values that may wait; a job with values is dropped while more wait.

    Attributes:
        failure: the exception that has ended the thread, if any.
    """

    def __init__(self, what: str, writing: Writing[JobT], most_waiting: float = math.inf) -> None:
        self.failure: BaseException | None = None
        self._what = what
        self._writing = writing
        self._most_waiting = most_waiting
        self._process = os.getpid()
        self._jobs: deque[tuple[JobT, int]] = deque()
        self._asked: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # also in the handler of a signal
        self._is_to_finish = False
        self._thread: threading.Thread | None = None
        self._is_reported = False
        self._is_flushed = True  # what was taken; changed by this thread alone
        self._given = 0  # numbers, counted by the training's thread
        self._taken = 0  # numbers, counted by this thread
        self._progress = 0
        self._dropped: list[int] = []  # the numbers of each job

    @property
    def queued(self) -> int:
        """The number of values in memory: of jobs that wait, or are being taken."""
        return 0 if self.failure is not None else self._given - self._taken

    def put(self, job: JobT, count: int = 0) -> bool:
        """Hand over a job with ``count`` numbers; a job without numbers is never dropped.

        Returns:
            False if the job is dropped because the disk is too slow. No-op after a failure, and in a forked process.
        """
        if self.failure is not None or os.getpid() != self._process:
            return True
        if count and self.queued > self._most_waiting:
            self._drop(count, self.queued)
            return False
        self._jobs.append((job, count))
        self._given += count
        if self._thread is None:
            self._start()
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"te-precision {self._what}", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: finish() writes
            thread.start()
            self._thread = thread

    def _drop(self, count: int, queued: int) -> None:
        self._dropped.append(count)
        if len(self._dropped) == 1:
            logger.warning(
                "The disk is slower than the training: %s values are waiting for the %s, so the %s values of this"
                " step, and maybe of later steps, are dropped. The total is logged when the session ends.",
                f"{queued:,}",
                self._what,
                f"{count:,}",
            )

    def hurry(self) -> Callable[[], bool]:
        """Write queued jobs now. Any thread and any signal handler may call this.

        Returns:
            A function that returns whether they are written; always False after a failure.
        """
        written = threading.Event()
        self._asked.put(written)
        # In this order: a job is taken, then flushed.
        return lambda: written.is_set() or (not self._jobs and self._is_flushed and self.failure is None)

    def wait(self, is_done: Callable[[], bool], still: float = math.inf) -> bool:
        """Wait until a condition holds, or the thread has ended; False after ``still`` seconds without progress."""
        seen, since = self._progress, time.monotonic()
        while self._thread is not None and self._thread.is_alive() and not is_done():
            if self._progress != seen:
                seen, since = self._progress, time.monotonic()
            if time.monotonic() - since > still:
                return False
            self._thread.join(_PAUSE)
        return True

    def finish(self, still: float | None = None) -> None:
        """Wait until everything is written, as long as there is progress within ``still`` or :data:`LONGEST_STILL`
        seconds.

        Otherwise an error is logged, and the thread may still write. After an interruption, a second call continues to
        wait.
        """
        if os.getpid() != self._process:
            return
        self._is_to_finish = True
        self.hurry()
        if self.wait(lambda: False, LONGEST_STILL if still is None else still) and self._jobs and self.failure is None:
            self._run()
        dropped, self._dropped = self._dropped, []
        if dropped:
            logger.warning(
                "%s values of %s steps are missing in the %s, because the disk was slower than the training. Collect"
                " less often (freq), or set log_dir= to a faster disk.",
                f"{sum(dropped):,}",
                f"{len(dropped):,}",
                self._what,
            )
        if self._thread is not None and self._thread.is_alive():
            logger.error(
                "The disk does not respond, so data waiting for the %s may be lost. The session ends now. Check the"
                " disk of log_dir=.",
                self._what,
            )

    def take_failure(self) -> BaseException | None:
        if self.failure is None or self._is_reported:
            return None
        self._is_reported = True
        return self.failure

    # ------------------------------------------------------------------ in the thread

    def note_progress(self) -> None:
        self._progress += 1

    def _run(self) -> None:
        try:
            while True:
                asked = self._wait()
                is_to_finish = self._is_to_finish
                self._write_waiting()
                for written in asked:
                    written.set()
                if is_to_finish and not self._jobs:
                    self._writing.leave()
                    return
        except BaseException as error:  # SystemExit, no memory, ...: in a thread nobody else would see it
            self.failure = error
            self._jobs.clear()
            with contextlib.suppress(Exception):  # it is known to fail
                self._writing.leave()

    def _wait(self) -> Iterable[threading.Event]:
        asked = []
        with contextlib.suppress(queue.Empty):
            asked.append(self._asked.get(timeout=_PAUSE if self._is_to_finish else FLUSH_SECONDS))
            while True:
                asked.append(self._asked.get_nowait())
        return asked

    def _write_waiting(self) -> None:
        while self._jobs:
            job, count = self._jobs[0]
            self._is_flushed = False
            if not self._writing.take(job):
                break
            self._jobs.popleft()
            self._taken += count
            self.note_progress()
        self._writing.flush()
        self._is_flushed = True
        self.note_progress()


def all_within(seconds: float, written: Iterable[Callable[[], bool]]) -> bool:
    until = time.monotonic() + seconds
    left = list(written)
    while left and time.monotonic() < until:
        left = [is_written for is_written in left if not is_written()]
        if left:
            time.sleep(_PAUSE)
    return not left
