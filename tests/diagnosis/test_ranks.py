"""The verdict on a recorded run of several ranks, which have numbers of their own."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from te_precision_callbacks.diagnosis import Verdict, diagnose
from tests.compare.recorded import append
from tests.runs.making import RunWriter

pytestmark = pytest.mark.processes

STEPS = 6


def counts(**since: int) -> dict[tuple[str, str, str], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    steps = np.arange(STEPS)
    return {
        (layer, "activation", "nonfinite_num"): np.where(steps >= since.get(layer, STEPS), 2.0, 0.0)
        for layer in ("fc1", "fc2")
    }


def recorded(folder: Path, of_ranks: Mapping[int | None, Mapping[str, int]], world: int = 4) -> Verdict:
    """The verdict on a run whose ranks have inf and nan from a step on: rank -> layer -> step. None: reduced."""
    with RunWriter.begin(folder, world=world) as run:
        for rank, since in of_ranks.items():
            append(run, counts(**since), rank=rank)
        places = [{"layer": name, "exec_fwd": n, "since": 0} for n, name in enumerate(("fc1", "fc2"))]
        run.put_facts("layers", places)
    return diagnose(folder)


def test_each_rank_is_judged(tmp_path: Path) -> None:
    assert not recorded(tmp_path / "healthy", {rank: {} for rank in range(4)}).wrong
    (result,) = verdict = recorded(tmp_path / "last", {0: {}, 1: {}, 2: {}, 3: {"fc2": 4}})
    assert (result.rule, result.layers, result.ranks, result.since, result.until) == ("nonfinite", ("fc2",), (3,), 4, 5)
    assert (result.last_good, verdict.rank) == (3, None)
    assert str(verdict).endswith("(nonfinite, since step 4, on rank 3).")
    assert result.as_json()["ranks"] == [3]


def test_what_ranks_have_alike_is_one_finding_since_the_first_of_them(tmp_path: Path) -> None:
    (result,) = recorded(tmp_path, {0: {}, 1: {"fc2": 3}, 2: {"fc1": 2, "fc2": 2}, 3: {"fc2": 3}})
    assert (result.layers, result.ranks) == (("fc1", "fc2"), (2, 1, 3)), "the numbers are of the first of them"
    assert (result.since, result.seen_at, result.until, result.last_good) == (2, 2, 5, 1)
    assert result.where == "on rank 2 and 2 more ranks"
    assert result.seen.startswith("2 elements are inf or nan; 1 more layer")


def test_what_reduced_numbers_show_is_not_repeated_by_a_rank(tmp_path: Path) -> None:
    reduced: dict[int | None, dict[str, int]] = {None: {"fc1": 2}, 0: {"fc1": 5}, 1: {"fc1": 2}}
    (result,) = recorded(tmp_path / "the same", reduced)
    assert (result.layers, result.ranks, result.since) == (("fc1",), (), 2)
    two = recorded(tmp_path / "another layer", {None: {"fc1": 2}, 1: {"fc2": 3}})
    assert [(item.layers, item.ranks, item.since) for item in two] == [(("fc1",), (), 2), (("fc2",), (1,), 3)]


def test_a_run_of_one_rank_names_none(tmp_path: Path) -> None:
    (result,) = recorded(tmp_path, {0: {"fc1": 1}}, world=1)
    assert (result.ranks, result.where) == ((), "")


@pytest.mark.parametrize("change", [{}, {"severity": "dire"}, {"rule": "nonfinite"}], ids=str)
def test_a_finding_of_another_rank_may_come_late_or_damaged(tmp_path: Path, change: dict[str, str]) -> None:
    """The local values of rank 1 are recorded for the rule nonfinite, so that its finding is not taken over."""
    with RunWriter.begin(tmp_path) as run, RunWriter(run.folder.parent, run.segment, rank=1) as other:
        for iteration in range(5):
            run.add_scalars(iteration, {"loss": 1.0 if iteration < 3 else float("nan")})
        run.flush()
        (first,) = diagnose(tmp_path)
        data = {**first.as_json(), "since": 2, "ranks": [1], **change}
        other.add_event("finding", "of rank 1", iteration=2, data=data)
        other.flush()
        (now,) = diagnose(tmp_path)
        assert (now.since, now.last_good, now.ranks) == ((3, 2, ()) if change else (2, 1, (1,)))
