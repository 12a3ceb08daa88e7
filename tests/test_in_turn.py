"""The clock of the benchmarks, on a machine that is drawn: its intervals hold the truth, and it stops when it knows."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """benchmarks/in_turn.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("in_turn")
    for name in ("in_turn", "measuring"):
        sys.modules.pop(name, None)


class Machine:
    """Its time passes only in calls. It changes its speed now and then by a half, and each call by some percent."""

    def __init__(self, clock: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.now, self.calls = 0.0, 0
        self._random, self._speed = random.Random(seed), 1.0
        for name in ("perf_counter", "process_time", "monotonic"):
            monkeypatch.setattr(clock.time, name, lambda: self.now)
        monkeypatch.setattr(clock, "progress", lambda message: None)

    def taking(self, seconds: float) -> Callable[[], Any]:
        def call() -> None:
            if self._random.random() < 0.05:
                self._speed = self._random.choice([1.0, 1.5])
            self.calls += 1
            self.now += seconds * self._speed * self._random.lognormvariate(0.0, 0.03)

        return lambda: contextlib.nullcontext(call)


def test_an_interval_covers_the_true_value_at_its_stated_rate(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % is stated; fewer than 87 of 100 intervals hold it with a probability of 6e-4."""
    held = 0
    for seed in range(100):
        machine = Machine(clock, monkeypatch, seed)
        ways = {"slower": machine.taking(0.0103)}
        pairs = clock.in_turn(ways, machine.taking(0.01), CPU, enough=lambda *_: True, seconds=0, least=24, seed=seed)
        found = pairs["slower"].ratio()
        held += found.low <= 1.03 <= found.high
    assert held >= 87


def test_it_stops_when_a_claim_is_decided(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(clock, monkeypatch, 1)
    ways = {"cheap": machine.taking(0.0101), "dear": machine.taking(0.012), "unclaimed": machine.taking(0.05)}
    enough = clock.claimed({"cheap": 1.03, "dear": 1.03}, 0.01)
    found = clock.in_turn(ways, machine.taking(0.01), CPU, enough=enough, seconds=1e6)
    assert found["cheap"].ratio().at_most(1.03) == "holds"
    assert found["dear"].ratio().at_most(1.03) == "does not hold"
    within = found["unclaimed"].ratio()
    assert within.high - within.low <= 0.02 * within.value
    assert 11 <= len(found["dear"].ways) < len(found["cheap"].ways)
