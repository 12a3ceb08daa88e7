"""One training with a planted defect, for all tests that only read its files."""

import logging
from pathlib import Path
from typing import NamedTuple

import pytest

from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.sinks.metrics import MetricSelection
from tests.conftest import Keeper


class Planted(NamedTuple):
    folder: Path
    session: InspectSession
    log: list[logging.LogRecord]
    metrics: dict[int, dict[str, float]]


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    from tests.diagnosis.planted import train  # Transformer Engine, which the backend has to come before

    folder, keeper, log = tmp_path_factory.mktemp("planted"), Keeper(), list[logging.LogRecord]()
    handler, logger = logging.Handler(), logging.getLogger("te_precision_callbacks")
    handler.emit = log.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        session = train(folder, sinks=[keeper])
    finally:
        logger.removeHandler(handler)
    select = MetricSelection()
    return Planted(folder, session, log, {records.iteration: select(records) for records in keeper.steps})
