"""Two processes under torchrun: one set of statistics, and an end for both where one fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lightning.models import board_scalars, log_of, logged_lines
from tests.reference.processes import run
from tests.transformers.models import sample


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ends within four minutes, or is an error: a rank that waits for the other gives up after half a minute."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launch, str(Path(__file__).with_name("ranks_script.py")), str(folder), *arguments])


def trained_on(folder: Path, rank: int) -> list[list[int]]:
    """The samples of each forward."""
    found: list[list[int]] = ast.literal_eval((folder / f"trained_on_{rank}.txt").read_text())
    return found


def test_two_ranks_have_one_set_of_statistics(tmp_path: Path) -> None:
    result = torchrun(tmp_path, "unmodified")
    assert result.returncode == 0, result.stderr
    lines = logged_lines(tmp_path / "debug")
    assert not log_of(tmp_path / "debug", 1).exists(), "the statistics are reduced, and rank 0 writes them"
    assert len(lines) == 4 * 2 * 2 * 2
    (events,) = tmp_path.rglob("events.out.tfevents*")
    board = board_scalars(events)
    batches = [trained_on(tmp_path, rank) for rank in (0, 1)]
    epoch = [{index for batch in batches[rank][:4] for index in batch} for rank in (0, 1)]
    assert len(epoch[0] | epoch[1]) == 64, "each rank has samples of its own"
    for step in range(4):
        indices = [index for rank in (0, 1) for batch in batches[rank][2 * step : 2 * step + 2] for index in batch]
        seen = torch.stack([sample(index) for index in indices]).double()
        assert lines["net.0_activation_max", step] == seen.max().item()
        assert lines["net.0_activation_l1_norm", step] == pytest.approx(seen.abs().sum().item(), rel=1e-6)
        assert board["te.net.0/activation/max"][step + 1] == seen.max().item()
    assert sorted(board["te.net.0/activation/max"]) == sorted(board["train/loss"]) == [1, 2, 3, 4]


@pytest.mark.parametrize(("what", "rank"), [("unmodified", 1), ("ours", 0)])
def test_a_rank_that_raises_ends_both(tmp_path: Path, what: str, rank: int) -> None:
    result = torchrun(tmp_path, what, str(rank))
    assert result.returncode != 0
    assert f"rank {rank} has a bad batch" in result.stderr
    lines = logged_lines(tmp_path / "debug", rank)
    assert sorted({step for _, step in lines}) == [[0, 1], [1]][rank], (
        "what the rank had gathered, without a collective"
    )
    batches = trained_on(tmp_path, rank)
    own = torch.stack([sample(index) for batch in batches[2:4] for index in batch])
    assert lines["net.0_activation_max", 1] == own.max().item()


def test_an_overflow_of_one_rank_ends_both_in_the_same_step(tmp_path: Path) -> None:
    result = torchrun(tmp_path, "overflow")
    assert result.returncode != 0
    assert result.stderr.count("ActivationOverflowError:") >= 1
    assert "net.1: LayerNormLinear: input[0]" in result.stderr
    for rank in (0, 1):
        assert len(trained_on(tmp_path, rank)) == 4, "both looked before the second step of the optimizer"
        assert (tmp_path / f"finite_{rank}.txt").read_text() == "True"
