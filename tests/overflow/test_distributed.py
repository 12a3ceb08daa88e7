"""Two processes under DDP, which stop together; and FSDP in one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from tests import forked
from tests.overflow.models import lines_of


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    ended = forked.ranks(Path(__file__).with_name("ddp_script.py"), [[case, str(folder), str(rank)] for rank in (0, 1)])
    output = [rank.stderr for rank in ended]
    assert [rank.returncode for rank in ended] == [0, 0], output
    return [{**json.loads((folder / f"{rank}.json").read_text()), "stderr": output[rank]} for rank in (0, 1)]


FIRST_INPUT = {
    "error": "> [3] 0: Linear: input[0] has infs, in batch 3 on rank 1. ",
    "path": "0",
    "role": "input[0]",
    "bad rank": 1,
    "steps": 3,
    "collectives in a step": 1,
    "finite": True,  # the optimizer has not spread what DDP averaged
}
CASES: dict[str, dict[str, Any]] = {
    "first input": FIRST_INPUT,
    "hooks inside": FIRST_INPUT,
    # A foreign hook, after the detector's, makes the inf: it is seen where it enters the next module.
    "both": {"error": "> [3] 1: Tanh: input[0] has infs", "path": "1", "role": "input[0]", "bad rank": 1},
    # A rank whose slots are full waits for the others. Its findings before the next check of all are reported there, in
    # the order of all forwards since the last one: batches 0 to 2 are healthy steps, 3 is the first accumulated one.
    "no room": {"error": "> [4] 2: Linear: input[0] has infs, in batch 4 on rank 1. ", "steps": 3, "finite": True},
    "failure": {
        "error": "Activation overflow detection has failed on rank 0 (LookupError: of the detector's own)",
        "steps": 2,
        "finite": True,
        "bad rank": 0,
    },
    "evaluation": {"error": None, "steps": 5, "collectives": 5},
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_together(case: str, tmp_path: Path) -> None:
    ranks = run(case, tmp_path)
    expected = dict(CASES[case])
    begin = expected.pop("error")
    for rank in ranks:
        assert rank["error"] == begin or rank["error"].startswith(begin)
        assert {name: rank[name] for name in expected} == expected
    if case == "failure":
        assert [rank["cause"] for rank in ranks] == ['LookupError("of the detector\'s own")', "None"]
    if CASES[case] is FIRST_INPUT:
        assert ranks[0]["report"] == ranks[1]["report"]
        logged = ["last 40 frames:" in rank["stderr"] for rank in ranks]
        assert logged == [False, True], "the report is logged where it happened"


@pytest.mark.processes
def test_one_rank_alone(tmp_path: Path) -> None:
    first, second = run("not distributed", tmp_path)
    assert first["error"] is None
    assert second["error"].startswith("> [3] 0: Linear: input[0] has infs")
    assert first["collectives"] == second["collectives"] == 0


# ----------------------------------------------------------------------------------------------------------------- FSDP


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(kind: str) -> torch.nn.Module:
    """Three layers that multiply by 1, 1e10 and 1e10."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    with torch.no_grad():
        for layer, factor in zip(model, (1.0, 1e10, 1e10), strict=True):
            layer.weight.copy_(factor * torch.eye(4))
    if kind == "fully_shard":
        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    cpu, original = torch.device("cpu"), kind == "use_orig_params"
    for index in range(3):
        model[index] = FullyShardedDataParallel(model[index], use_orig_params=original, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch: no GPU, NO_SHARD
@pytest.mark.parametrize(
    ("kind", "gradients"),
    [("fully_shard", "grad of weight"), ("use_orig_params", None), ("flat", "grad of _flat_param")],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_overflow_under_fsdp_has_its_layer_and_direction(
    kind: str, gradients: str | None, where: str, one_rank: None
) -> None:
    model = sharded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model, 100):
        for bad in (False, True):
            loss = model(torch.full((1, 4), 1e25 if bad and where == "forward" else 1e-20)).sum()
            (loss * (1e20 if bad and where == "backward" else 1.0)).backward()
            optimizer.step()
    error = raised.value
    # Forward 1e25 * 1e10 * 1e10 = inf after the third layer, backward 1e20 * 1e10 * 1e10 = inf after the second.
    expected = ("2", "output") if where == "forward" else ("1", "grad_input[0]")
    assert (error.path, error.role, error.class_name, error.batch) == (*expected, "Linear", 1)
    first = [line for line in lines_of(error.report) if line.batch == 0]
    assert [line.path for line in first if line.role == "output"] == ["0", "1", "2", ""]
    of_parameters = {(line.path, line.role) for line in first if line.role.startswith("grad of")}
    assert of_parameters == ({(str(index), gradients) for index in range(3)} if gradients else set())
