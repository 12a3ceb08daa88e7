"""Delivers a step's numbers from the engine and from users' features to the sinks."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.coverage.parallel import OptimizerSteps, Ranks
from te_precision_callbacks.instrumentation.delayed_scaling import DelayedScalingLayers
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.session.named_layers import NamedLayers
from te_precision_callbacks.session.results import RunResults
from te_precision_callbacks.session.signals import Uninterrupted
from te_precision_callbacks.session.sinks import Sinks
from te_precision_callbacks.sinks.step_records import StepRecords
from te_precision_callbacks.statistics.series import Measured, parsed_log_name

logger = logging.getLogger(__name__)


@dataclass
class Ending:
    """A step, from its beginning until all sinks have its records.

    Attributes:
        iteration, logging_step: the numbers of the step.
        begun: when its end began, by ``time.perf_counter``.
        is_remainder: whether this is no step, but the remainder gathered when the session was stopped.
        local: whether the statistics belong to this rank alone although statistics are reduced.
        records: the records for the sinks; None if there are none.
        is_read: whether ``records`` is known.
    """

    iteration: int
    logging_step: int
    begun: float = field(default_factory=time.perf_counter)
    is_remainder: bool = False
    local: bool = False
    records: StepRecords | None = None
    is_read: bool = False


@dataclass
class _Gathered:
    """The numbers received since the last step.

    Attributes:
        scalars: names and numbers from users' features.
        on_streams: the tensors among them, by the stream that was current then.
        measured: from the engine.
    """

    scalars: list[tuple[str, Any]] = field(default_factory=list)
    on_streams: dict[torch.cuda.Stream | None, list[torch.Tensor]] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)


class Delivery:
    """Takes the measurements of a step, makes records of them, and hands the records to the sinks.

    Args:
        inspector: the source of users' numbers.
        observation: has the engine, the source of the statistics.
        ranks: those that reduce statistics together.
        optimizer_steps: counts the optimizer steps of this rank.
        layers: the layers that the numbers belong to.
        results: get each step's numbers.
        sinks: get each step's records.
        failures: get failures.
        delayed_scaling: the layers that had no scale.
        judge: judges the records of each step.

    Attributes:
        ending: the step whose records not all sinks have yet; None if there is none.
        last_logging_step: the logging step of the last step; None before the first one.
    """

    def __init__(
        self,
        inspector: Inspector,
        observation: Observation,
        ranks: Ranks,
        optimizer_steps: OptimizerSteps,
        layers: NamedLayers,
        results: RunResults,
        sinks: Sinks,
        failures: ObservationFailures,
        delayed_scaling: DelayedScalingLayers,
        judge: Callable[[StepRecords], StepRecords],
    ) -> None:
        self.ending: Ending | None = None
        self._inspector = inspector
        self._observation = observation
        self._ranks = ranks
        self._optimizer_steps = optimizer_steps
        self._layers = layers
        self._results = results
        self._sinks = sinks
        self._failures = failures
        self._gathered = _Gathered()
        self._delayed_scaling = delayed_scaling
        self._judge = judge
        self.last_logging_step: int | None = None

    # ------------------------------------------------------------------ during a step

    def take_scalar(self, name: str, value: Any) -> None:
        """Take a number that a user's feature logs: a plain number, or a tensor with one element."""
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            self._gathered.scalars.append((name, value))
            self._gathered.on_streams.setdefault(current_stream(value.device), []).append(value)
            return
        try:
            self._gathered.scalars.append((name, float(value)))
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            self._failures.report("taking", f"the scalar {name!r}", TypeError(f"it must be one number, not {what}"))

    def _receive(self, measured: Measured, iteration: int) -> None:
        if measured:
            self._gathered.measured.append(measured)

    # ------------------------------------------------------------------ at its end

    def begin(self, ending: Ending) -> None:
        """Begin to end a step, once the sinks have the records of one that was interrupted."""
        if self.ending is not None:
            self.hand_over(self.ending)
        self.ending = ending

    def hand_over(self, ending: Ending) -> StepRecords | None:
        """Turn the received numbers into records for the sinks. This may be repeated after an interruption."""
        self._sinks.start()
        if not ending.is_read:
            ending.records = self._read(ending)
            ending.is_read = True
        self._gathered = _Gathered()
        try:
            if ending.records is not None:
                self._sinks.write(ending.records)
        except Exception:  # with strict=True
            self.last_logging_step, self.ending = ending.logging_step, None
            raise
        self.last_logging_step, self.ending = ending.logging_step, None
        return ending.records

    def take(self, ending: Ending) -> None:
        """Take the statistics of a step, reduced over the ranks; all ranks must call this alike."""
        steps = self._optimizer_steps()
        self._observation.take(ending.iteration, self._receive, reduce=self._ranks.several, optimizer_steps=steps)

    def take_own(self) -> None:
        """Take what this rank has gathered since the last step, without a collective."""
        if self._inspector.runs:
            self._observation.take(self._inspector.iteration, self._receive, reduce=False)
            self._inspector.log_local_buffers()

    def take_local(self, ending: Ending) -> None:
        """Take this rank's statistics, unless those of the step were taken already."""
        received = list(self._gathered.measured)
        try:
            self.take_own()
        except Exception as error:
            logger.error("The statistics gathered since the last step cannot be read, and are lost.", exc_info=error)
        if received and not self._inspector.ended:
            self._gathered.measured = received
        else:  # also what was taken when the script ended upstream
            ending.local = self._ranks.several

    def read_local(self, ending: Ending, *, from_device: bool = True) -> None:
        """Read the records of a step without the other ranks, if there are none yet.

        Args:
            ending: the step.
            from_device: whether to read what is not on the host.
        """
        self.ending = ending
        if not ending.is_read:
            if from_device:
                self.take_local(ending)
            else:
                self._leave_on_device(ending)
            with suppress(ObservationError):  # something else has ended the step already
                ending.records = self._read(ending)
            ending.is_read = True
        self._gathered = _Gathered()

    def _leave_on_device(self, ending: Ending) -> None:
        """Do without what is not on the host."""
        scalars = self._gathered.scalars
        self._gathered.scalars = [(name, value) for name, value in scalars if is_on_host(value)]
        ending.local = self._ranks.several and not self._gathered.measured
        if (self._inspector.runs and self._observation.engine.has_news) or len(self._gathered.scalars) < len(scalars):
            logger.warning(
                "The statistics of iteration %d are not written: they are on the GPU, which is not asked before a"
                " signal ends the process.",
                ending.iteration,
            )

    def forget_logging_step(self) -> None:
        """Count logging steps anew, since the debug iteration was set."""
        self.last_logging_step = None

    def hand_over_remainder(
        self, logging_step: int | None, guard: Uninterrupted, *, counts_from: int, from_device: bool = True
    ) -> None:
        """Hand over the records of an interrupted step, and the statistics gathered since the last step.

        Args:
            logging_step: the logging step of these statistics. None: the step after the last one, or in a run without a
                step the one that ``counts_from`` gives.
            guard: lets Ctrl-C interrupt the sinks.
            counts_from: the logging step of iteration 0.
            from_device: as in :meth:`read_local`.
        """
        try:
            if self.ending is not None:
                self.read_local(self.ending, from_device=from_device)
                with guard.interruptible():
                    self.hand_over(self.ending)
            iteration = self._inspector.iteration
            if logging_step is None:
                last = self.last_logging_step
                logging_step = iteration + counts_from if last is None else last + 1
            ending = Ending(iteration, logging_step, is_remainder=True)
            self.read_local(ending, from_device=from_device)
            with guard.interruptible():
                self.hand_over(ending)
        except ObservationError as error:
            logger.error(
                "The statistics gathered since the last step could not be written, and are lost.", exc_info=error
            )

    @property
    def completed(self) -> int:
        """The first iteration that was not run to its end."""
        ending = self.ending
        return self._inspector.iteration if ending is None or ending.is_remainder else ending.iteration + 1

    @without_collections()
    def _read(self, ending: Ending) -> StepRecords | None:
        scalars, measured = self._gathered.scalars, self._gathered.measured
        if not scalars and not measured:
            return None
        try:
            for stream, tensors in self._gathered.on_streams.items():
                follow(stream, tensors)
            values = to_floats([value for _, value in scalars])
            table = self._results.series
            own = [table.intern(*parsed_log_name(name, self._layers.names)) for name, _ in scalars]
            series = np.concatenate([*(found.series for found in measured), np.array(own, dtype=np.int32)])
            numbers = np.concatenate([*(found.values for found in measured), np.array(values)])
            histograms = {number: counts for found in measured for number, counts in found.histograms.items()}
        except Exception as error:
            self._gathered = _Gathered()
            self._failures.report("reading the statistics of", f"iteration {ending.iteration}", error)
            return None
        ending.local |= any(found.local for found in measured)
        # Where ranks are apart the first one alone writes its numbers; each one those that are left at the end.
        left_to_first = ending.local and not ending.is_remainder and not self._ranks.leads
        reduced = len(series) - len(own) if left_to_first or (self._ranks.several and not ending.local) else 0
        layers = {table[number].layer for number in series.tolist()}
        records = StepRecords(
            iteration=ending.iteration,
            logging_step=ending.logging_step,
            table=table,
            series=series,
            values=array("d", numbers.tobytes()),
            histograms=histograms,
            local=ending.local,
            own=[False] * reduced + [True] * (len(series) - reduced),
            unscaled=self._delayed_scaling.unscaled(ending.iteration, self._layers.modules, layers),
            observe_seconds=time.perf_counter() - ending.begun,
        )
        self._results.statistics.add(records)
        try:
            return self._judge(records)
        except ObservationError:
            raise
        except Exception as error:
            self._failures.report("judging", f"iteration {ending.iteration}", error)
            return records


def is_number(value: object) -> bool:
    """Whether :func:`to_floats` takes it: a number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def is_on_host(value: object) -> bool:
    """Whether :func:`to_floats` need not wait for a device to take it."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def to_floats(values: Sequence[Any]) -> list[float]:
    """Numbers and one-element tensors as float64, with one copy from each device."""
    tensors = [(index, value) for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
    floats = [math.nan if isinstance(value, torch.Tensor) else float(value) for value in values]
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in tensors:
        by_device.setdefault(tensor.device, []).append((index, tensor))
    for entries in by_device.values():
        stacked = torch.stack([tensor.detach().reshape(()).to(torch.float64) for _, tensor in entries])
        for (index, _), number in zip(entries, stacked.tolist(), strict=True):
            floats[index] = number
    return floats
