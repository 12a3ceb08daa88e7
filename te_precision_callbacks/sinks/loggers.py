"""The sink that hands a step's metrics to loggers, and conversions for loggers that need more than name and number.

class Board(LoggerSink):                       # in your own loop: sinks=[Board(MetricSelection())]
    def log(self, metrics, histograms, step):
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        for name, histogram in histograms.items():
            add_to_tensorboard(writer, name, histogram, step)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from te_precision_callbacks.sinks.metrics import MetricSelection
from te_precision_callbacks.sinks.step_records import Sink, StepRecords
from te_precision_callbacks.statistics.table import EXPONENT_EDGES

ValueT = TypeVar("ValueT")


def names_for_mlflow(metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Return the metrics under names that MLflow accepts: without ``%`` and rare characters."""
    return {_NOT_IN_MLFLOW.sub("_", name.replace("%", "_pct")): value for name, value in metrics.items()}


_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
"""As in MLflow 3.17, ``utils/validation.py``."""


def _filled(counts: Sequence[float]) -> tuple[list[float], Sequence[float]]:
    """Return the counts of exponents from the first to the last non-empty bin, and the edges of these bins."""
    places = [place for place, count in enumerate(counts) if count] or [0]
    first, end = places[0], places[-1] + 1
    return [float(count) for count in counts[first:end]], EXPONENT_EDGES[first : end + 1]


def add_to_tensorboard(writer: Any, name: str, counts: Sequence[float], step: int) -> None:
    """Log a histogram over powers of two, not over the values, to TensorBoard.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or one of tensorboardX.
        counts: the counts of exponents.
        step: the logging step.
    """
    filled, edges = _filled(counts)
    writer.add_histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=sum(filled),
        sum=sum(edge * count for edge, count in zip(edges[:-1], filled, strict=True)),
        sum_squares=sum(edge**2 * count for edge, count in zip(edges[:-1], filled, strict=True)),
        bucket_limits=edges[1:],
        bucket_counts=filled,
        global_step=step,
    )


def wandb_histogram(counts: Sequence[float]) -> Any:
    """Return the counts of exponents as a ``wandb.Histogram`` over powers of two."""
    import numpy
    import wandb

    filled, edges = _filled(counts)
    return wandb.Histogram(np_histogram=(numpy.array(filled), numpy.array(edges)))


class LoggerSink(Sink):
    """Hands the metrics and histograms of a step to :meth:`log`; ``select`` is shared by all sinks of a run."""

    def __init__(self, select: MetricSelection) -> None:
        self._select = select

    def write(self, records: StepRecords) -> None:
        metrics, histograms = self._select(records), self._select.histograms(records)
        if metrics or histograms:
            self.log(metrics, histograms, records.logging_step)

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log the metrics of a step.

        Args:
            metrics: name -> value; empty if the step has only histograms.
            histograms: name -> counts over powers of two, for :func:`add_to_tensorboard` and :func:`wandb_histogram`.
            step: the logging step of the trainer's own metrics of the same batch.
        """
        raise NotImplementedError
