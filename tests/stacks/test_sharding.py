"""Two ranks under the strategies of trainers have the numbers of one process."""

import json
from pathlib import Path

import pytest
import torch

from tests.forked import launched
from tests.lightning.models import batch_of
from tests.lightning.test_fabric import Net

SCRIPT = Path(__file__).with_name("sharding_script.py")
STEPS, RATE = 2, 0.1  # as in the script


def in_one_process() -> dict[str, dict[str, float]]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    results: dict[str, dict[str, float]] = {}
    for step in range(STEPS):
        gradients: list[torch.Tensor] = []
        batches = [batch_of(2 * step + rank) for rank in range(2)]
        for batch in batches:
            hidden = net.net[0](batch)
            hidden.register_hook(gradients.append)
            (net.net[1](hidden).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        # DDP and fully_shard average the gradients of each rank's own mean.
        for tensor, parts in (("activation", batches), ("gradient", [2 * part for part in gradients])):
            seen = torch.cat(parts).double()
            results.setdefault(f"{tensor} max", {})[str(step)] = seen.max().item()
            results.setdefault(f"{tensor} l1_norm", {})[str(step)] = seen.abs().sum().item()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("CPU", 3), ("FSDP", 4), ("ZeRO", 7)])
def test_two_ranks_have_the_numbers_of_one_process(tmp_path: Path, kind: str, count: int) -> None:
    """Also on CPUs that pretend to be GPUs, with the classes and keywords of a user."""
    if kind == "ZeRO":
        pytest.importorskip("deepspeed")
    ended = launched(SCRIPT, [str(tmp_path), kind], whole=kind == "CPU")
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr[-3000:] for rank in ended)
    cases = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert len(cases) == count
    expected = in_one_process()
    for case in cases:
        result = json.loads((tmp_path / f"{case}.json").read_text())
        assert result == {name: pytest.approx(of_step, rel=1e-5) for name, of_step in expected.items()}, case
    if kind == "CPU":
        saved = torch.load(tmp_path / "Fabric, DDP on CPUs" / "saved.ckpt")
        assert saved["precision"]["iteration"] == STEPS
        assert saved["precision"]["fingerprint"]
