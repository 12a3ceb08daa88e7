"""Records tensors for DumpTensors: holds or drops them, and writes them within the budget.

:meth:`Recorder.note` and :meth:`Recorder.end_step` wait for the disk only if the queue exceeds ``max_memory`` bytes. On
CUDA the condition ``nonfinite`` makes ``end_step`` wait for the device, once per step.

A run has one recorder, in its :class:`te_precision_callbacks.observation.Observation`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.config.conditions import (
    ACTIVATION_OVERFLOW,
    NONFINITE,
    Condition,
    EventCondition,
    Threshold,
)
from te_precision_callbacks.config.dumping import (
    Collected,
    collected_for,
    missing_statistic,
    no_detection,
)
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import Dump, create_dump, kind_is_known
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.dumps.writer import Job, Writer
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.schedule import Schedule, any_due
from te_precision_callbacks.statistics.series import Measured

if TYPE_CHECKING:
    from te_precision_callbacks.config.schemas import DumpTensors, DumpTensorsGemmItem, DumpTensorsItem

logger = logging.getLogger(__name__)

_WEIGHT = "weight"

Report = Callable[[str, str, Exception], None]
"""Called on the training thread for each failure, with the operation, its subject and the exception."""


@dataclass(frozen=True)
class DumpOptions:
    """The options of DumpTensors for a tensor.

    Attributes:
        schedule: the steps to dump.
        conditions: at least one must hold; without conditions, the tensor is always dumped.
        limits: the budget.
        gemm: the GEMM, for a record of a GEMM; empty for a tensor.
    """

    schedule: Schedule
    high_precision: bool
    quantized: bool
    internals: bool
    conditions: tuple[Condition, ...]
    limits: Limits
    gemm: str = ""

    @classmethod
    def of_gemm(cls, gemm: DumpTensorsGemmItem, options: DumpTensors) -> DumpOptions:
        return cls(
            schedule=gemm.schedule,
            high_precision=True,
            quantized=True,
            internals=False,
            conditions=tuple(gemm.when),
            limits=Limits(options.max_bytes, options.max_files, options.max_memory),
            gemm=gemm.gemm,
        )

    @classmethod
    def of(cls, tensor: DumpTensorsItem, options: DumpTensors) -> DumpOptions:
        return cls(
            schedule=tensor.schedule,
            high_precision=tensor.high_precision_tensor,
            quantized=tensor.quantized_tensor,
            internals=tensor.dump_quantized_internals,
            conditions=tuple(tensor.when),
            limits=Limits(options.max_bytes, options.max_files, options.max_memory),
        )


_OnStatistic = tuple[Threshold, Collected]

_Conditions = tuple[torch.Tensor | None, tuple[_OnStatistic, ...], bool]
"""``nonfinite``, ``statistics`` and ``overflow`` of a :class:`_WaitingDump`."""


@dataclass
class _WaitingDump:
    """A dump that is held until the end of its step.

    Attributes:
        nonfinite: whether the tensor has inf or nan, on its device; None without this condition.
        statistics: the conditions on statistics of this step.
        overflow: whether the dump is written after an overflow.
    """

    job: Job
    nonfinite: torch.Tensor | None
    statistics: tuple[_OnStatistic, ...]
    overflow: bool


class Recorder:
    """Receives tensors in a forward or backward, as asynchronous snapshots, and decides on them at the end of the step.

    Args:
        folder: the log folder; dumps go to ``tensor_dumps/rank_R/iter_XXXXXX`` in it.
        report: called with failures on the training thread; by default they are logged.
        detects_overflow: whether :attr:`overflowed` will be set after an overflow.

    Attributes:
        overflowed: set by a session when activation overflow detection has stopped the current step.
    """

    def __init__(self, folder: Path, *, report: Report | None = None, detects_overflow: bool = False) -> None:
        self._folder = folder.absolute()
        self._report: Report = report or _log
        self._detects_overflow = detects_overflow
        self._begin()

    def _begin(self) -> None:
        self.overflowed = False
        self._process = os.getpid()
        self._at_exit: Finalize | None = None
        self._closed = False
        self._writer = Writer(self._folder)
        self._notices = Notices()
        self._held: list[_WaitingDump] = []
        self._held_bytes = 0
        self._nonfinite: list[int] = []
        self._micro_batches: dict[tuple[str, str, int], int] = {}
        self._learned: list[Measured] = []

    def end_step(self) -> None:
        """Write the held dumps if their conditions hold, drop the others, and report failures."""
        self._follow_fork()
        self._decide()
        self._micro_batches.clear()
        self._report_failure()

    def flush(self) -> None:
        self._writer.drain()
        self._report_failure()

    def take_written(self) -> list[Header]:
        written = self._writer.written
        return [written.popleft() for _ in range(len(written))]

    def close(self, *, decides: bool = True) -> None:
        """End the run: write or drop held dumps, and wait for the writer. Can be called twice.

        A disk that does not respond is logged. ``decides=False`` drops held dumps without reading their conditions from
        a device.
        """
        self._follow_fork()
        if self._closed:
            return
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.cancel()
        if decides:
            self._decide()
        writer = self._writer
        writer.finish()
        if writer.files:
            logger.info("%d tensors were dumped (%s bytes), in %s.", writer.files, f"{writer.nbytes:,}", writer.folder)
        self._report_failure()

    def _follow_fork(self) -> None:
        if os.getpid() != self._process:
            self._begin()

    def stopped(self, limits: Limits) -> bool:
        return self._writer.stopped(limits)

    # ------------------------------------------------------------------ a tensor

    def note(
        self,
        watched: Watched,
        options: DumpOptions,
        collected: Callable[[], Mapping[str, Collected]],
        record: Callable[[int], Dump] | None = None,
    ) -> None:
        """Take a snapshot of a tensor, unless its conditions cannot hold.

        Args:
            watched: the tensor; for a record of a GEMM the result.
            options: the options of the config.
            collected: returns the collected statistics of the tensor with their schedules.
            record: creates the record of a GEMM, given the number of the micro-batch; None for a tensor.

        Raises:
            DumpError: tensors of this kind cannot be dumped.
        """
        self._follow_fork()
        if self.stopped(options.limits):
            return
        if is_capturing():  # each replay would repeat a copy
            self._warn_once(
                "captured",
                "DumpTensors: %s of %s is not dumped, because a CUDA graph is being captured: capture after the"
                " steps that you want to dump. Other tensors are not listed.",
                watched.tensor,
                watched.layer,
            )
            return
        if self._at_exit is None:
            # Unlike atexit functions, it is also called at the end of a spawned process.
            self._at_exit = Finalize(None, self.close, exitpriority=90)
        key = (watched.layer, watched.tensor, id(options))
        micro_batch = self._micro_batches.get(key, 0)
        self._micro_batches[key] = micro_batch + 1
        if watched.tensor == _WEIGHT and micro_batch:
            return  # every micro-batch of a step has the same weight
        with torch.inference_mode(False), torch.no_grad():
            conditions = self._pending_conditions(watched, options, collected)
            if conditions == (None, (), False):
                return
            make: Callable[[int], Dump | None] = record or functools.partial(self._dump, watched, options)
            dump = make(micro_batch)
            if dump is None:
                return
            if conditions is not None:
                self._hold(dump, conditions, watched, options.limits)
                return
            if options.conditions:  # on the CPU, NONFINITE is evaluated immediately
                self._nonfinite.append(watched.iteration)
            self._writer.wait_for_room(dump.nbytes, options.limits)
            self._writer.put(Job(dump.copied(), options.limits))

    def _hold(self, dump: Dump, conditions: _Conditions, watched: Watched, limits: Limits) -> None:
        """Keep a snapshot until the end of the step decides on its conditions."""
        if self._held_bytes + dump.nbytes > limits.max_memory:
            self._warn_once(
                ("held", limits),
                "DumpTensors: %s of %s in iteration %d is not dumped: until the end of the step decides on"
                " 'when', tensors wait in memory, limited by max_memory=%s bytes. Select fewer layers, or"
                " increase max_memory. Other tensors are not listed.",
                watched.tensor,
                watched.layer,
                watched.iteration,
                f"{limits.max_memory:,}",
            )
        else:
            self._held_bytes += dump.nbytes
            self._held.append(_WaitingDump(Job(dump.copied(), limits), *conditions))

    def _pending_conditions(
        self, watched: Watched, options: DumpOptions, collected: Callable[[], Mapping[str, Collected]]
    ) -> _Conditions | None:
        if not options.conditions:
            return None
        nonfinite: torch.Tensor | None = None
        statistics: list[_OnStatistic] = []
        overflow = False
        for condition in options.conditions:
            if condition is EventCondition.NONFINITE:
                nonfinite = _has_nonfinite(watched)
                if nonfinite is not None and nonfinite.device.type == "cpu":
                    if nonfinite.item():
                        return None
                    nonfinite = None
            elif condition is EventCondition.ACTIVATION_OVERFLOW:
                overflow = self._detects_overflow
                if not overflow:
                    self._complain(condition, watched, no_detection())
            else:
                statistic = self._statistic(condition, watched, collected())
                if statistic is not None:
                    statistics.append((condition, statistic))
        return nonfinite, tuple(statistics), overflow

    def _statistic(
        self, condition: Threshold, watched: Watched, collected: Mapping[str, Collected]
    ) -> Collected | None:
        statistic = collected_for(condition, collected)
        if statistic is None:
            self._complain(condition, watched, missing_statistic(condition, collected, [watched.layer], watched.tensor))
            return None
        if any_due(statistic.schedules, watched.iteration):
            return statistic
        return None

    def _complain(self, condition: Condition, watched: Watched, text: str) -> None:
        if self._notices.first(condition):
            error = DumpError(f"{text} Other tensors with this condition are not listed.")
            self._report("dumping", f"{watched.layer} {watched.tensor}", error)

    def _dump(self, watched: Watched, options: DumpOptions, micro_batch: int) -> Dump | None:
        quantized = None
        columnwise_from = None
        values = None
        if options.quantized:
            quantized, columnwise_from = _quantized_form(watched)
        if options.high_precision:
            values = watched.values
        if values is None and quantized is None:
            asked = {"high_precision_tensor": options.high_precision, "quantized_tensor": options.quantized}
            lacking = " and no ".join(key for key, is_wanted in asked.items() if is_wanted)
            self._warn_once(
                ("nothing", lacking),
                "DumpTensors: %s of %s is not dumped: it has no %s. Other such tensors are not listed.",
                watched.tensor,
                watched.layer,
                lacking,
            )
            return None
        return create_dump(
            values,
            quantized,
            internals=options.internals,
            layer=watched.layer,
            tensor=watched.tensor,
            iteration=watched.iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=recipe_of(watched.quantizer),
            columnwise_from=columnwise_from,
        )

    # ------------------------------------------------------------------ the end of a step

    def learn(self, measured: Measured) -> None:
        if any(held.statistics for held in self._held):
            self._learned.append(measured)

    def _decide(self) -> None:
        held = self._held
        self._held = []
        self._held_bytes = 0
        learned = self._learned
        self._learned = []
        overflowed = self.overflowed
        self.overflowed = False
        flags = _read([entry.nonfinite for entry in held])
        at_once = self._nonfinite
        self._nonfinite = []
        reasons = Counter([NONFINITE] * len(at_once))
        for entry, nonfinite in zip(held, flags, strict=True):
            reason: str | None = NONFINITE
            if not nonfinite and overflowed and entry.overflow:
                reason = ACTIVATION_OVERFLOW
            elif not nonfinite:
                reason = self._fulfilled_statistic(entry, learned)
            if reason is not None:
                reasons[reason] += 1
                self._writer.put(entry.job)
        if reasons:
            iterations = (*at_once, *(entry.job.dump.header.iteration for entry in held))
            logger.info("Iteration %s: %d tensors are dumped: %s.", iterations[0], reasons.total(), ", ".join(reasons))

    def _fulfilled_statistic(self, entry: _WaitingDump, learned: Sequence[Measured]) -> str | None:
        header = entry.job.dump.header
        for condition, collected in entry.statistics:
            tensor = header.tensor
            if header.gemm is not None:
                tensor = header.gemm.result
            pairs = product(collected.labels, learned)
            values = (measured.value(header.layer, tensor, label) for label, measured in pairs)
            value = next((value for value in values if value is not None), None)
            if value is None:
                self._warn_once(
                    ("not had", condition),
                    "DumpTensors: the condition %r of %s of %s is not met in iteration %s, because its statistic"
                    " could not be computed. Logged once; other tensors are not listed.",
                    str(condition),
                    header.tensor,
                    header.layer,
                    header.iteration,
                )
            elif condition.holds(value):
                return f"{condition} ({value:.4g} of {header.tensor} of {header.layer})"
        return None

    def _report_failure(self) -> None:
        failure = self._writer.take_failure()
        if failure is not None:
            self._report("dumping tensors to", str(self._folder), failure)

    def _warn_once(self, key: Hashable, text: str, *values: object) -> None:
        if self._notices.first(key):
            logger.warning(text, *values)


def _log(doing: str, of: str, error: Exception) -> None:
    logger.error("%s %s: %s: %s. Training continues.", doing, of, type(error).__name__, str(error).removesuffix("."))


def _read(flags: Sequence[torch.Tensor | None]) -> list[bool]:
    present = [flag for flag in flags if flag is not None]
    if not present:
        return [False] * len(flags)
    values = iter(torch.stack([flag.to(present[0].device) for flag in present]).tolist())
    return [flag is not None and next(values) for flag in flags]


def _quantized_form(watched: Watched) -> tuple[Any, Any]:
    """Return the quantized tensor, and the object with its columnwise data if that is a separate object; None if the
    GEMM runs in high precision.
    """
    operands = (watched.rowwise, watched.columnwise)
    became = [operand for operand in operands if operand is not None and not _is_values(watched.values, operand)]
    quantized = [operand for operand in became if kind_is_known(operand)]
    if len(quantized) == 2 and quantized[0] is not quantized[1]:
        return quantized[0], quantized[1]
    return next(iter(quantized or became), None), None


def _is_values(values: torch.Tensor | None, operand: Any) -> bool:
    if values is None or operand is values:
        return operand is values
    plain = {type(operand), type(values)} <= {torch.Tensor, torch.nn.Parameter}
    return plain and operand.dtype == values.dtype and operand.data_ptr() == values.data_ptr()


def _has_nonfinite(watched: Watched) -> torch.Tensor | None:
    values = watched.values
    if values is None:
        values, _ = _quantized_form(watched)
        if values is not None and kind_is_known(values):
            values = values.dequantize()
    if values is None or not values.is_floating_point() or not values.numel():
        return None
    # One pass without a copy: a nan makes both extremes nan.
    low, high = torch.aminmax(values.detach())
    return ~(torch.isfinite(low) & torch.isfinite(high))
