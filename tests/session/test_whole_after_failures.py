"""Where memory runs out at any line of what keeps a run's numbers, the steps that follow are right."""

from __future__ import annotations

import contextlib
from array import array

import numpy as np
import pytest
import torch

from te_precision_callbacks.sinks.step_records import StepRecords
from te_precision_callbacks.sinks.worst import RunStatistics
from te_precision_callbacks.statistics.series import SeriesTable
from tests.session.injecting_script import Injection


def step(table: SeriesTable, found: RunStatistics, iteration: int, names: list[str]) -> None:
    """A step in which each layer has its own number, which names it."""
    series = np.array([table.intern(name, "activation", "underflows%") for name in names], np.int32)
    values = array("d", [float(name) for name in names])
    found.add(StepRecords(iteration=iteration, logging_step=iteration, table=table, series=series, values=values))


def run(injection: Injection) -> tuple[SeriesTable, RunStatistics]:
    """A step with some layers, one with more in which it fails, and a last one with all and one more."""
    table = SeriesTable()
    found = RunStatistics(table)
    step(table, found, 0, ["0", "1"])
    with injection.on(), contextlib.suppress(MemoryError, torch.OutOfMemoryError):
        step(table, found, 1, ["0", "1", "2", "3"])
    step(table, found, 2, ["0", "1", "2", "3", "4"])
    return table, found


@pytest.mark.processes
def test_numbers_keep_their_names_after_a_failure() -> None:
    everywhere = Injection()
    run(everywhere)
    assert {place[0].rpartition("/")[2] for place in everywhere.places} >= {"series.py", "worst.py"}
    for place in everywhere.places:
        injection = Injection(place)
        _, found = run(injection)
        assert injection.raised
        expected = {(name, float(name)) for name in "01234"}
        assert {(row.layer, row.value) for row in found.last()} == expected, place
        assert {(worst.row.layer, worst.row.value) for worst in found.worst()} == expected, place
