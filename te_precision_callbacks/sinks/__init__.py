"""The records of a session, and the sinks that receive them.

Usage::

    class Printer(Sink):  # methods: start, write and close; the base class does nothing
        def write(self, records: StepRecords) -> None:
            for row in records:
                print(records.iteration, row.layer, row.tensor, row.statistic, row.value)

    InspectSession("config.yaml", model=model, sinks=[Printer()])
"""

from __future__ import annotations

from te_precision_callbacks.sinks.metrics import LoggerSink, MetricSelection, add_to_tensorboard
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import (
    Event,
    EventSink,
    LayerInfo,
    Row,
    RunInfo,
    Scalars,
    Sink,
    StepRecords,
)

__all__ = [
    "Event",
    "EventSink",
    "LayerInfo",
    "LoggerSink",
    "MetricSelection",
    "Row",
    "RunInfo",
    "Scalars",
    "Sink",
    "StatisticsLog",
    "StepRecords",
    "add_to_tensorboard",
]
