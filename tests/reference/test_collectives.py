"""Collectives that gloo does not run as NCCL does. One process is enough: gloo copies and checks there as elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_precision_callbacks.reference import ReferenceBackendError
from te_precision_callbacks.reference.collectives import _on_memory, one_by_one
from tests.reference.processes import answers


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Prelude of a process that joins a group by itself."""
    yield {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    dist.destroy_process_group()


@pytest.fixture
def gloo(alone: dict[str, Any]) -> None:
    dist.init_process_group("gloo", **alone)


@pytest.mark.usefixtures("gloo")
def test_tensors_of_different_types_are_gathered_together() -> None:
    """FP8 codes and the scales of their blocks: gloo's own coalesced all-gather reads one as the other."""
    codes, scales = torch.arange(96, dtype=torch.uint8), torch.tensor([6.29, 2.0**-20, 3e8])
    gathered = torch.empty_like(codes), torch.empty_like(scales)
    with one_by_one(device=torch.device("cpu"), async_ops=True) as handle:
        dist.all_gather_into_tensor(gathered[0], codes)
        dist.all_gather_into_tensor(gathered[1], scales, async_op=True)
    handle.wait()
    assert torch.equal(gathered[0], codes)
    assert torch.equal(gathered[1], scales)


@pytest.mark.usefixtures("gloo")
def test_a_manager_that_was_left_keeps_nothing_of_its_group() -> None:
    """torch records all later collectives of the group, and runs none of them, where a manager has raised."""
    total = torch.tensor([6.29])
    with pytest.raises(ZeroDivisionError), one_by_one():
        dist.all_reduce(total)
        raise ZeroDivisionError
    gathered = torch.zeros(1)
    dist.all_gather_into_tensor(gathered, total)
    assert torch.equal(gathered, total)
    with one_by_one(), pytest.raises(ValueError, match="nested"), one_by_one():
        pass


@pytest.mark.processes
def test_a_pretended_gpu_gathers_and_reduces_as_a_gpu_does(tmp_path: Path) -> None:
    assert answers(
        f"""
        from te_precision_callbacks import reference
        reference.install(pretend_cuda=True)
        import multiprocessing
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional

        def sum_of_own_group(rank):
            wait = timedelta(seconds=20)
            store = "file://{tmp_path}/store_of_four"
            dist.init_process_group("nccl", init_method=store, rank=rank, world_size=4, timeout=wait)
            own = dist.new_group([0, 1] if rank < 2 else [2, 3], wait)  # each rank asks for its own group alone
            total = torch.tensor([10**rank], device="cuda")
            dist.all_reduce(total, group=own)
            return total.item()

        with multiprocessing.get_context("fork").Pool(4) as ranks:
            answer = [ranks.map(sum_of_own_group, range(4), chunksize=1)]

        dist.init_process_group("nccl", init_method="file://{tmp_path}/nccl_store", rank=0, world_size=1)
        loss, count = torch.tensor([6.29], device="cuda"), torch.tensor([7], device="cuda")
        for device in (None, torch.device("cuda", 0)):
            with dist._coalescing_manager(device=device):
                dist.all_reduce(loss)
                dist.all_reduce(count)
            results = [torch.zeros_like(count), torch.zeros_like(loss)]
            with dist._coalescing_manager(device=device, async_ops=True) as handle:
                dist.all_gather_into_tensor(results[0], count)
                dist.all_gather_into_tensor(results[1], loss)
            handle.wait()
            answer.append([*(result.item() for result in results), count.item()])
        together = functional.all_gather_into_tensor_coalesced([count, loss], dist.group.WORLD)
        answer.append([tensor.item() for tensor in together])

        leaf = torch.zeros(4, device="cuda", requires_grad=True)
        dist.reduce_scatter_tensor(leaf, torch.ones(4))
        half = (leaf * 1).split(2)[0]  # a view that autograd follows
        dist.all_gather_into_tensor(half, torch.full((2,), 5.0))
        answer.append([leaf.tolist(), half.tolist()])

        codes = torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn)
        gathered = [torch.zeros_like(codes)]
        dist.all_gather(gathered, codes)
        dist.broadcast(codes, 0)
        answer.append(gathered[0].float().tolist())

        sizes, row = torch.tensor([[30, 64]]), torch.zeros(2, dtype=torch.int64)  # of as many numbers, and other shapes
        dist.all_gather_into_tensor(row, sizes)
        scattered = torch.zeros_like(sizes)
        dist.reduce_scatter_tensor(output=scattered, input=row)
        answer.append([row.tolist(), scattered.tolist()])
        dist.destroy_process_group()
        """
    ) == [
        [11, 11, 1100, 1100],
        *[[7, pytest.approx(6.29), 7]] * 2,
        [7, pytest.approx(6.29)],
        [[1.0] * 4, [5.0] * 2],
        [1.5, -448.0],
        [[30, 64], [[30, 64]]],
    ]


@pytest.mark.usefixtures("gloo")
def test_a_tensor_with_gaps_is_refused_as_nccl_refuses_it() -> None:
    """gloo reduces the memory from its first element on: numbers that are not the tensor's."""
    all_reduce = _on_memory(dist.all_reduce, moves=False)
    numbers = torch.arange(12.0).view(3, 4)
    for dense in (numbers, numbers.t(), numbers[1:]):
        all_reduce(dense)
    for gaps in (numbers[:, ::2], numbers[:, :3], numbers[0, :1].expand(3)):
        with pytest.raises(ReferenceBackendError, match=r"all_reduce: .* has gaps or overlaps"):
            all_reduce(gaps)
