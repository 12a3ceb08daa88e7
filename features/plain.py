"""The run of a script that uses plain nvidia-dlfw-inspect, without a session."""

from __future__ import annotations

from pathlib import Path

from nvdlfw_inspect.logging import MetricLogger, get_logger

from te_precision_callbacks.dumps.dump_files import TORCH
from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.statistics.series import Measured, log_name


class PlainObservation(Observation):
    """Logs statistics through nvidia-dlfw-inspect's loggers, and dumps as Transformer Engine does: the same folder,
    names and file format, and a step ends when its files are on the disk."""

    def __init__(self) -> None:
        super().__init__(StatisticsEngine(), Recorder(Path(get_logger().root_log_dir), file_format=TORCH))

    def deliver(self, measured: Measured, iteration: int) -> None:
        """Log the numbers, without histograms."""
        for layer, tensor, statistic, value in measured:
            if isinstance(value, float):
                MetricLogger.log_scalar(log_name(layer, tensor, statistic), value, iteration)

    def end_step(self) -> None:
        """Wait until the files of the step are on the disk."""
        self.recorder.end_step()
        self.recorder.flush()

    def end(self) -> None:
        """Wait until all files are on the disk."""
        self.recorder.close()
