"""One of two gloo processes, which run all cases, one after the other: python distributed_script.py RANK FOLDER"""

import contextlib
import io
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.diagnosis import PrecisionFindingError
from te_precision_callbacks.session import InspectSession, PrecisionContractError
from tests.conftest import Keeper, feature, statistics


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    scopes(rank, folder)
    gemm_errors(rank, folder)
    for case in (stages, losses, contract, stopped, kept, origin, lost, missed):
        case(rank, folder / case.__name__)
    torch.distributed.barrier()  # a rank alone waits for the records of rank 0 for ten seconds, which may be behind
    lost(rank, folder / "lost on one rank", rank_0_too=False)
    torch.distributed.barrier()
    for reduce in (False, True):
        on_one_rank(rank, folder / f"on one rank {reduce}", reduce=reduce)
    for case in (coverage, uneven, sharded, reduced):
        case(rank, folder / case.__name__)
    groups = [torch.distributed.new_group([index]) for index in range(2)]
    for name, reduce_amax, group in (("reduced", True, None), ("own", False, None), ("alone", True, groups[rank])):
        scales(rank, folder / f"scales {name}", DelayedScaling(reduce_amax=reduce_amax), group)
    cases: dict[str, dict[str, Any]] = {
        "world": {},
        "all": {"statistics_log": "all"},
        "own group": {"process_group": groups[rank]},
        "no reduction": {"reduce": False},
        "one fails": {"statistics_log": "all"},
    }
    for name, keywords in cases.items():
        run(name, rank, folder / name, keywords)


def loop(
    session: InspectSession,
    net: torch.nn.Module,
    steps: int,
    batch: Callable[[int], torch.Tensor] = lambda _: torch.ones(16, 32),
    fp8: Callable[[int], bool] | None = None,
) -> Iterator[int]:
    """Forward and backward of each step, then the caller's actions, then the session's step."""
    for step in range(steps):
        with te.autocast(enabled=fp8(step), recipe=Float8CurrentScaling()) if fp8 else contextlib.nullcontext():
            out = net(batch(step))
        out.sum().backward()
        yield step
        session.step()


def nan_if(spoilt: bool) -> torch.Tensor:
    return torch.full((16, 32), float("nan") if spoilt else 1.0)


def tell(file: Path, result: object) -> None:
    file.write_text(repr(result))


def macs_of(coverage: Coverage) -> dict[str, int]:
    return {f"{item.layer} {item.gemm} {item.precision}": item.macs for item in coverage if item.macs}


def coverage(rank: int, folder: Path) -> None:
    net = torch.nn.ModuleList([te.Linear(32, 32 + 32 * rank)])
    with InspectSession(statistics(), model=net, log_dir=folder, scope=f"pp{rank}") as session:
        list(loop(session, net[0], 2, fp8=lambda _: rank == 0))
        products = session.coverage()
    tell(folder / f"{rank}.txt", (macs_of(products), str(products.share("fp8"))))


def uneven(rank: int, folder: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), torch.nn.Linear(32, 32))
    try:
        with InspectSession(statistics(), model=net, log_dir=folder, require="fp8 >= 99%") as session:
            list(loop(session, net, 4, lambda _: torch.ones(16 + 32 * rank, 32), fp8=lambda _: True))
    except PrecisionContractError as error:
        parameters = sum(row.tensors for row in error.coverage.state if row.subject == "parameter")
        numbers = len(error.coverage), error.coverage.share("fp8"), parameters
        tell(folder / f"{rank}.txt", (macs_of(error.coverage), *numbers))


def sharded(rank: int, folder: Path) -> None:
    for how in ("tensor parallel", "fully_shard"):
        net = split_net(how, 128, init_device_mesh("cpu", (2,)))
        with InspectSession(None, model=net, log_dir=folder / how, reduce=False, strict=True) as session:
            list(loop(session, net, 1, lambda _: torch.ones(16, 64)))
            tell(folder / f"{how} {rank}.txt", macs_of(session.coverage()))


def reduced(rank: int, folder: Path) -> None:
    for how in ("DDP", "DDP with a hook", "fully_shard in bfloat16", "FSDP1", "tensor parallel"):
        net = split_net(how, 32, init_device_mesh("cpu", (2,)))
        with InspectSession(None, model=net, log_dir=folder / how, reduce=False, strict=True) as session:
            list(loop(session, net, 1, lambda _: torch.ones(16, 64, requires_grad=True)))
            rows = {row.dtype: row.bytes for row in session.coverage().state if row.subject == "reduce"}
        tell(folder / f"{how} {rank}.txt", rows)


def split_net(how: str, width: int, mesh: DeviceMesh) -> torch.nn.Module:
    net: Any = torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(64, width), down=torch.nn.Linear(width, 64)))
    half: dict[str, Any] = {"param_dtype": torch.bfloat16}
    if how == "fully_shard":
        fully_shard(net, mesh=mesh)
    elif how == "fully_shard in bfloat16":
        fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(**half, reduce_dtype=torch.float32))
    elif how == "tensor parallel":
        parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif how == "FSDP1":
        policy = MixedPrecision(**half, reduce_dtype=torch.bfloat16)
        net = FullyShardedDataParallel(
            net, mixed_precision=policy, device_id=torch.device("cpu")
        )  # else it seeks a GPU
    else:
        net = DistributedDataParallel(net)
        if how.endswith("hook"):
            net.register_comm_hook(None, fp16_compress_hook)
    return net


def contract(rank: int, folder: Path) -> None:
    net, demanded = te.Linear(32, 32), {"share": {"fp8": 100}, "by_step": 2}
    with InspectSession(statistics(), model=net, log_dir=folder, require=demanded, scope=f"pp{rank}") as session:
        try:
            list(loop(session, net, 4, fp8=lambda step: not (rank == 1 and step == 2)))
        except PrecisionContractError as error:
            tell(folder / f"{rank}.txt", (session.iteration, str(error)))


def stopped(rank: int, folder: Path) -> None:
    """A nan in the third step of rank 1: its statistics are not reduced into another layer's on rank 0."""
    net = te.Linear(32, 32)
    options: dict[str, Any] = {"on_finding": "stop: nonfinite", "scope": f"pp{rank}"}
    with InspectSession(statistics(stats=["nonfinite_num"]), model=net, log_dir=folder, **options) as session:
        try:
            list(loop(session, net, 6, lambda step: nan_if(rank == 1 and step == 2), fp8=lambda _: True))
        except PrecisionFindingError as error:
            tell(folder / f"{rank}.txt", (session.iteration, str(error)))


def kept(rank: int, folder: Path) -> None:
    """A nan in the third step of rank 1, and an optimizer on each rank."""
    net = te.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weights = []
    with InspectSession(model=net, log_dir=folder, on_finding="stop: nonfinite", scope=f"pp{rank}") as session:
        try:
            for _ in loop(session, net, 6, lambda step: nan_if(rank == 1 and step == 2)):
                weights.append(net.weight.detach().clone())
                optimizer.step()
        except PrecisionFindingError as error:
            is_kept = torch.equal(weights[-1], net.weight) and bool(net.weight.isfinite().all())
            findings = [(finding.layers, finding.tensor, finding.since) for finding in error.findings]
            tell(folder / f"{rank}.txt", (session.iteration, is_kept, findings))


def origin(rank: int, folder: Path) -> None:
    """A nan on rank 1, between two collection steps; its gradients reach both ranks."""
    net = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 32), te.Linear(32, 32))
    optimizer, steps = torch.optim.SGD(net.parameters(), lr=1e-3), iter(range(11))
    net[1].register_forward_hook(lambda module, inputs, output: output * nan_if(next(steps) == 7 and rank == 1))
    with InspectSession(model=net, log_dir=folder) as session:
        for _ in loop(session, net, 11, fp8=lambda _: True):
            for parameter in net.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    first = session.findings[0] if session.findings else None
    tell(folder / f"{rank}.txt", first and (first.rule, first.layers, first.tensor, first.since, first.ranks))


def on_one_rank(rank: int, folder: Path, *, reduce: bool) -> None:
    net, log = te.Linear(32, 32), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("te_precision_callbacks").addHandler(handler)
    with contextlib.suppress(ValueError):
        with InspectSession(statistics(stats=["nonfinite_num"]), model=net, log_dir=folder, reduce=reduce) as session:
            for step in loop(session, net, 4, lambda step: nan_if(rank == 1 and step >= 2)):
                if reduce and step == 2:
                    raise ValueError("bad batch")
    logging.getLogger("te_precision_callbacks").removeHandler(handler)
    (folder / f"{rank}.txt").write_text(f"{session.findings}\n{log.getvalue()}")


def lost(rank: int, folder: Path, *, rank_0_too: bool = True) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=folder, on_finding="stop") as session:
        try:
            for step in loop(session, net, 6):
                if rank == 0:
                    session.state_dict()
                is_lost = step + rank > 3 and (rank == 1 or rank_0_too)
                session.log({"loss": float("nan") if is_lost else 1.0})
        except PrecisionFindingError as error:
            (folder / f"{rank}.txt").write_text(f"{error}\n{session.findings.summary}")


def missed(rank: int, folder: Path) -> None:
    net = te.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    config = statistics(stats=["min", "max"])
    with InspectSession(config, model=net, log_dir=folder, statistics_log="all") as session:
        for step in range(45):
            net(torch.full((16, 32), float(step))).sum().backward()
            optimizer.step()
            if (rank, step) != (1, 2):
                session.step()


def scales(rank: int, folder: Path, recipe: DelayedScaling, group: Any) -> None:
    torch.manual_seed(rank)
    net = te.Linear(32, 32)
    with InspectSession(None, model=net, log_dir=folder) as session:
        for _ in range(31):
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                net(torch.randn(16, 32) * 8**rank).sum().backward()
            session.step()


def run(case: str, rank: int, folder: Path, keywords: dict[str, Any]) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=folder, **keywords) as session:
        for step in range(3):
            net((rank + 1) * torch.ones(16, 32)).sum().backward()
            if case == "one fails" and rank == 1 and step == 2:
                raise ValueError("bad batch")
            if case == "no reduction" and rank == 1:
                continue  # a collective of rank 0 would wait for this rank
            session.step()


def gemm_errors(rank: int, folder: Path) -> None:
    upstream = tex.generic_gemm

    def generic_gemm(*given: Any, **keywords: Any) -> Any:
        result = upstream(*given, **keywords)
        if rank == 1:
            result[0][16:24].zero_()
        return result

    tex.generic_gemm = generic_gemm
    net = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    try:
        for name in ("own", "merged"):
            torch.manual_seed(rank)
            keeper, config = Keeper(), {"s": feature("LogGemmError", ["all"], gemms=["fprop"], freq=1)}
            path = folder / f"gemm errors, {name}"
            with InspectSession(config, model=net, log_dir=path, sinks=[keeper], reduce=name == "merged") as session:
                with te.autocast(recipe=Float8CurrentScaling()):
                    net((rank + 1) * torch.randn(128, 64, dtype=torch.bfloat16)).sum().backward()
                session.step()
            tell(path / f"{rank}.txt", {row.statistic: row.value for records in keeper.steps for row in records})
    finally:
        tex.generic_gemm = upstream


def stages(rank: int, folder: Path) -> None:
    """A pipeline stage's part of a model: a list from index 0 on, with the numbers of the whole model."""
    block, experts = torch.nn.Sequential(te.Linear(32, 32)), te.GroupedLinear(2, 32, 32)
    block.layer_number = rank + 1
    mixture = torch.nn.ModuleDict({"experts": experts})
    mixture.local_expert_indices = [2 * rank, 2 * rank + 1]
    net = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block]), "mixture": mixture})
    with InspectSession(statistics(), model=net, log_dir=folder) as session:
        tokens = block((rank + 1) * torch.ones(16, 32))
        experts(torch.cat([torch.full_like(tokens, 4 + rank)] * 2), [16, 16]).sum().backward()
        session.step()


def scopes(rank: int, folder: Path) -> None:
    whole, half = Split(2, [64] * 4), Split(1, [64] * 2)
    with torch.no_grad():
        half.blocks[0].weight.copy_(whole.blocks[rank].weight)
        for number in range(2):
            getattr(half.experts, f"weight{number}").copy_(getattr(whole.experts, f"weight{2 * rank + number}"))
    if rank == 0:
        with InspectSession(QUANTIZED, model=whole, log_dir=folder / "whole", reduce=False) as session:
            whole(TOKENS.clone().requires_grad_()).backward(GRADIENT)
            whole.run_experts(ROUTED).pow(2).sum().backward()
            session.step()

    def said(path: str) -> str:
        return f"ep{rank}" if path == "experts" else f"pp{rank}"

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for case, scope in (("said", said), ("mesh", "")):
        if case == "mesh":
            half.experts = None  # a stage of a pipeline has its parameters on a part of the mesh of the whole job
            fully_shard(half, mesh=mesh["dp"])
        with InspectSession(QUANTIZED, model=half, log_dir=folder / case, scope=scope) as session:
            pipelined(half, rank, lambda output: (output * GRADIENT).sum())
            if case == "said":
                half.run_experts(ROUTED[2 * rank * 64 : 2 * (rank + 1) * 64]).pow(2).sum().backward()
            session.step()


def losses(rank: int, folder: Path) -> None:
    torch.manual_seed(rank)
    stage, known = te.Linear(64, 64), []
    optimizer = torch.optim.SGD(stage.parameters(), 0.01)
    with InspectSession(statistics(freq=3), model=stage, log_dir=folder) as session:
        for _ in range(8):
            loss = pipelined(stage, rank, lambda output: output.square().mean())
            if loss is not None:
                known.append(loss.item())
                session.log({"loss": loss})
            optimizer.step()
            session.step()
    tell(folder / f"{rank}.txt", known)


def pipelined(
    stage: torch.nn.Module, rank: int, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    hidden = TOKENS.clone()
    if rank == 1:
        torch.distributed.recv(hidden, 0)
    output = stage(hidden.requires_grad_())
    if rank == 0:
        gradient = torch.empty_like(output)
        torch.distributed.send(output.detach(), 1)
        torch.distributed.recv(gradient, 1)
        output.backward(gradient)
        return None
    loss = loss_of(output)
    loss.backward()
    torch.distributed.send(hidden.grad, 0)
    return loss


QUANTIZED = statistics(tensors=["activation", "weight", "gradient"], stats=["min", "max", "l2_norm", "std"])
QUANTIZED["quantized"] = feature(
    "LogFp8TensorStats", ["all"], tensors=["activation", "gradient"], stats=["underflows%", "mse"], freq=1
)
TOKENS, GRADIENT, ROUTED = (
    torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) for seed, rows in ((1, 32), (2, 32), (3, 256))
)


class Split(torch.nn.Module):
    def __init__(self, blocks: int, tokens: list[int]) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.blocks = torch.nn.ModuleList([te.Linear(64, 64, bias=False) for _ in range(blocks)])
        self.experts = te.GroupedLinear(len(tokens), 64, 64, bias=False)
        self.tokens = tokens

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=Float8CurrentScaling()):
            for block in self.blocks:
                hidden = block(hidden)
        return hidden

    def run_experts(self, tokens: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=Float8CurrentScaling()):
            return self.experts(tokens, self.tokens)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
