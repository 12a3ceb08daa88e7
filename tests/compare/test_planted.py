"""Drifts that leave what a model computes unchanged are named, in real trainings: a sample of benchmarks/planted.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planted
from benchmarks.planted import Drift, judge, train
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.compare import ComparedNumbers, compare

pytestmark = pytest.mark.slow

FIRST = 24


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


@pytest.mark.parametrize("seed", [3, 5])
def test_a_planted_drift_comes_first(seed: int, healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    drift = Drift.drawn(seed)
    comparison = compare(healthy[0], train(seed, tmp_path, drift), noise=[healthy[1]])
    outcome = judge(seed, drift, comparison)
    assert outcome.found, outcome
    assert comparison.first is not None
    assert FIRST <= comparison.first.iteration < FIRST + 6


def test_a_healthy_training_has_no_finding(healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    assert not compare(healthy[0], train(1000, tmp_path), noise=[healthy[1]]).has_findings


def test_what_is_ordinary_for_the_loss_is_what_the_noise_is_apart(
    healthy: tuple[RecordedRun, RecordedRun],
) -> None:
    a, noise = healthy
    numbers = ComparedNumbers()
    compare(a, noise, noise=[noise], numbers=numbers)
    (curve,) = [each for each in numbers.curves if each.subject.statistic == "loss"]
    off = np.abs(curve.b / curve.a - 1)
    wide = (curve.high - curve.low) / 2 / curve.a
    assert wide.max() < 2 * off.max()
    assert np.median(wide) < 4 * np.median(off)
    assert (wide > off).mean() > 0.9


def test_a_planted_drift_changes_nothing_that_is_computed(
    healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path
) -> None:
    loss = train(0, tmp_path, Drift("weights", 3)).scalars["value"]
    assert loss.equals(healthy[0].scalars["value"])
