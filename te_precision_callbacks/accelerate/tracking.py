"""Sends a step's statistics to Accelerate's trackers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from te_precision_callbacks.notices import Notices
from te_precision_callbacks.records import MetricSelection, StepRecords
from te_precision_callbacks.records.loggers import (
    Histogram,
    LoggerSink,
    add_to_tensorboard,
    names_for_mlflow,
    wandb_histogram,
)

logger = logging.getLogger(__name__)


class TrackerSink(LoggerSink):
    """The sink that hands a step's metrics to all trackers, in one call, on the main process."""

    def __init__(self, accelerator: Accelerator, select: MetricSelection) -> None:
        super().__init__(select)
        self._accelerator = accelerator
        self._notices = Notices()

    def write(self, records: StepRecords) -> None:
        """Log on the main process only."""
        if self._accelerator.is_main_process:
            super().write(records)

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
        """Log at the script's own step."""
        trackers = self._accelerator.trackers
        if not trackers:
            self._warn()
            return
        if metrics:
            for_mlflow = any(tracker.name == "mlflow" for tracker in trackers)
            self._accelerator.log(names_for_mlflow(metrics) if for_mlflow else metrics, step=step)
        if histograms:
            for tracker in trackers:
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
            "The accelerator has no running tracker, so statistics go only to the statistics log. To send them to a"
            " tracker, %s.",
            missing,
        )


def _log_histograms(tracker: Any, histograms: Mapping[str, Histogram], step: int) -> None:
    """Log exponent histograms to a tracker that takes histograms."""
    if tracker.name == "tensorboard":
        for name, counts in histograms.items():
            add_to_tensorboard(tracker.tracker, name, counts, step)
        tracker.tracker.flush()
    elif tracker.name == "wandb":
        tracker.log({name: wandb_histogram(counts) for name, counts in histograms.items()}, step=step)
