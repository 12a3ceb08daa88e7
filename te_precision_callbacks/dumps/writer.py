"""Writes dumps in a background thread, in order, with bounded memory and within the budget.

Every job is written, unless the budget is exhausted. A disk error ends the thread: waiting jobs are dropped, and
:meth:`Writer.take_failure` returns the reason.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.dumps.budget import Budget, Limits
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.dump_files import iteration_folder, rank_folder, write_new
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.runs.run_files import new_run_id
from te_precision_callbacks.sinks.writer_thread import WriterThread

logger = logging.getLogger(__name__)

LONGEST_STILL = 30.0
"""The maximum seconds without a finished file that the end of a run waits for the disk."""

_MOST_HEADERS = 10_000


class Job(NamedTuple):
    dump: Dump
    limits: Limits


class Writer:
    """Writes dumps to a log folder; ``written`` collects the headers of files, until the caller removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = 0
        self.nbytes = 0
        self.written: deque[Header] = deque(maxlen=_MOST_HEADERS)
        self._run = new_run_id()
        self._thread: WriterThread[Job] = WriterThread("tensor dumps", self)
        self._budget: Budget | None = None
        self._exhausted: set[Limits] = set()
        self._failure: Exception | None = None

    @property
    def pending(self) -> int:
        return self._thread.queued

    def stopped(self, limits: Limits) -> bool:
        return self._thread.failure is not None or limits in self._exhausted

    def put(self, job: Job) -> None:
        """Queue a dump; block until there is room, or until the queue is empty if the dump alone is too large."""
        self.wait_for_room(job.dump.nbytes, job.limits)
        self._thread.put(job, job.dump.nbytes)
        self._thread.flush_soon()

    def wait_for_room(self, nbytes: int, limits: Limits) -> None:
        """Wait until :meth:`put` would not block; call this before allocating the memory."""
        self._thread.wait(lambda: not self.pending or self.pending + nbytes <= limits.max_memory)

    def drain(self) -> None:
        wait = self._thread.flush_soon()
        self._thread.wait(lambda: wait(0.0))

    def finish(self) -> None:
        self._thread.finish(LONGEST_STILL)

    def take_failure(self) -> Exception | None:
        noted = self._failure
        self._failure = None
        if noted is not None:
            return noted
        failure = self._thread.take_failure()
        if failure is None or isinstance(failure, DumpError):
            return failure
        ended = DumpError(
            f"The thread that writes dumps has ended: {type(failure).__name__}: {failure}. No more tensors are"
            " dumped, and waiting tensors are lost."
        )
        ended.__cause__ = failure
        return ended

    # ------------------------------------------------------------------ in the writer's thread

    def flush(self) -> None: ...

    def leave(self) -> None: ...

    def take(self, job: Job) -> bool:
        """Write a dump, unless its limits are exhausted; an error of the disk ends the thread."""
        header = replace(job.dump.header, run=self._run)
        if job.limits in self._exhausted:
            return True
        try:
            refusal = self._write_within_budget(replace(job.dump, header=header), job.limits)
        except Exception as error:
            # A full disk ends the thread; a tensor that the format cannot store does not affect others.
            if isinstance(error.__cause__ or error, OSError) or "I/O error" in str(error):  # raised by safetensors
                raise DumpError(f"{error} No more tensors are dumped.") from error
            self._failure = self._failure or error
            return True
        if refusal is not None:
            self._exhausted.add(job.limits)
            logger.warning(
                "DumpTensors stops on rank %d in iteration %s: %s. The folder is %s. Training continues.",
                header.rank,
                header.iteration,
                refusal,
                rank_folder(self.folder, header.rank),
            )
        return True

    def _write_within_budget(self, dump: Dump, limits: Limits) -> str | None:
        header = dump.header
        dump.wait()
        dump = replace(dump, tensors=dump.complete(), internals=False)
        budget = self._budget
        if budget is None:
            budget = Budget(rank_folder(self.folder, header.rank))
            self._budget = budget
        most_bytes = dump.nbytes + len(json.dumps(dump.header.to_json())) + 500 + 200 * len(dump.tensors)
        refusal = budget.refuses(most_bytes, limits)
        if refusal is not None:
            return refusal
        nbytes = write_new(dump, iteration_folder(self.folder, header.rank, header.iteration or 0))
        budget.count(nbytes)
        self.files += 1
        self.nbytes += nbytes
        self.written.append(header)
        return None
