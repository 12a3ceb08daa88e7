"""One of two gloo processes; only the second one meets a nan: python actions_script.py RANK FOLDER"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics

STEPS = 24
NAN_AT = 6
CASES: dict[str, dict[str, Any]] = {
    "every step": {"config": statistics()},
    "default": {},
    "alone": {"reduce": False},
    "too late": {"config": statistics(end_step=3)},
}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name, options in CASES.items():
        seen = train(rank, folder / name, options)
        (folder / f"{name} {rank}.json").write_text(json.dumps(seen))
        torch.distributed.barrier()


def train(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    low: list[int] = []
    upstream = tex.generic_gemm

    def spy(*operands: Any, **keywords: Any) -> Any:
        low[-1] += type(operands[0]) not in (torch.Tensor, torch.nn.Parameter)
        return upstream(*operands, **keywords)

    tex.generic_gemm = spy
    draws = torch.Generator().manual_seed(rank)
    reactions = {"nonfinite": "high precision: 5, protect checkpoint"}
    protects = []
    with InspectSession(model=net, log_dir=folder, on_finding=reactions, **options) as session:
        for step in range(STEPS):
            low.append(0)
            x = torch.randn(16, 32, generator=draws)
            if rank and step == NAN_AT:
                x[3, 5] = float("nan")
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                loss = net(x).square().mean()
            loss.backward()
            for parameter in net.parameters():
                torch.distributed.all_reduce(parameter.grad)
            if step != NAN_AT:
                optimizer.step()
            optimizer.zero_grad()
            session.step()
            protects.append(session.protects_checkpoints)
    tex.generic_gemm = upstream
    return {"low": low, "protects": protects}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
