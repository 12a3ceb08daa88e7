"""Two processes as under torchrun, and under it: one set of statistics, and an end for both where one fails."""

import ast
from pathlib import Path

import pytest
import torch

from tests.forked import launched
from tests.lightning.models import board_scalars, largest_inputs, log_of, logged_lines, sample

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("ranks_script.py")


def trained_on(folder: Path, rank: int) -> list[list[int]]:
    result: list[list[int]] = ast.literal_eval((folder / f"trained_on_{rank}.txt").read_text())
    return result


def test_two_ranks_have_one_set_of_statistics(tmp_path: Path) -> None:
    ended = launched(SCRIPT, [str(tmp_path), "unmodified"])
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
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


def test_a_rank_that_raises_ends_both(tmp_path: Path) -> None:
    """With our Trainer, whose session ends before the other rank knows."""
    ended = launched(SCRIPT, [str(tmp_path), "ours", "0"])
    assert all(rank.returncode != 0 for rank in ended)
    assert "rank 0 has a bad batch" in ended[0].stderr
    # What the rank had gathered is written, without a collective; the failed step's numbers are its own.
    lines = largest_inputs(tmp_path / "debug")
    assert sorted(lines) == [0, 1]
    own = [sample(index).max().item() for batch in trained_on(tmp_path, 0)[2:4] for index in batch]
    assert lines[1] == max(own)


def test_an_overflow_of_one_rank_ends_both_in_the_same_step(tmp_path: Path) -> None:
    ended = launched(SCRIPT, [str(tmp_path), "overflow"])
    for rank, item in enumerate(ended):
        assert item.returncode != 0
        assert "ActivationOverflowError:" in item.stderr
        assert "net.1: LayerNormLinear: input[0]" in item.stderr
        assert len(trained_on(tmp_path, rank)) == 4, "both looked before the second step of the optimizer"
        assert (tmp_path / f"finite_{rank}.txt").read_text() == "True"
