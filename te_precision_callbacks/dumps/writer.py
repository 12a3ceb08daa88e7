"""Writes dumps in a background thread, in order, with bounded memory and within the budget.

    writer = Writer(log_dir)
    writer.put(Job(dump, limits))   # blocks while the queue has more than limits.max_memory bytes
    writer.drain()                  # waits until everything is written; drain(30.0): or no progress for 30 seconds
    writer.take_failure()           # the first failure since the last call, if any

Every job is written, unless the budget is exhausted. A disk error ends the thread: waiting jobs are dropped, and
:meth:`Writer.take_failure` returns the reason.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.base.threads import started
from te_precision_callbacks.dumps.budget import Budget, Limits
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.dump_files import iteration_folder, rank_folder, write_new
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.runs.run_files import new_run_id

logger = logging.getLogger(__name__)

_MOST_HEADERS = 10_000


class Job(NamedTuple):
    """A dump to be written within limits."""

    dump: Dump
    limits: Limits


class Writer:
    """A thread that runs while there is something to write.

    Args:
        folder: the log folder.

    Attributes:
        folder: the log folder.
        files, nbytes: the number of files and bytes written so far.
        written: the headers of the last files, until the caller removes them.
        pending: the bytes in the queue or being written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self.nbytes = self.pending = 0
        self.written: deque[Header] = deque(maxlen=_MOST_HEADERS)
        self._run = new_run_id()
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._budget: Budget | None = None
        self._exhausted: set[Limits] = set()
        self._failure: Exception | None = None

    def stopped(self, limits: Limits) -> bool:
        """Return whether writing has ended, or these limits are exhausted."""
        return self._ended or limits in self._exhausted

    def put(self, job: Job) -> None:
        """Queue a dump; block until there is room, or until the queue is empty if the dump alone is too large."""
        with self._changed:
            self.wait_for_room(job.dump.nbytes, job.limits)
            if self._ended:
                return
            self._jobs.append(job)
            self.pending += job.dump.nbytes
            if self._thread is None:
                self._thread = started("dumps", self._write_all)
            alone = self._thread is None  # the interpreter is shutting down
            self._changed.notify_all()
        if alone:
            self._write_all()

    def wait_for_room(self, nbytes: int, limits: Limits) -> None:
        """Wait until :meth:`put` would not block; call this before allocating the memory."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not self.pending or self.pending + nbytes <= limits.max_memory
            )

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything is written.

        Args:
            timeout: the maximum seconds without a finished job; None for no limit.

        Returns:
            Whether everything is written.
        """
        with self._changed:
            while self._thread is not None:
                if not self._changed.wait_for(functools.partial(self._has_moved, self.pending), timeout):
                    return False
        return True

    def _has_moved(self, pending: int) -> bool:
        return self._thread is None or self.pending != pending

    def take_failure(self) -> Exception | None:
        """Return the first failure since the last call, if any."""
        with self._changed:
            failure, self._failure = self._failure, None
        return failure

    # ------------------------------------------------------------------ in the writer's thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if self._ended or not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            nbytes = job.dump.nbytes
            try:
                self._write(job)
            except BaseException as error:  # also SystemExit and MemoryError, which a thread would lose
                if self._thread is None:
                    self._end()
                    raise
                self._fail(
                    f"The thread that writes dumps has ended: {type(error).__name__}: {error}. No more tensors are"
                    " dumped, and those that waited to be written are lost.",
                    error,
                )
            finally:
                del job
                with self._changed:
                    self.pending = 0 if self._ended else self.pending - nbytes
                    self._changed.notify_all()

    def _fail(self, text: str, error: BaseException) -> None:
        failure = DumpError(text)
        failure.__cause__ = error
        self._note_failure(failure)
        self._end()

    def _note_failure(self, failure: Exception) -> None:
        with self._changed:
            self._failure = self._failure or failure

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._jobs.clear()

    def _write(self, job: Job) -> None:
        header = replace(job.dump.header, run=self._run)
        if job.limits in self._exhausted:
            return
        try:
            refusal = self._write_within_budget(replace(job.dump, header=header), job.limits)
        except Exception as error:
            # A full disk stays full, but a tensor without a dtype in the format does not affect others.
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                self._fail(f"{error} No more tensors are dumped.", error)
            else:
                self._note_failure(error)
            return
        if refusal is not None:
            self._exhausted.add(job.limits)
            logger.warning(
                "DumpTensors stops on rank %d in iteration %s: %s. The folder is %s. Training goes on.",
                header.rank,
                header.iteration,
                refusal,
                rank_folder(self.folder, header.rank),
            )

    def _write_within_budget(self, dump: Dump, limits: Limits) -> str | None:
        """Write a file; return the reason if the budget does not allow it."""
        header = dump.header
        dump.wait()
        dump = replace(dump, tensors=dump.complete(), internals=False)
        budget = self._budget
        if budget is None:
            budget = self._budget = Budget(rank_folder(self.folder, header.rank))
        refusal = budget.refuses(_most_bytes(dump), limits)
        if refusal is not None:
            return refusal
        nbytes = write_new(dump, iteration_folder(self.folder, header.rank, header.iteration or 0))
        budget.count(nbytes)
        self.files += 1
        self.nbytes += nbytes
        self.written.append(header)
        return None


def _most_bytes(dump: Dump) -> int:
    """Return an upper bound of the size of a dump's file: its tensors, its header, and the format's overhead."""
    return dump.nbytes + len(json.dumps(dump.header.to_json())) + 500 + 200 * len(dump.tensors)
