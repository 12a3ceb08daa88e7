"""Writes dumps to the disk in the background, within their budgets, until the disk takes no more."""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.dumps.budget import Budget, Limits
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.dump_files import SUFFIXES, write_new
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.file_names import file_stem, iteration_folder, numbered, rank_folder
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.dumps.writer import Stop, Writer
from te_precision_callbacks.runs.run_files import new_run_id

logger = logging.getLogger(__name__)

_MOST_TOLD = 10_000


class Job(NamedTuple):
    """A dump to be written.

    Attributes:
        dump: the dump.
        limits: the budget that the dump counts in.
        file_format: the format of the file.
    """

    dump: Dump
    limits: Limits
    file_format: str


class Disk:
    """Writes dumps in a separate thread.

    Args:
        folder: the log folder.

    Attributes:
        folder: the log folder.
        files, nbytes: the number of files and bytes written so far.
        written: the headers of the last files, until somebody takes them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = new_run_id()
        self.files = 0
        self.nbytes = 0
        self.written: deque[Header] = deque(maxlen=_MOST_TOLD)
        self._writer: Writer[Job] = Writer(self._write)
        self._budget: Budget | None = None
        self._exhausted: set[Limits] = set()
        self._failure: Exception | None = None

    def stopped(self, limits: Limits) -> bool:
        """Whether writing has stopped, for good or within these limits."""
        return self._writer.stopped or limits in self._exhausted

    def wait_for_room(self, nbytes: int, limits: Limits) -> None:
        """Wait until so many more bytes may wait to be written."""
        self._writer.wait_for_room(nbytes, limits.max_memory)

    def put(self, job: Job) -> None:
        """Queue a dump for writing; waits if more than ``max_memory`` bytes would be queued."""
        if not self.stopped(job.limits):
            self._writer.put(job, job.dump.nbytes, job.limits.max_memory)

    def drain(self, longest_still: float | None = None) -> bool:
        """Wait until everything is written; see :meth:`Writer.drain`."""
        return self._writer.drain(longest_still)

    @property
    def pending(self) -> int:
        """The bytes that are not written yet."""
        return self._writer.pending

    def take_failure(self) -> Exception | None:
        """Returns the failure since the last call, if any."""
        failure, self._failure = self._failure, None
        died = self._writer.take_failure()
        if died is not None and failure is None:
            failure = DumpError(
                f"The thread that writes dumps has ended: {type(died).__name__}: {died}. No more tensors are"
                " dumped, and those that waited to be written are lost."
            )
            failure.__cause__ = died
        return failure

    # ------------------------------------------------------------------ in the writer's thread

    def _write(self, job: Job) -> None:
        if job.limits in self._exhausted:
            return
        try:
            why = self._write_within_budget(job)
        except Exception as error:
            # A full disk stays full; but a tensor that the file format cannot hold does not affect the others.
            lasting = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            if self._failure is None:
                self._failure = error
                if lasting:
                    self._failure = DumpError(f"{error} No more tensors are dumped.")
                    self._failure.__cause__ = error
            if lasting:
                raise Stop from error
            return
        if why is not None:
            header = job.dump.header
            self._exhausted.add(job.limits)
            logger.warning(
                "DumpTensors stops on rank %d in iteration %s: %s. The folder is %s. Training goes on.",
                header.rank,
                header.iteration,
                why,
                rank_folder(self.folder, header.rank),
            )

    def _write_within_budget(self, job: Job) -> str | None:
        """Write a file; returns the reason if the budget does not allow it."""
        header = replace(job.dump.header, run=self._run)
        job = job._replace(dump=replace(job.dump, header=header))
        budget = self._budget
        if budget is None:
            budget = self._budget = Budget(rank_folder(self.folder, header.rank))
        refusal = budget.refuses(_most_bytes(job.dump), job.limits)
        if refusal is not None:
            return refusal
        stem = file_stem(header.layer, header.tensor, header.micro_batch, file_format=job.file_format)
        place = iteration_folder(self.folder, header.rank, header.iteration or 0)
        nbytes = write_new(job.dump, numbered(place, stem, SUFFIXES[job.file_format]), job.file_format)
        budget.count(nbytes)
        self.files += 1
        self.nbytes += nbytes
        self.written.append(header)
        return None


def _most_bytes(dump: Dump) -> int:
    """An upper bound of the size of a dump's file, in either format: its tensors, its header, and what the format adds
    for the file, for each tensor (up to six are decoded), and for a pickled object of Transformer Engine."""
    tensors = len(dump.tensors) + (6 if dump.internals and dump.header.quantized is not None else 0)
    added = 2_500 + 700 * tensors + (0 if dump.original is None else 5_700)
    return dump.file_bytes + len(json.dumps(dump.header.to_json())) + added
