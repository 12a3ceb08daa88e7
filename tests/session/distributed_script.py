"""One of two gloo processes, which run all cases, one after the other: python distributed_script.py RANK FOLDER"""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.engine import reduction
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics

CASES = ("world", "all", "own group", "no reduction", "one fails")


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    start_late(rank, folder / "late")
    stages(rank, folder / "stages")
    groups = [torch.distributed.new_group([index]) for index in range(2)]
    for case in CASES:
        keywords = {
            "world": {},
            "own group": {"process_group": groups[rank]},
            "no reduction": {"reduce": False},
            "all": {"statistics_log": "all"},
            "one fails": {"statistics_log": "all"},
        }[case]
        run(case, rank, folder / case, keywords)


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


class Stage(torch.nn.Module):
    """What a stage of a pipeline has of a model: a list from index 0 on, with the numbers of the whole model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        block = torch.nn.Sequential(te.Linear(32, 32))
        block.layer_number = rank + 1
        self.layers = torch.nn.ModuleList([block])
        self.mixture = torch.nn.ModuleDict({"experts": te.GroupedLinear(2, 32, 32)})
        self.mixture.local_expert_indices = [2 * rank, 2 * rank + 1]


def stages(rank: int, folder: Path) -> None:
    net = Stage(rank)
    with InspectSession(statistics(), model=net, log_dir=folder) as session:
        tokens = net.layers[0]((rank + 1) * torch.ones(16, 32))
        net.mixture["experts"](torch.cat([torch.full_like(tokens, 4 + rank)] * 2), [16, 16]).sum().backward()
        session.step()


def start_late(rank: int, folder: Path) -> None:
    """Rank 1 comes when rank 0 has said that it waits, or not within 15 seconds."""
    usual, reduction.WAITING = reduction.WAITING, 0.2
    folder.mkdir(exist_ok=True)
    said = folder / "rank-0.log"
    logging.getLogger("te_precision_callbacks").addHandler(logging.FileHandler(folder / f"rank-{rank}.log"))
    until = time.monotonic() + 15
    while rank == 1 and not (said.exists() and said.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)
    with InspectSession(statistics(), model=te.Linear(32, 32), log_dir=folder):
        reduction.WAITING = usual


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
