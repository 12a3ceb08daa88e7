"""Writes dumps in a background thread, in order, with bounded memory.

An error of the disk, or a disk that is nearly full, ends the dumps of a run: waiting dumps are dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import cast

from te_precision_callbacks.base.files import why_full
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.dump_files import iteration_folder, write_new
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.runs.run_files import new_run_id
from te_precision_callbacks.sinks.writer_thread import WriterThread

logger = logging.getLogger(__name__)

MOST_QUEUED = 1 << 30
"""The bytes that may wait to be written."""

LONGEST_STILL = 30.0
"""The maximum seconds without a finished file that the end of a run waits for the disk."""

_MOST_HEADERS = 10_000


class Writer:
    """Writes dumps to a log folder; ``written`` collects the headers of files, until the caller removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = 0
        self.nbytes = 0
        self.written: deque[Header] = deque(maxlen=_MOST_HEADERS)
        self._run = new_run_id()
        self.thread: WriterThread[Dump] = WriterThread("tensor dumps", self)
        self._is_full = False
        self._failure: Exception | None = None

    @property
    def stopped(self) -> bool:
        return self._is_full or self.thread.failure is not None

    def put(self, dump: Dump) -> None:
        """Queue a snapshot of a dump, once the queue has room for it or is empty."""
        self.thread.wait(lambda: not self.thread.queued or self.thread.queued + dump.nbytes <= MOST_QUEUED)
        self.thread.put(dump.copied(), dump.nbytes)
        self.thread.flush_soon()

    def drain(self) -> None:
        wait = self.thread.flush_soon()
        self.thread.wait(lambda: wait(0.0))

    def take_failure(self) -> Exception | None:
        """Return a failure of the thread that was not returned before."""
        failure = self._failure or self.thread.take_failure()
        self._failure = None
        return cast("Exception | None", failure)

    # ------------------------------------------------------------------ in the writer's thread

    def flush(self) -> None: ...

    def leave(self) -> None: ...

    def take(self, dump: Dump) -> bool:
        """Write a dump, unless the disk is nearly full; an error of the disk ends the thread."""
        if self._is_full:
            return True
        header = replace(dump.header, run=self._run)
        folder = iteration_folder(self.folder, header.rank, header.iteration or 0)
        try:
            dump.wait()
            dump = replace(dump, header=header, tensors=dump.complete(), internals=False)
            refusal = why_full(self.folder, dump.nbytes)
            if refusal is None:
                self.nbytes += write_new(dump, folder)
        except Exception as error:
            # A full disk ends the thread; a tensor that the format cannot store does not affect others.
            if isinstance(error.__cause__ or error, OSError) or "I/O error" in str(error):  # raised by safetensors
                raise DumpError(f"{error} No more tensors are dumped.") from error
            self._failure = self._failure or error
            return True
        if refusal is None:
            self.files += 1
            self.written.append(header)
            return True
        self._is_full = True
        logger.warning(
            "DumpTensors stops on rank %d in iteration %s: %s. The folder is %s. Training continues.",
            header.rank,
            header.iteration,
            refusal,
            folder.parent,
        )
        return True
