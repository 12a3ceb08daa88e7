"""One training with a planted defect, for all tests that only read what it has left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import pytest

from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.sinks.metrics import MetricSelection
from te_precision_callbacks.sinks.step_records import StepRecords
from tests.conftest import Keeper


class Metrics(Keeper):
    """Keeps what loggers would get, by iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.select = MetricSelection()
        self.of_steps: dict[int, dict[str, float]] = {}

    def write(self, records: StepRecords) -> None:
        self.of_steps[records.iteration] = self.select(records)


class Planted(NamedTuple):
    """The training: its folder, its session, what it logged, and what loggers got."""

    folder: Path
    session: InspectSession
    log: list[logging.LogRecord]
    metrics: dict[int, dict[str, float]]


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    from tests.diagnosis.planted import train  # Transformer Engine, which the backend has to come before

    folder, metrics, records = tmp_path_factory.mktemp("planted"), Metrics(), list[logging.LogRecord]()
    handler, logger = logging.Handler(), logging.getLogger("te_precision_callbacks")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        session = train(folder, sinks=[metrics])
    finally:
        logger.removeHandler(handler)
    return Planted(folder, session, records, metrics.of_steps)
