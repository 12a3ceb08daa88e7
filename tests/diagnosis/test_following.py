"""A run that is written while it is judged: each step once, and at the end the verdict of the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.replay import Replay
from te_precision_callbacks.runs import RunWriter, open_run
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.diagnosis.planted import blocks

CONFIG = statistics(stats=["std", "cur_amax", "nonfinite_num"], tensors=["activation", "gradient", "weight"])


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the engine has judged."""
    steps: list[int] = []
    step = Diagnosis.step

    def counted(self: Diagnosis, numbers: StepNumbers) -> object:
        steps.append(numbers.iteration)
        return step(self, numbers)

    monkeypatch.setattr(Diagnosis, "step", counted)
    return steps


def follow(
    folder: Path,
    steps: range,
    replay: Replay,
    spoil: Callable[[int, torch.nn.Module], None] = lambda step, net: None,
    checkpoint: dict[str, Any] | None = None,
) -> Iterator[Verdict]:
    """Train, and give the verdict on what is recorded after each step and at the end.

    Args:
        folder, steps: the log folder and the steps.
        replay: judges.
        spoil: changes the model before a step.
        checkpoint: goes on from it; if it is empty, it gets the one of step 3.
    """
    net = blocks()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with InspectSession(CONFIG, model=net, log_dir=folder) as session:
        if checkpoint:
            session.load_state_dict(checkpoint)
        for step in steps:
            if checkpoint == {} and step == 3:
                checkpoint.update(session.state_dict())
            spoil(step, net)
            with te.autocast(recipe=Float8CurrentScaling()):
                loss = (net(torch.randn(16, 32)) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            assert session.flush()
            yield replay.verdict(open_run(folder))
    yield replay.verdict(open_run(folder))


def test_each_step_is_judged_once(tmp_path: Path, judged: list[int]) -> None:
    replay = Replay()
    found = [len(verdict.wrong) for verdict in follow(tmp_path, range(12), replay)]
    assert (found[0], found[-1]) == (0, 1)
    again = replay.verdict(open_run(tmp_path))
    of_replay = len(judged) - 12  # the session has judged each once
    assert of_replay <= 12 + 3, "only the facts that come with the first steps make it begin anew"
    assert again == diagnose(tmp_path)


def test_what_comes_later_is_found_where_it_begins(tmp_path: Path) -> None:
    def spoil(step: int, net: torch.nn.Module) -> None:
        if step == 5:
            with torch.no_grad():
                net[7].fc.weight[0, 0] = float("nan")

    *_, verdict = follow(tmp_path, range(8), Replay(), spoil)
    assert verdict == diagnose(tmp_path)
    assert (verdict[0].rule, verdict[0].since, verdict[0].last_good) == ("nonfinite", 5, 4)


def test_a_resumed_run_has_other_steps_than_were_seen(tmp_path: Path) -> None:
    """The second start repeats the steps 3 and 4: the last occurrence counts."""
    replay = Replay()
    checkpoint: dict[str, Any] = {}
    list(follow(tmp_path, range(5), replay, checkpoint=checkpoint))
    list(follow(tmp_path, range(3, 8), replay, checkpoint=checkpoint))
    run = open_run(tmp_path)
    assert len(run.segments) == 2
    assert replay.verdict(run) == diagnose(tmp_path)


def test_another_run_is_another_verdict(tmp_path: Path) -> None:
    replay = Replay()
    list(follow(tmp_path / "a", range(4), replay))
    *_, verdict = follow(tmp_path / "b", range(3), replay)
    assert verdict == diagnose(tmp_path / "b")


@pytest.mark.processes
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"severity": "dire"},
        {"since": "2"},
        {"layers": None},
        {"seen": 2},
        {"rule": "no-such-rule"},
        {"ranks": []},
        {"ranks": "1"},
        {"rule": "nonfinite"},  # which looks at statistics: those of rank 1 are recorded
    ],
    ids=str,
)
def test_a_finding_of_another_rank_may_come_late_or_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    replay = Replay()
    with RunWriter.begin(tmp_path) as run, RunWriter(run.folder.parent, run.segment, rank=1) as other:
        for iteration in range(5):
            run.add_scalars(iteration, {"loss": 1.0 if iteration < 3 else float("nan")})
        run.flush()
        (first,) = replay.verdict(open_run(tmp_path))
        data = {**first.as_json(), "since": 2, "ranks": [1], **change}
        other.add_event("finding", "of rank 1", iteration=2, data=data)
        other.flush()
        (now,) = replay.verdict(open_run(tmp_path))
        assert (now.since, now.last_good, now.ranks) == ((3, 2, ()) if change else (2, 1, (1,)))
        assert diagnose(tmp_path).findings == (now,)
