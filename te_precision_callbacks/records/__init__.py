"""What a session measures, and who receives it.

class Printer:                                   # a sink: three methods
    def start(self, run: RunInfo) -> None: ...
    def write(self, records: StepRecords) -> None:
        for row in records:
            print(records.iteration, row.layer, row.tensor, row.statistic, row.value)
    def close(self, error: BaseException | None) -> None: ...

InspectSession("config.yaml", model=model, sinks=[Printer()])
"""

from __future__ import annotations

from te_precision_callbacks.records.metrics import LogFilter, MetricSelection, metric_name
from te_precision_callbacks.records.model import LayerInfo, Row, RunInfo, Sink, StepRecords
from te_precision_callbacks.records.statistics_log import StatisticsLog

__all__ = [
    "LayerInfo",
    "LogFilter",
    "MetricSelection",
    "Row",
    "RunInfo",
    "Sink",
    "StatisticsLog",
    "StepRecords",
    "metric_name",
]
