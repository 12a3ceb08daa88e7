"""A background thread that writes the jobs of the training thread, every few seconds.

The training thread touches no file, and waits for the disk only in ``catch_up``, ``wait`` and ``finish``, which have
timeouts.
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
"""Interval between writes in seconds."""

LONGEST_CATCH_UP = 1.0
"""Timeout in seconds of a step that waits until its records are written."""

LONGEST_STILL = 10.0
"""Timeout in seconds: ``finish`` stops waiting for the disk after this time without progress."""

_PAUSE = 0.01
"""Polling interval in seconds, also between writes of a thread that should finish but waits for another process."""

Wait = Callable[[float], bool]
"""Waits until a time of :func:`time.monotonic` for what is queued; returns whether it was written."""

logger = logging.getLogger(__name__)

JobT = TypeVar("JobT")
JobT_contra = TypeVar("JobT_contra", contravariant=True)


class Writing(Protocol[JobT_contra]):
    """Writes jobs, in the thread. An exception ends the thread, and drops queued jobs."""

    def take(self, job: JobT_contra) -> bool:
        """Write a job, or buffer it for :meth:`flush`; return False to receive it again after the next pause."""

    def flush(self) -> None:
        """Write the buffered jobs; called when the queue is empty."""

    def leave(self) -> None:
        """Close the files, after everything was written or writing has failed."""


class WriterThread(Generic[JobT]):
    """A daemon thread with a queue of jobs. (At its end, the interpreter would first wait for a non-daemon thread.)

    Args:
        what: the name of the file, for messages and for the thread.
        writing: writes the jobs.
        max_queued: maximum number of queued values; while more are queued, jobs with values are dropped.

    Attributes:
        failure: the exception that ended the thread, if any.
    """

    def __init__(self, what: str, writing: Writing[JobT], max_queued: float = math.inf) -> None:
        self.failure: BaseException | None = None
        self._what = what
        self._writing = writing
        self._max_queued = max_queued
        self._process = os.getpid()
        self._jobs = deque[tuple[JobT, int]]()
        self._flush_requests = queue.SimpleQueue[threading.Event]()  # reentrant, for signal handlers
        self._is_to_finish = False
        self._is_late = False
        self._thread: threading.Thread | None = None
        self._is_reported = False
        self._is_flushed = True  # set only by this thread
        self._given = 0  # number of queued values so far, set only by the training thread
        self._taken = 0  # number of written values, set only by this thread
        self._progress = 0
        self._dropped: list[int] = []  # number of values of each dropped job

    @property
    def queued(self) -> int:
        """Number of values in jobs that are queued or being written."""
        if self.failure is not None:
            return 0
        return self._given - self._taken

    def put(self, job: JobT, count: int = 0) -> bool:
        """Queue a job with ``count`` values. A job without values is never dropped.

        Returns:
            False if the job was dropped because the disk is too slow. A no-op after a failure and in a forked process.
        """
        if self.failure is not None or os.getpid() != self._process:
            return True
        if count and self.queued > self._max_queued:
            self._dropped.append(count)
            if len(self._dropped) == 1:
                logger.warning(
                    "The disk is slower than the training: %s values are waiting for the %s, so the %s values of this"
                    " step, and maybe of later steps, are dropped. The total is logged when the session ends.",
                    f"{self.queued:,}",
                    self._what,
                    f"{count:,}",
                )
            return False
        self._jobs.append((job, count))
        self._given += count
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"te-precision {self._what}", daemon=True)
            with contextlib.suppress(RuntimeError):  # at the end of the interpreter, where finish() writes
                thread.start()
                self._thread = thread
        return True

    def flush_soon(self) -> Wait:
        """Make the thread write queued jobs now, and return what waits for it; it does not wait after a failure.

        May be called by any thread or signal handler.
        """
        written = threading.Event()
        self._flush_requests.put(written)

        def wait(until: float) -> bool:
            # The order matters: a job leaves the queue before it is flushed.
            while not written.is_set() and (self._jobs or not self._is_flushed):
                if self.failure is not None or time.monotonic() >= until:
                    return False
                written.wait(_PAUSE)
            return written.is_set() or self.failure is None

        return wait

    def catch_up(self) -> None:
        """Wait until the queued jobs are in files, which outlive a process that is killed.

        After a timeout, because the disk is slow, only after the queue was empty again.
        """
        if not self._jobs:
            self._is_late = False
        elif not self._is_late:
            self._is_late = not self.flush_soon()(time.monotonic() + LONGEST_CATCH_UP)

    def wait(self, is_done: Callable[[], bool], still: float = math.inf) -> bool:
        """Wait until a condition holds or the thread ends; return False after ``still`` seconds without progress."""
        seen = self._progress
        since = time.monotonic()
        while self._thread is not None and self._thread.is_alive() and not is_done():
            if self._progress != seen:
                seen = self._progress
                since = time.monotonic()
            if time.monotonic() - since > still:
                return False
            self._thread.join(_PAUSE)
        return True

    def finish(self, still: float | None = None) -> None:
        """Wait until everything is written.

        After ``still`` (by default :data:`LONGEST_STILL`) seconds without progress, an error is logged; the thread may
        still write. After an interruption, a second call continues to wait.
        """
        if os.getpid() != self._process:
            return
        self._is_to_finish = True
        self.flush_soon()
        if self.wait(lambda: False, LONGEST_STILL if still is None else still) and self._jobs and self.failure is None:
            self._run()
        dropped = self._dropped
        self._dropped = []
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

    def _run(self) -> None:
        try:
            while True:
                requests = self._wait()
                is_to_finish = self._is_to_finish
                self._write_waiting()
                for written in requests:
                    written.set()
                if is_to_finish and not self._jobs:
                    self._writing.leave()
                    return
        except BaseException as error:  # also SystemExit and MemoryError, which nothing else reports in a thread
            self.failure = error
            self._jobs.clear()
            with contextlib.suppress(Exception):  # writing already failed
                self._writing.leave()

    def _wait(self) -> Iterable[threading.Event]:
        requests = []
        with contextlib.suppress(queue.Empty):
            requests.append(self._flush_requests.get(timeout=_PAUSE if self._is_to_finish else FLUSH_SECONDS))
            while True:
                requests.append(self._flush_requests.get_nowait())
        return requests

    def _write_waiting(self) -> None:
        while self._jobs:
            job, count = self._jobs[0]
            self._is_flushed = False
            if not self._writing.take(job):
                break
            self._jobs.popleft()
            self._taken += count
            self._progress += 1
        self._writing.flush()
        self._is_flushed = True
        self._progress += 1
