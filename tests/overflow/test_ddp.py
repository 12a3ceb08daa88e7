"""Two processes under DDP: they stop together, and evaluation needs no other rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.processes


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    ended = forked.ranks(Path(__file__).with_name("ddp_script.py"), [[case, str(folder), str(rank)] for rank in (0, 1)])
    output = [rank.stderr for rank in ended]
    assert [rank.returncode for rank in ended] == [0, 0], output
    return [{**json.loads((folder / f"{rank}.json").read_text()), "stderr": output[rank]} for rank in (0, 1)]


@pytest.mark.parametrize("case", ["first input", "hooks inside"])
def test_all_ranks_stop_together(case: str, tmp_path: Path) -> None:
    ranks = run(case, tmp_path)
    for rank in ranks:
        assert rank["error"].startswith("> [3] 0: Linear: input[0] has infs, in batch 3 on rank 1. ")
        assert (rank["path"], rank["role"], rank["bad rank"]) == ("0", "input[0]", 1)
        assert (rank["steps"], rank["collectives in a step"]) == (3, 1)
        assert rank["finite"], "the optimizer has not spread what DDP averaged"
    assert ranks[0]["report"] == ranks[1]["report"]
    assert "last 40 frames:" not in ranks[0]["stderr"], "the report is logged where it happened"
    assert "last 40 frames:" in ranks[1]["stderr"]


def test_the_first_culprit_of_all_ranks(tmp_path: Path) -> None:
    ranks = run("both", tmp_path)
    # A hook of somebody else, after that of the detector, makes the inf: it is seen where it enters the next module.
    assert [(rank["path"], rank["role"], rank["bad rank"]) for rank in ranks] == [("1", "input[0]", 1)] * 2


def test_a_rank_whose_slots_are_full_waits_for_the_others(tmp_path: Path) -> None:
    """What it finds before the next look of all is told there, in the order of all forwards since the last one."""
    for rank in run("no room", tmp_path):
        # Batches 0 to 2 are healthy steps; 3 is the first forward of those that are accumulated.
        assert rank["error"].startswith("> [4] 2: Linear: input[0] has infs, in batch 4 on rank 1. ")
        assert (rank["steps"], rank["finite"]) == (3, True)


def test_a_detector_that_failed_stops_all_ranks(tmp_path: Path) -> None:
    ranks = run("failure", tmp_path)
    for rank in ranks:
        assert "has failed on rank 0 (LookupError: of the detector's own)" in rank["error"]
        assert (rank["steps"], rank["finite"], rank["bad rank"]) == (2, True, 0)
    assert [rank["cause"] for rank in ranks] == ['LookupError("of the detector\'s own")', "None"]


def test_one_rank_alone(tmp_path: Path) -> None:
    first, second = run("not distributed", tmp_path)
    assert first["error"] is None
    assert second["error"].startswith("> [3] 0: Linear: input[0] has infs")
    assert first["collectives"] == second["collectives"] == 0


def test_evaluation_makes_no_collective(tmp_path: Path) -> None:
    ranks = run("evaluation", tmp_path)
    assert [(rank["error"], rank["steps"], rank["collectives"]) for rank in ranks] == [(None, 5, 5), (None, 5, 5)]
