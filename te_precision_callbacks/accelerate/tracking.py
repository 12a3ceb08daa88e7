"""Sends a step's statistics to Accelerate's trackers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.sinks import MetricSelection, StepRecords
from te_precision_callbacks.sinks.loggers import (
    LoggerSink,
    add_to_tensorboard,
    names_for_mlflow,
    wandb_histogram,
)

logger = logging.getLogger(__name__)


class TrackerSink(LoggerSink):
    """The sink that hands a step's metrics to each tracker, in one call, on the main process."""

    def __init__(self, accelerator: Accelerator, select: MetricSelection) -> None:
        super().__init__(select)
        self._accelerator = accelerator
        self._notices = Notices()

    def write(self, records: StepRecords) -> None:
        if self._accelerator.is_main_process:
            super().write(records)

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log at the script's own step, as ``accelerator.log`` does, but under the names that each tracker takes."""
        trackers = self._accelerator.trackers
        if not trackers:
            self._warn()
        for tracker in trackers:
            if metrics:
                tracker.log(names_for_mlflow(metrics) if tracker.name == "mlflow" else metrics, step=step)
            if histograms:
                _log_histograms(tracker, histograms, step)

    def _warn(self) -> None:
        if not self._notices.first("no tracker"):
            return
        missing = (
            "call accelerator.init_trackers('my_project') before the loop"
            if self._accelerator.log_with
            else "make it with Accelerator(log_with='tensorboard', project_dir=...), or another tracker, and call"
            " accelerator.init_trackers('my_project')"
        )
        logger.warning(
            "The accelerator has no running tracker, so statistics go only to the files in log_dir. To send them to a"
            " tracker, %s.",
            missing,
        )


class LoggedNumbers:
    """Listens to ``accelerator.log``, until it is removed.

    Args:
        accelerator: the accelerator; its attribute ``log`` is replaced.
        take: a method that gets the logged values and the step; its object is not kept alive.

    Attributes:
        remove: stops listening.
    """

    def __init__(self, accelerator: Accelerator, take: Callable[[Mapping[str, Any], int | None], None]) -> None:
        self._take = weakref.WeakMethod(take)
        self.remove = BeforeCalls(accelerator, "log", self._note).remove

    def _note(self, values: Any, step: Any = None, *rest: Any, **keywords: Any) -> None:
        take = self._take()
        if take is not None and isinstance(values, Mapping):
            take(values, step if isinstance(step, int) else None)


def _log_histograms(tracker: Any, histograms: Mapping[str, Sequence[float]], step: int) -> None:
    if tracker.name == "tensorboard":
        for name, counts in histograms.items():
            add_to_tensorboard(tracker.tracker, name, counts, step)
        tracker.tracker.flush()
    elif tracker.name == "wandb":
        tracker.log({name: wandb_histogram(counts) for name, counts in histograms.items()}, step=step)
