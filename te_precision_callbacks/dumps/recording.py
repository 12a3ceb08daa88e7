"""Records tensors and GEMMs for DumpTensors, and writes them to files in the background, in order.

Training waits for the disk only while more than :data:`MOST_QUEUED` bytes wait to be written. An error of the disk, or
a disk that is nearly full, ends the dumps of a run: waiting dumps are dropped.

A run has one recorder, in its :class:`te_precision_callbacks.observation.Observation`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.files import why_full
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.config.schemas import DumpTensorsItem
from te_precision_callbacks.dumps.contents import Dump, DumpError, Header, create_dump, kind_is_known
from te_precision_callbacks.dumps.dump_files import iteration_folder, write_new
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.runs.run_files import new_run_id
from te_precision_callbacks.sinks.writer_thread import WriterThread

logger = logging.getLogger(__name__)

MOST_QUEUED = 1 << 30
"""The bytes that may wait to be written."""

LONGEST_STILL = 30.0
"""The maximum seconds without a finished file that the end of a run waits for the disk."""

_MOST_HEADERS = 10_000


class Recorder:
    """Takes asynchronous snapshots in a forward or backward, and writes them in a thread.

    Args:
        folder: the log folder; dumps go to ``tensor_dumps/rank_R/iter_XXXXXX`` in it.
        report: called with failures on the training thread; by default they are logged.
    """

    def __init__(self, folder: Path, *, report: Report | None = None) -> None:
        self._folder = folder.absolute()
        self._report: Report = report or _log
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._at_exit: Finalize | None = None
        self._closed = False
        self._notices = Notices()
        self._micro_batches: dict[tuple[str, str, int], int] = {}
        self._files = 0
        self._nbytes = 0
        self._written: deque[Header] = deque(maxlen=_MOST_HEADERS)
        self._run = new_run_id()
        self.thread: WriterThread[Dump] = WriterThread("tensor dumps", self)
        self._is_full = False
        self._failure: Exception | None = None

    def end_step(self) -> None:
        """Begin to count micro-batches again, and report failures."""
        self._follow_fork()
        self._micro_batches.clear()
        self._report_failure()

    def drain(self) -> None:
        """Wait until the queued dumps are written."""
        wait = self.thread.flush_soon()
        self.thread.wait(lambda: wait(0.0))

    def take_written(self) -> list[Header]:
        return [self._written.popleft() for _ in range(len(self._written))]

    def close(self) -> None:
        """Wait for the files, at the end of a run. Can be called twice. A disk that does not respond is logged."""
        self._follow_fork()
        if self._closed:
            return
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.cancel()
        self.thread.finish(LONGEST_STILL)
        if self._files:
            logger.info("%d tensors were dumped (%s bytes), in %s.", self._files, f"{self._nbytes:,}", self._folder)
        self._report_failure()

    def _follow_fork(self) -> None:
        if os.getpid() != self._process:
            self._begin()

    # ------------------------------------------------------------------ a tensor

    def note_tensor(self, watched: Watched, options: DumpTensorsItem) -> None:
        """Dump a tensor; raises DumpError for tensors that cannot be dumped."""
        self.note(watched.layer, watched.tensor, functools.partial(self._dump, watched, options), id(options))

    def note(self, layer: str, tensor: str, make: Callable[[int], Dump | None], options: int = 0) -> None:
        """Write a dump.

        Args:
            layer, tensor: for messages, and to count the micro-batches.
            make: creates the dump, from the number of the micro-batch; the dump may share training's memory.
            options: identifies one of several options for the same tensor.
        """
        self._follow_fork()
        if self._is_full or self.thread.failure is not None:
            return
        if is_capturing():  # each replay would repeat a copy
            if self._notices.first("captured"):
                logger.warning(
                    "DumpTensors: %s of %s is not dumped, because a CUDA graph is being captured: capture after the"
                    " steps that you want to dump. Other tensors are not listed.",
                    tensor,
                    layer,
                )
            return
        if self._at_exit is None:
            # Unlike atexit functions, it is also called at the end of a spawned process.
            self._at_exit = Finalize(None, self.close, exitpriority=90)
        key = (layer, tensor, options)
        micro_batch = self._micro_batches.get(key, 0)
        self._micro_batches[key] = micro_batch + 1
        if tensor == "weight" and micro_batch:
            return  # every micro-batch of a step has the same weight
        with torch.inference_mode(False), torch.no_grad():
            dump = make(micro_batch)
            if dump is not None:
                self.put(dump)

    def _dump(self, watched: Watched, options: DumpTensorsItem, micro_batch: int) -> Dump | None:
        quantized = None
        values = None
        if options.quantized_tensor:
            quantized = _quantized_form(watched)
        if options.high_precision_tensor:
            values = watched.values
        if values is None and quantized is None:
            options_set = [name for name in ("high_precision_tensor", "quantized_tensor") if getattr(options, name)]
            lacking = " and no ".join(options_set)
            if self._notices.first(lacking):
                logger.warning(
                    "DumpTensors: %s of %s is not dumped: it has no %s. Other such tensors are not listed.",
                    watched.tensor,
                    watched.layer,
                    lacking,
                )
            return None
        header = Header(
            layer=watched.layer,
            tensor=watched.tensor,
            iteration=watched.iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=recipe_of(watched.quantizer),
        )
        return create_dump(header, values, quantized, internals=options.dump_quantized_internals)

    def put(self, dump: Dump) -> None:
        """Queue a snapshot of a dump, once the queue has room for it or is empty."""
        self.thread.wait(lambda: not self.thread.queued or self.thread.queued + dump.nbytes <= MOST_QUEUED)
        self.thread.put(dump.copied(), dump.nbytes)
        self.thread.flush_soon()

    def take_failure(self) -> Exception | None:
        """Return a failure that was not returned before."""
        failure = self._failure or self.thread.take_failure()
        self._failure = None
        return cast("Exception | None", failure)

    def _report_failure(self) -> None:
        failure = self.take_failure()
        if failure is not None:
            self._report("dumping tensors to", str(self._folder), failure)

    # ------------------------------------------------------------------ in the thread

    def flush(self) -> None: ...

    def leave(self) -> None: ...

    def take(self, dump: Dump) -> bool:
        """Write a dump, unless the disk is nearly full; an error of the disk ends the thread."""
        if self._is_full:
            return True
        header = dataclasses.replace(dump.header, run=self._run)
        folder = iteration_folder(self._folder, header.rank, header.iteration or 0)
        try:
            dump = dataclasses.replace(dump, header=header, tensors=dump.complete(), internals=False)
            refusal = why_full(self._folder, dump.nbytes)
            if refusal is None:
                self._nbytes += write_new(dump, folder)
                self._files += 1
                self._written.append(header)
            else:
                self._is_full = True
                logger.warning(
                    "DumpTensors stops on rank %d in iteration %s: %s. The folder is %s. Training continues.",
                    header.rank,
                    header.iteration,
                    refusal,
                    folder.parent,
                )
        except Exception as error:
            # A full disk ends the thread; a tensor that the format cannot store does not affect others.
            if isinstance(error.__cause__ or error, OSError) or "I/O error" in str(error):  # raised by safetensors
                raise DumpError(f"{error} No more tensors are dumped.") from error
            self._failure = self._failure or error
        return True


def _log(doing: str, subject: str, error: Exception) -> None:
    logger.error(
        "%s %s: %s: %s. Training continues.", doing, subject, type(error).__name__, str(error).removesuffix(".")
    )


def _quantized_form(watched: Watched) -> Any:
    """Return the tensor that a GEMM reads in place of the values; None if the GEMMs run in high precision."""
    operands = (watched.rowwise, watched.columnwise)
    became = [operand for operand in operands if operand is not None and not _is_values(watched.values, operand)]
    return next(filter(kind_is_known, became), became[0] if became else None)


def _is_values(values: torch.Tensor | None, operand: Any) -> bool:
    if values is None or operand is values:
        return operand is values
    plain = {type(operand), type(values)} <= {torch.Tensor, torch.nn.Parameter}
    return plain and operand.dtype == values.dtype and operand.data_ptr() == values.data_ptr()
