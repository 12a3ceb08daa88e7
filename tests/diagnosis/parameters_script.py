"""One of two gloo processes, which train in several ways: python parameters_script.py RANK FOLDER

Prints for each case the findings about ranks, and the rules about ranks that were checked.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch.optimizers import FusedAdam

from te_precision_callbacks.diagnosis import Verdict, diagnose
from tests.capability import stand_for
from tests.functions import Net
from tests.training import observed

RULES = ("replicas-differ", "no-reduction")
STEPS = 6


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(te.LayerNormLinear(32, 32), te.Linear(32, 32))


def averaged(weights: Iterable[torch.nn.Parameter]) -> None:
    for weight in weights:
        dist.all_reduce(weight.grad)
        weight.grad /= 2


def said(folder: Path, verdict: Verdict, *rules: str) -> str:
    """The case, its findings, and which of these rules were checked; by default those about ranks, and no other."""
    results = [
        (item.rule, item.severity, list(item.layers), item.seen) for item in verdict if rules or item.rule in RULES
    ]
    return json.dumps([folder.name, results, [rule for rule in rules or RULES if rule in verdict.checked]])


def train(
    folder: Path,
    net: torch.nn.Module,
    *,
    reduce: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
    reduces_statistics: bool = True,
    rules: Sequence[str] = (),
) -> None:
    rank = dist.get_rank()

    def loss(step: int) -> torch.Tensor:
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        return net(inputs).pow(2).mean()

    options: dict[str, Any] = {"loss": loss, "recipe": Float8CurrentScaling(), "before": reduce, "after": after}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    session = observed(folder, net=net, steps=STEPS, optimizers=optimizer, reduce=reduces_statistics, **options)
    dist.barrier()
    results = said(folder, session.findings, *rules)
    if rank == 0 and reduces_statistics:
        assert said(folder, diagnose(folder), *rules) == results
    print(results, flush=True)


def train_quantized_shards(folder: Path, recipe: Recipe, *, restores: bool) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    with te.quantized_model_init(recipe=recipe):
        net = torch.nn.Sequential(*(te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16) for _ in range(2)))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = FusedAdam(net.parameters(), lr=1e-3, master_weights=True, master_weight_dtype=torch.float32)
    shard = net[1].weight.to_local()
    codes = shard._rowwise_data if isinstance(recipe, MXFP8BlockScaling) else shard._data
    options: dict[str, Any] = {"recipe": recipe, "logs": True}
    options["loss"] = lambda _: net(torch.randn(32, 256, dtype=torch.bfloat16)).float().pow(2).mean()
    options["after"] = functools.partial(codes.copy_, codes.clone()) if restores else lambda: None
    session = observed(folder, net=net, steps=10, optimizers=optimizer, **options)
    print(said(folder, session.findings, "frozen-weight"), flush=True)


def with_experts(rank: int) -> Net:
    """A router that all ranks have, and different experts on each rank."""
    torch.manual_seed(0)
    router = torch.nn.Linear(32, 32)
    torch.manual_seed(1 + rank)
    experts = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(2))
    return Net(lambda net, x: sum(expert(net.router(x)) for expert in net.experts), router=router, experts=experts)


def total_norm(weights: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The norm of gradients of which each rank has a part."""
    total = torch.stack([weight.grad.square().sum() for weight in weights]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def clips(folder: Path, rank: int) -> None:
    """Trainings in which gradients are clipped, by the norm of all of them or not."""
    clip = torch.nn.utils.clip_grad_norm_
    plain = model()
    before = model()
    experts = with_experts(rank)
    together = with_experts(rank)
    by_torch, by_itself = (FullyShardedDataParallel(model(), device_id=torch.device("cpu")) for _ in range(2))
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    ddp = DistributedDataParallel(model())

    def clip_together() -> None:
        averaged(together.router.parameters())
        norm = total_norm(together.experts.parameters())
        torch.nn.utils.clip_grads_with_norm_(together.parameters(), 0.1, norm)

    ways = {
        "clipped, averaged": (plain, lambda: (averaged(plain.parameters()), clip(plain.parameters(), 0.1))),
        "clipped, ddp": (ddp, lambda: clip(ddp.parameters(), 0.1)),
        "clipped, fsdp": (by_itself, lambda: by_itself.clip_grad_norm_(0.1)),
        "clipped, fsdp 2": (sharded, lambda: clip(sharded.parameters(), 0.1)),
        "clipped, experts": (together, clip_together),
        "clipped, before the mean": (before, lambda: (clip(before.parameters(), 0.1), averaged(before.parameters()))),
        "clipped, shards by torch": (by_torch, lambda: clip(by_torch.parameters(), 0.1)),
        "clipped, experts alone": (
            experts,
            lambda: (averaged(experts.router.parameters()), clip(experts.parameters(), 0.1)),
        ),
    }
    for name, (net, act) in ways.items():
        train(folder / name, net, reduce=act, rules=["gradient-norm"])


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )

    train(folder / "alone", model())
    train(folder / "experts alone", with_experts(rank))
    train(folder / "local numbers", model(), reduces_statistics=False)
    net = model()
    train(folder / "averaged", net, reduce=lambda: averaged(net.parameters()))
    forgotten = model()
    train(folder / "one forgotten", forgotten, reduce=lambda: averaged(forgotten[0].parameters()))
    train(folder / "other seeds", model(rank))

    train(folder / "ddp", DistributedDataParallel(model()))
    drifting = DistributedDataParallel(model())
    drifting.module.tp_size = None  # as in models of transformers

    steps = iter(range(STEPS))

    def drift() -> None:
        if next(steps) == 2 and rank == 1:
            with torch.no_grad():
                drifting.module[0].layer_norm_weight += 0.01

    train(folder / "ddp drifting", drifting, after=drift)
    train(folder / "fsdp", FullyShardedDataParallel(model(), device_id=torch.device("cpu")))
    no_shard = FullyShardedDataParallel(
        model(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    train(folder / "fsdp without shards", no_shard)
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    train(folder / "fsdp 2", fully_shard(sharded, mesh=init_device_mesh("cpu", (2,))))

    for forgets in (False, True):
        torch.manual_seed(0)
        group = dist.new_group([0, 1])
        parallel = te.LayerNormLinear(32, 32, tp_group=group, tp_size=2, parallel_mode="column", sequence_parallel=True)
        norms = [parallel.layer_norm_weight, parallel.layer_norm_bias]
        reduce = (lambda: None) if forgets else (lambda norms=norms: averaged(norms))
        train(folder / f"norms{' forgotten' * forgets}", parallel, reduce=reduce)

    for forgets in (False, True):
        experts = with_experts(rank)
        reduce = (lambda: None) if forgets else (lambda experts=experts: averaged(experts.router.parameters()))
        train(folder / f"experts{', router forgotten' * forgets}", experts, reduce=reduce)

    clips(folder, rank)
    stand_for((10, 0))
    for recipe in (Float8CurrentScaling(), MXFP8BlockScaling()):
        for restores in (False, True):
            name = f"{'mxfp8' if recipe.mxfp8() else 'fp8'} shards{', restored' * restores}"
            train_quantized_shards(folder / name, recipe, restores=restores)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
