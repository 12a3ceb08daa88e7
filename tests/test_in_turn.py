"""The clock of the benchmarks, on a simulated machine: coverage of its intervals, and when it stops."""

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
    """benchmarks/measuring.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("measuring")
    sys.modules.pop("measuring", None)


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
        pairs = clock.in_turn(ways, machine.taking(0.01), CPU, share=1.0, seconds=0, least=24, seed=seed)
        ratio = pairs["slower"].ratio()
        held += ratio.low <= 1.03 <= ratio.high
    assert held >= 87


def test_it_stops_when_the_interval_is_narrow(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(clock, monkeypatch, 1)
    ways = {"cheap": machine.taking(0.0101), "dear": machine.taking(0.012)}
    pairs = clock.in_turn(ways, machine.taking(0.01), CPU, share=0.01, seconds=1e6)
    cheap, dear = pairs["cheap"].ratio(), pairs["dear"].ratio()
    assert cheap.high <= 1.03 < dear.low
    assert all(ratio.high - ratio.low <= 0.02 * ratio.value for ratio in (cheap, dear))
    assert clock.in_turn(ways, machine.taking(0.01), CPU, share=0.0, seconds=0)["dear"].ways[8:] == []
