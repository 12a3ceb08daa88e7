"""Collects the statistics of a step, reduced over ranks, and the scalars of users' features."""

from __future__ import annotations

import logging
import time
from array import array
from dataclasses import dataclass, field

import numpy as np

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import StepRecords
from te_precision_callbacks.statistics.series import Measured, parse_log_name

logger = logging.getLogger(__name__)


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
        model: ObservedModel,
    ) -> None:
        self._context = context
        self._observation = observation
        self._scalars = scalars
        self._model = model
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
        try:
            names = [name for name, _ in self._scalars.entries]
            if not self._measured and not names:
                return None
            measured = self._measured or Measured(table, np.empty(0, np.int32), np.empty(0))
            local = self._is_local or measured.local
            own = [table.intern(*parse_log_name(name, self._model.layers.names)) for name in names]
            series = np.concatenate([measured.series, np.array(own, np.int32)])
            numbers = np.concatenate([measured.values, self._scalars.read()])
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
            histograms=measured.histograms,
            local=local,
            own=[False] * reduced + [True] * (len(series) - reduced),
            unscaled=self._model.hooks.answers.delayed_scaling.unscaled(
                ending.iteration, self._model.layers.modules, layers
            ),
            observe_seconds=time.perf_counter() - ending.begun,
        )
        results.statistics.add(records)
        return records
