"""A rank of two, as under torchrun, which trains one model under several strategies: sharding_script.py FOLDER

What the first layer has seen goes to FOLDER/<case>.json, from rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerModelParallel
from torch.distributed.fsdp import fully_shard

from te_precision_callbacks import (
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
)
from tests.preparing import prepare

prepare()  # before the models need the reference backend

from tests.conftest import Keeper, statistics
from tests.lightning import models
from tests.lightning.models import Plain, batch_of, loader
from tests.lightning.test_fabric import Net
from tests.stacks.found import write_found

CONFIG = statistics(tensors=["activation", "gradient"])
STEPS, RATE = 2, 0.1
GLOO: Any = {"process_group_backend": "gloo"}
SHARDED: Any = {"data_parallel_size": 2, "tensor_parallel_size": 1, **GLOO}


def parallelize(model: Any, mesh: Any) -> Any:
    for layer in model.net:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def by_fabric(folder: Path, strategy: Any) -> Keeper:
    keeper = Keeper()
    callback = PrecisionDebugFabricCallback(CONFIG, sinks=[keeper], log_dir=folder)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback])
    fabric.launch()
    if isinstance(strategy, ModelParallelStrategy):  # which wants the model before the optimizer
        model = fabric.setup(Net())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
    else:
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=RATE))
    with callback:
        for step in range(STEPS):
            fabric.backward(model(batch_of(2 * step + fabric.global_rank)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(strategy, DDPStrategy):
            fabric.save(folder / "saved.ckpt", {"model": model, "precision": callback})
    return keeper


class OfBothRanks(Plain):
    """Takes the batch of its rank, whatever the loader gives to it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch_of(2 * batch_idx + self.global_rank), batch_idx)


class Sharded(OfBothRanks):
    def configure_model(self) -> None:
        parallelize(self, self.device_mesh)


def by_trainer(folder: Path, model: Plain, strategy: Any) -> Keeper:
    keeper = Keeper()
    callback = PrecisionDebugCallback(CONFIG, sinks=[keeper], log_dir=folder)
    made = models.trainer(folder, devices=2, strategy=strategy, callbacks=[callback], max_steps=STEPS)
    made.fit(model, loader(2 * STEPS))
    return keeper


CASES: dict[str, Callable[[Path], Keeper]] = {
    "Fabric, DDP": lambda folder: by_fabric(folder, DDPStrategy(**GLOO)),
    "Fabric, fully_shard": lambda folder: by_fabric(folder, ModelParallelStrategy(parallelize, **SHARDED)),
    "Trainer, fully_shard": lambda folder: by_trainer(folder, Sharded(RATE), TrainerModelParallel(**SHARDED)),
}


def main(folder: Path) -> None:
    for name, case in CASES.items():
        keeper = case(folder / name)
        write_found(keeper, folder / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
