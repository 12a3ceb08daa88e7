"""Writes in a background thread, in order, with bounded memory.

    writer = Writer(write)          # write(job) runs in a thread of the writer's own
    writer.put(job, nbytes, most=1 << 30)   # waits while more than `most` bytes would wait for the disk
    writer.drain()                  # until all is written; drain(30.0): or nothing more was for 30 seconds

    writer.take_failure()           # the exception that has ended the thread, if any

Nothing is lost silently: every job is written, unless ``write`` raises :class:`Stop`; waiting jobs are then dropped.
They are also dropped if the thread itself ends with another exception, which is kept for :meth:`Writer.take_failure`;
nothing waits for such a thread.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from te_precision_callbacks.base.threads import started

JobT = TypeVar("JobT")


class Stop(Exception):
    """Raised by ``write`` to end writing."""


class Writer(Generic[JobT]):
    """A thread that runs while there is something to write.

    Args:
        write: writes one job; raises :class:`Stop` to end writing. It handles all other exceptions itself.
    """

    def __init__(self, write: Callable[[JobT], None]) -> None:
        self._write = write
        self._jobs: deque[tuple[JobT, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.stopped = False
        """Whether no job is written any more."""
        self.pending = 0
        """Bytes that wait or are being written."""

    def put(self, job: JobT, nbytes: int, most: int) -> None:
        """Queue a job.

        Args:
            job: the argument for ``write``.
            nbytes: the memory that the job holds.
            most: wait until the memory of all jobs stays within this limit. A larger job waits until all others are
                written.
        """
        with self._changed:
            self._wait_for_room(nbytes, most)
            if self.stopped:
                return
            self._jobs.append((job, nbytes))
            self.pending += nbytes
            if self._thread is None:
                self._thread = started("dumps", self._run)  # where the interpreter is ending, this thread writes
            alone = self._thread is None
            self._changed.notify_all()
        if alone:
            self._run()

    def wait_for_room(self, nbytes: int, most: int) -> None:
        """Wait until :meth:`put` would not wait; call this before allocating the memory."""
        with self._changed:
            self._wait_for_room(nbytes, most)

    def _wait_for_room(self, nbytes: int, most: int) -> None:
        self._changed.wait_for(lambda: self.stopped or not self.pending or self.pending + nbytes <= most)

    def drain(self, longest_still: float | None = None) -> bool:
        """Wait until everything is written.

        Args:
            longest_still: the seconds without a job that ends after which to wait no longer. None: no limit.

        Returns:
            Whether everything is written.
        """
        with self._changed:
            while self._thread is not None:
                if not self._changed.wait_for(functools.partial(self._has_moved, self.pending), longest_still):
                    return False
        return True

    def _has_moved(self, pending: int) -> bool:
        return self._thread is None or self.pending != pending

    def take_failure(self) -> BaseException | None:
        """Returns, once, the exception that ended the thread before everything was written; otherwise None."""
        with self._changed:
            failure, self._failure = self._failure, None
        return failure

    def _run(self) -> None:
        try:
            self._write_all()
        except BaseException as error:  # SystemExit, no memory, ...: in a thread nobody else would see it
            with self._changed:
                of_thread = self._thread is not None
                self._failure = error if of_thread else None
                self.stopped = True
                self._jobs.clear()
                self._thread, self.pending = None, 0
                self._changed.notify_all()
            if not of_thread:
                raise

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job, nbytes = self._jobs.popleft()
            try:
                self._write(job)
            except Stop:
                with self._changed:
                    self.stopped = True
                    nbytes += sum(size for _, size in self._jobs)
                    self._jobs.clear()
            finally:
                del job
                with self._changed:
                    self.pending -= nbytes
                    self._changed.notify_all()
