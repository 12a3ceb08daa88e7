"""A rank of two that trains with DistributedDataParallel, with or without a search: ranks_script.py RANK FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.preparing import prepare

prepare()  # before anything imports Transformer Engine

from torch.nn.parallel import DistributedDataParallel

from te_precision_callbacks.search import search
from tests.search.models import RECIPES, Net, batches


def train(rank: int, folder: Path, *, searches: bool) -> tuple[list[float], Any]:
    model = DistributedDataParallel(Net(RECIPES["delayed"](), blocks=1), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(rank)

    def closure(batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    losses = []
    result = None
    for step in range(4):
        if step == 2 and searches:
            options: dict[str, Any] = {"cosine": 0.9999, "steps": 2, "seeds": 2, "folder": folder, "progress": False}
            result = search(model, closure, batches(10 + rank), optimizer=optimizer, **options)
        optimizer.zero_grad()
        loss = closure(next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, result


def main() -> None:
    rank = int(sys.argv[1])
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    plain, _ = train(rank, folder, searches=False)
    searched, result = train(rank, folder / "search", searches=True)
    found = {"plain": plain, "searched": searched, "high": result.high, "cosine": result.effect.cosine}
    found["differences"] = [result.confirmation.choice.difference, result.confirmation.low.difference]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
