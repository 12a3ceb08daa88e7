"""Two processes under Lightning's DDP strategy: one set of logged numbers, a file a rank, and an end if one fails."""

from pathlib import Path

import pytest
import torch

from te_precision_callbacks.runs.fingerprints import Fingerprint
from tests.forked import Ended, Running, executable
from tests.lightning.models import csv_scalars, log_of, logged_lines, sample
from tests.reference import processes

SCRIPT = Path(__file__).with_name("ddp_script.py")


def run(strategy: str, folder: Path, *arguments: str) -> Ended:
    if strategy == "ddp_fork":
        return Running(SCRIPT, [strategy, str(folder), *arguments]).end()
    done = processes.run([executable(whole=True), str(SCRIPT), strategy, str(folder), *arguments])
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.extended)])
def test_two_ranks_log_one_set_of_numbers(tmp_path: Path, strategy: str) -> None:
    result = run(strategy, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = logged_lines(tmp_path / "debug")
    assert not log_of(tmp_path / "debug", 1).exists(), "the statistics are reduced, and rank 0 writes them"
    metrics = csv_scalars(tmp_path / "csv")
    for step in range(4):
        seen = torch.stack([sample(index) for index in range(16 * step, 16 * step + 16)]).double()
        assert lines["net.0_activation_max", step] == seen.max().item()
        assert lines["net.0_activation_l1_norm", step] == pytest.approx(seen.abs().sum().item(), rel=1e-6)
        assert metrics["te.net.0/activation/max"][step] == seen.max().item()
    assert sorted(metrics["te.net.0/activation/max"]) == [0, 1, 2, 3]
    if strategy == "ddp":
        [state] = torch.load(tmp_path / "saved.ckpt")["callbacks"].values()
        assert Fingerprint.from_text(state["fingerprint"]).rank == 0, "of the rank that writes the checkpoint"
    events = tmp_path / "debug" / "nvdlfw_inspect_logs"
    assert "LAYER=net.0" in (events / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert len(list(events.iterdir())) == 1, "rank 0 writes the events of all"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "failing_rank"), [pytest.param("ddp", "0", marks=pytest.mark.extended), ("ddp_fork", "1")]
)
def test_a_rank_that_raises_ends_both(tmp_path: Path, strategy: str, failing_rank: str) -> None:
    """The process group's timeout is 30 s: the other rank does not wait for good."""
    result = run(strategy, tmp_path, failing_rank)
    assert result.returncode != 0
    assert f"rank {failing_rank} has a bad batch" in result.stderr
    # The rank's gathered values are written, without a collective.
    steps = {step for _, step in logged_lines(tmp_path / "debug", int(failing_rank))}
    assert steps == {"0": {0, 1, 2}, "1": {2}}[failing_rank]
