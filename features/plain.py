"""Observation for scripts that use plain nvidia-dlfw-inspect, without a session."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from nvdlfw_inspect.logging import MetricLogger, get_logger

from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.ranks.messages import Messages, RanksLostError
from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.statistics.series import Measured, log_name


class PlainObservation(Observation):
    """Logs statistics through nvidia-dlfw-inspect's loggers. As in Transformer Engine, files are written before a step
    ends.
    """

    def __init__(self) -> None:
        super().__init__(StatisticsEngine(), Recorder(Path(get_logger().root_log_dir)))
        self._messages: Messages | None = None

    def log(self, iteration: int, group: dist.ProcessGroup | None) -> list[tuple[Measured, int]]:
        """Log the statistics since the last step, without histograms, and return them with their iteration.

        All ranks of ``group``, by default all ranks, must call this.
        """
        logged: list[tuple[Measured, int]] = []
        reduce = is_distributed(group)
        if reduce and self._messages is None and self.is_due(iteration):  # from the config, so that all ranks agree
            self._messages = Messages(group, "statistics")
            self.engine.reduce_over(self._messages)
            try:
                self._messages.open("to reduce statistics")
            except RanksLostError as error:
                self.engine.on_failure("reducing", "statistics", error)
        for measured, measured_in in self.take(iteration, reduce=reduce):
            logged.append((measured, measured_in))
            for layer, tensor, statistic, value in measured:
                if isinstance(value, float):
                    MetricLogger.log_scalar(log_name(layer, tensor, statistic), value, measured_in)
        return logged

    def end_step(self) -> None:
        self.recorder.drain()
        self.recorder.end_step()

    def end(self) -> None:
        if self._messages is not None:
            self._messages.close()
        self.recorder.close()
