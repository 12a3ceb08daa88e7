"""Under FSDP, in one process: forwards, backwards, and which gradients of parameters there are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from tests.overflow.models import lines_of


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
def test_fsdp(kind: str, gradients: str | None, where: str, one_rank: None) -> None:
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
