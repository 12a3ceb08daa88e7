"""Drifts that leave what a model computes unchanged are named, in real trainings: a sample of benchmarks/planted.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import planted
from benchmarks.planted import Drift, is_named, train
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.compare import compare

pytestmark = pytest.mark.slow

FIRST = 16


@pytest.fixture(scope="module")
def fewer_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "STEPS", 2 * FIRST)
        patch.setattr(planted, "FIRST", FIRST)
        yield


@pytest.fixture(scope="module")
def healthy(fewer_steps: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, RecordedRun]:
    """A healthy training, and one with another seed."""
    folder = tmp_path_factory.mktemp("healthy")
    return train(0, folder / "a"), train(1, folder / "noise")


def test_a_planted_drift_comes_first(healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    drift = Drift.drawn(5)
    comparison = compare(healthy[0], train(5, tmp_path, drift), noise=[healthy[1]])
    assert is_named(drift, comparison), comparison.first
    assert FIRST <= comparison.first.iteration < FIRST + 6


def test_a_healthy_training_has_no_finding(healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    assert not compare(healthy[0], train(1000, tmp_path), noise=[healthy[1]]).has_findings


def test_a_planted_drift_changes_nothing_that_is_computed_and_comes_first(
    healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path
) -> None:
    drift = Drift("weights", 3)
    run = train(0, tmp_path, drift)
    assert run.scalars["value"].equals(healthy[0].scalars["value"])
    comparison = compare(healthy[0], run, noise=[healthy[1]])
    assert is_named(drift, comparison), comparison.first
