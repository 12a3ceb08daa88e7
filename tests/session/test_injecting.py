"""A rank runs out of memory inside step() or attach(): the training's own collectives are as without a session."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked import TIMEOUT, ranks

pytestmark = pytest.mark.slow

EVERY = int(os.environ.get("INJECT_EVERY", "397"))  # something fails at each of so many places
LONGEST = 45.0  # seconds: less than the timeout of a message in a step, so no rank has waited; on a busy machine too
LONGEST_RUN = 4 * 3600.0 if "INJECT_EVERY" in os.environ else TIMEOUT  # seconds

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4] if "INJECT_EVERY" in os.environ else [2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("injecting_script.py")
    ended = ranks(script, [[str(rank), str(world), str(folder), str(EVERY)] for rank in range(world)], LONGEST_RUN)
    assert [rank.returncode for rank in ended] == [0] * world, "\n".join(rank.stderr[-2000:] for rank in ended)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert not [rank["failed"] for rank in results if "failed" in rank]
    return results


def test_no_failure_reaches_the_training(found: Found) -> None:
    for results in zip(*(rank["places"] for rank in found), strict=True):
        place = {name: results[0][name] for name in ("where", "victim", "place")}
        assert not any(results[0]["right"]), f"a sum of the training is wrong: {place}"
        errors = [result["errors"] for result in results]
        assert len({bool(error["attach"]) for error in errors}) == 1, (
            f"attach() has raised on one rank alone: {place} {errors}"
        )
        assert not any(error.get("step") for error in errors), f"step() has raised: {place} {errors}"
        assert max(result["slowest"] for result in results) < LONGEST, f"a rank has waited: {place}"
    assert {result["where"] for result in found[0]["places"]} == {"attach", "step 0", "step 2"}
    assert any(result["raised"] for rank in found for result in rank["places"])


def test_ranks_that_are_apart_meet_again(found: Found) -> None:
    local = [rank["meet again"]["local"] for rank in found]
    for again in (rank["meet again"] for rank in found):
        assert again["right"]
        assert not any(again["errors"]), "step() has not raised"
        assert again["iterations"] == list(range(50))
        assert not any(again["local"][:2]), "until then all is reduced"
        assert all(again["local"][3:28]), "then the ranks are apart"
        assert not any(again["local"][40:]), "then they have met"
    assert all(of_rank[3:] == local[0][3:] for of_rank in local), "all in the same step"


def test_a_strict_session_raises_on_all_ranks_in_the_same_step(found: Found) -> None:
    for number, rank in enumerate(found):
        attached, first, second = rank["strict"]["errors"]
        assert (attached, first) == ("", "")
        assert "no room" in second
        assert number == 1 or "rank 1" in second.lower()
        assert rank["strict"]["right"]


def test_a_rank_that_compiles_in_its_first_step_is_waited_for(found: Found) -> None:
    assert {tuple(rank["slow"]) for rank in found} == {(True, False)}
