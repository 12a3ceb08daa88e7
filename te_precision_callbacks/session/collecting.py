"""Collects the statistics of a step, reduced over ranks, and the scalars of users' features and of the trainer."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.scalars import ScalarBuffer, is_on_host, is_scalar, to_floats
from te_precision_callbacks.instrumentation.debug_path import DelayedScalingLayers
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.runs.summary import is_training_loss
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import NamedLayers
from te_precision_callbacks.sinks.step_records import Scalars, StepRecords
from te_precision_callbacks.statistics.series import Measured, parse_log_name

logger = logging.getLogger(__name__)

_MOST_LOSSES = 10_000
"""Maximum number of losses that a rank keeps for rank 0 between two collection steps."""

_MOST_KEPT = 256
_LONGEST = 1.0
"""Number of scalars, and seconds, after which the trainer's scalars are copied to the host."""


@dataclass(frozen=True)
class EndingStep:
    """A step that is ending.

    Attributes:
        begun: ``time.perf_counter()`` when the end of the step began.
        is_remainder: whether this is not a complete step, but the remainder at the stop of the session.
    """

    iteration: int
    logging_step: int
    begun: float = field(default_factory=time.perf_counter)
    is_remainder: bool = False


class StepCollector:
    """Collects at the end of a step: reduces the statistics over the ranks, and makes the step's records."""

    def __init__(
        self,
        context: RunContext,
        observation: Observation,
        scalars: ScalarBuffer,
        layers: NamedLayers,
        delayed_scaling: DelayedScalingLayers,
    ) -> None:
        self._context = context
        self._observation = observation
        self._scalars = scalars
        self._layers = layers
        self._delayed_scaling = delayed_scaling
        self._measured: Measured | None = None
        self._is_local = False

    def reduce(self, ending: EndingStep, optimizer_steps: int) -> None:
        """Reduce the statistics, and begin the next iteration; after a failure, the statistics are local."""
        context = self._context
        try:
            several = context.ranks.several
            for measured, _ in self._observation.take(
                ending.iteration, reduce=several, optimizer_steps=optimizer_steps
            ):
                self._measured = measured
            context.inspector.step()
        except ObservationError:
            raise
        except Exception as error:
            context.ranks.leave(error)
            context.failures.report("gathering the statistics of", f"iteration {ending.iteration}", error)
            context.inspector.iteration = ending.iteration + 1  # inspector.step() may have failed before counting
            self.collect_local()

    def collect_local(self) -> None:
        """Collect this rank's statistics, unless the statistics of the step were already collected."""
        context = self._context
        has_reduced = bool(self._measured)
        try:
            for measured, _ in self._observation.take(context.iteration, reduce=False):
                if not has_reduced:
                    self._measured = measured
            context.inspector.log_local_buffers()
        except Exception as error:
            logger.error("The statistics collected since the last step cannot be read and are lost.", exc_info=error)
        self._is_local = not has_reduced and context.ranks.several

    def read(self, ending: EndingStep) -> StepRecords | None:
        """Return the records of the step, if it has any, and begin the next step."""
        results = self._context.results
        ranks = self._context.ranks
        table = results.series
        measured = self._measured
        local = self._is_local
        histograms: Mapping[int, tuple[float, ...]] = {}
        try:
            names = [name for name, _ in self._scalars.entries]
            own = [table.intern(*parse_log_name(name, self._layers.names)) for name in names]
            series = np.array(own, dtype=np.int32)
            numbers = np.array(self._scalars.read())
            if measured:
                series = np.concatenate([measured.series, series])
                numbers = np.concatenate([measured.values, numbers])
                histograms = measured.histograms
                local = local or measured.local
            elif not names:
                return None
        except Exception as error:
            self._context.failures.report("reading the statistics of", f"iteration {ending.iteration}", error)
            return None
        finally:
            self._measured = None
            self._is_local = False
            self._scalars.clear()
        # When ranks are disconnected, sinks get the first rank's values; at the end, each rank writes its remainder.
        left_to_first = local and not ending.is_remainder and not ranks.leads
        reduced = len(series) - len(own) if left_to_first or (ranks.several and not local) else 0
        layers = (table[number].layer for number in series.tolist())
        records = StepRecords(
            iteration=ending.iteration,
            logging_step=ending.logging_step,
            table=table,
            series=series,
            values=array("d", numbers.tobytes()),
            histograms=histograms,
            local=local,
            own=[False] * reduced + [True] * (len(series) - reduced),
            unscaled=self._delayed_scaling.unscaled(ending.iteration, self._layers.modules, layers),
            observe_seconds=time.perf_counter() - ending.begun,
        )
        results.statistics.add(records)
        return records


class Loss(NamedTuple):
    """A training loss that a rank sends to rank 0; the value is text, since JSON has no inf and nan."""

    rank: int
    iteration: int
    logging_step: int
    name: str
    value: str


class TrainerScalars:
    """Buffers the trainer's scalars until they are copied to the host.

    Attributes:
        has_loss: whether a training loss was added.
        are_shared: whether ranks have exchanged losses.
        losses: training losses that rank 0 may not have: in a pipeline, only the last stage computes the loss.
    """

    def __init__(self, context: RunContext) -> None:
        self.has_loss = False
        self.are_shared = False
        self.losses: deque[Loss] = deque(maxlen=_MOST_LOSSES)
        self._context = context
        self._kept: dict[tuple[int, int], dict[str, Any]] = {}  # by iteration and logging step
        self._kept_since = 0.0

    def add(self, iteration: int, logging_step: int, values: Mapping[str, Any]) -> None:
        if not self._kept:
            self._kept_since = time.monotonic()
        for name, value in values.items():
            if is_scalar(value):
                self.has_loss |= is_training_loss(str(name))
                of_step = self._kept.setdefault((iteration, logging_step), {})
                of_step[str(name)] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            elif self._context.notices.first(f"scalar {name}"):
                shape = getattr(value, "shape", None)
                what = repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
                logger.warning("log(): %r must be a number or a one-element tensor, not %s. Skipped.", name, what)

    def exchange_losses(self) -> list[Scalars]:
        """Return the mean losses over the ranks that have one. All ranks must call this."""
        self.are_shared = True
        own = list(self.losses)
        self.losses.clear()
        of_steps = group_by_key(
            ((loss.iteration, loss.logging_step, loss.name), float(loss.value))
            for loss in self._context.ranks.pool(own, "losses", Loss)
        )
        scalars = []
        for (iteration, logging_step, name), values in sorted(of_steps.items()):
            scalars.append(Scalars(iteration, logging_step, {name: sum(values) / len(values)}))
        return scalars

    def take(self, *, at_once: bool) -> list[Scalars]:
        """Return the scalars since the last call.

        Scalars on a GPU are returned only now and then, since copying them in each step would wait for the device.

        Args:
            at_once: return them now.
        """
        kept = self._kept
        values = [value for of_step in kept.values() for value in of_step.values()]
        is_early = len(values) < _MOST_KEPT and time.monotonic() - self._kept_since < _LONGEST
        if is_early and not at_once and not all(map(is_on_host, values)):
            return []
        self._kept = {}
        scalars = []
        with self._context.failures.guard("reading", "the trainer metrics"):
            numbers = iter(to_floats(values))
            for (iteration, logging_step), of_step in kept.items():
                read = {name: next(numbers) for name in of_step}
                scalars.append(Scalars(iteration, logging_step, read))
                for name, number in () if self._context.ranks.leads else read.items():
                    if is_training_loss(name):
                        self.losses.append(Loss(own_rank(), iteration, logging_step, name, repr(number)))
        return scalars
