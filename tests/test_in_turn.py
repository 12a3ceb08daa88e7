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


def test_an_interval_holds_the_truth_as_often_as_it_says(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_cannot_be_decided_ends_with_the_time(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(clock, monkeypatch, 2)
    claims = {"at the bound": 1.03}
    found = clock.in_turn(
        {"at the bound": machine.taking(0.0103)},
        machine.taking(0.01),
        CPU,
        enough=clock.claimed(claims, 0.01),
        seconds=1.0,
    )["at the bound"]
    assert found.ratio().at_most(1.03) == "not resolved"
    assert 1.0 <= machine.now < 1.2
    assert machine.calls == 4 * len(found.ways), "each is called once to warm up"


def test_noise_decides_no_claim_by_being_looked_at_often(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound itself an interval of 95 % that is looked at after each pair is on one side of it in 2 of 5 runs."""
    decided = 0
    for seed in range(40):
        machine = Machine(clock, monkeypatch, seed)
        enough = clock.claimed({"at the bound": 1.03}, 0.001)
        ways = {"at the bound": machine.taking(0.0103)}
        found = clock.in_turn(ways, machine.taking(0.01), CPU, enough=enough, seconds=2.5, seed=seed)
        decided += found["at the bound"].ratio().at_most(1.03) != "not resolved"
    assert decided <= 8


def test_a_way_is_left_before_the_next_one_is_entered(clock: Any) -> None:
    entered: list[str] = []

    def way(name: str) -> Any:
        @contextlib.contextmanager
        def around() -> Iterator[Callable[[], None]]:
            assert not entered
            entered.append(name)
            yield lambda: None
            entered.clear()

        return around

    found = clock.in_turn({"a": way("a"), "b": way("b")}, way("base"), CPU, enough=lambda *_: True, seconds=0, least=3)
    assert {name: len(pairs.bases) for name, pairs in found.items()} == {"a": 3, "b": 3}


def test_an_interval_without_samples_is_an_error(clock: Any) -> None:
    with pytest.raises(ValueError, match="No samples"):
        clock.interval([])
