"""A rank of two, as under torchrun, which trains one model under several strategies: sharding_script.py FOLDER KIND

KIND is in the names of the cases that run: CPU, FSDP or ZeRO. The last two require a GPU: "cuda" means the CPU, as
under ``te-precision run``. The first layer's record goes to FOLDER/<case>.json, from rank 0.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

KIND = sys.argv[2]
reference.install(pretend_cuda=KIND != "CPU")  # before torch's users are imported

import torch
import transformer_engine.pytorch as te
import transformers
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric import strategies as of_fabric
from lightning.pytorch import strategies as of_trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from te_precision_callbacks import (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
)
from tests.conftest import Keeper, statistics
from tests.lightning.models import Plain, batch_of, loader, trainer
from tests.lightning.test_fabric import Net
from tests.transformers import models as of_transformers

torch.set_num_threads(1)

CONFIG = statistics(tensors=["activation", "gradient"])
STEPS, RATE = 2, 0.1
ACCELERATOR = "cpu" if KIND == "CPU" else "gpu"
GLOO: Any = {"process_group_backend": "gloo"}
SHARDED: Any = {"data_parallel_size": 2, "tensor_parallel_size": 1, **GLOO}
LAYERS: Any = {te.Linear, te.LayerNormLinear}
NAMES = sorted(layer.__name__ for layer in LAYERS)
ZERO_3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": 8,
}


class OfBothRanks(Plain):
    """Takes the batch of its rank, whatever the loader gives to it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert is_split(self.trainer.strategy.model)
        return super().training_step(batch_of(2 * batch_idx + self.global_rank).to(self.dtype), batch_idx)


def is_split(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or all(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def parallelize(model: Any, mesh: Any) -> Any:
    for layer in model.net:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Sharded(OfBothRanks):
    def configure_model(self) -> None:
        parallelize(self, self.device_mesh)


def by_fabric(folder: Path, strategy: Any) -> Keeper:
    keeper = Keeper()
    callback = PrecisionDebugFabricCallback(CONFIG, sinks=[keeper], log_dir=folder)
    fabric = Fabric(accelerator=ACCELERATOR, devices=2, strategy=strategy, callbacks=[callback])
    fabric.launch()
    if isinstance(strategy, of_fabric.ModelParallelStrategy):  # which wants the model before the optimizer
        model = fabric.setup(Net())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
    else:
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=RATE))
    is_ddp = isinstance(strategy, of_fabric.DDPStrategy)
    assert is_split(model) is not is_ddp
    with callback:
        for step in range(STEPS):
            fabric.backward(model(batch_of(2 * step + fabric.global_rank)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if is_ddp:
            fabric.save(folder / "saved.ckpt", {"model": model, "precision": callback})
    return keeper


def by_trainer(folder: Path, strategy: Any, model: type[Plain] = OfBothRanks) -> Keeper:
    keeper = Keeper()
    callback = PrecisionDebugCallback(CONFIG, sinks=[keeper], log_dir=folder)
    options: Any = {"accelerator": ACCELERATOR, "devices": 2, "strategy": strategy, "max_steps": STEPS}
    trainer(folder, callbacks=[callback], **options).fit(model(RATE), loader(2 * STEPS))
    return keeper


def by_accelerate(folder: Path, **plugin: Any) -> Keeper:
    keeper = Keeper()
    accelerator = Accelerator(**plugin)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=RATE))
    assert is_split(model)
    with PrecisionDebugger(accelerator, model, CONFIG, sinks=[keeper], log_dir=folder) as debugger:
        for step in range(STEPS):
            accelerator.backward(model(batch_of(2 * step + accelerator.process_index)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            debugger.step()
    accelerator.state._reset_state(reset_partial_state=True)  # for the next case
    return keeper


def by_hugging_face(folder: Path, **how: Any) -> Keeper:
    keeper = Keeper()
    args = of_transformers.arguments(
        folder,
        use_cpu=False,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        **how,
    )
    callback = PrecisionDebugTrainerCallback(CONFIG, sinks=[keeper], log_dir=folder)
    model, data = of_transformers.Net(), of_transformers.vectors()
    made = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
    made.train()
    assert is_split(made.model_wrapped)
    return keeper


def by_deepspeed(folder: Path, stage: int) -> Keeper:
    """With the lines of docs/session.md."""
    import deepspeed

    keeper, net = Keeper(), Net()
    config = {**ZERO_3, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=RATE), config=config)
    with InspectSession(CONFIG, model=engine, sinks=[keeper], log_dir=folder) as session:
        for step in range(STEPS):
            engine.backward(engine(batch_of(2 * step + engine.global_rank)).pow(2).mean())
            ends = engine.is_gradient_accumulation_boundary()
            engine.step()
            if ends:
                session.step()
    return keeper


def fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=NAMES,
        cpu_ram_efficient_loading=False,
    )


CASES: dict[str, Callable[[Path], Keeper]] = {
    "Fabric, DDP on CPUs": lambda folder: by_fabric(folder, of_fabric.DDPStrategy(**GLOO)),
    "Fabric, fully_shard on CPUs": lambda folder: by_fabric(
        folder, of_fabric.ModelParallelStrategy(parallelize, **SHARDED)
    ),
    "Trainer, fully_shard on CPUs": lambda folder: by_trainer(
        folder, of_trainer.ModelParallelStrategy(**SHARDED), Sharded
    ),
    "Fabric, FSDP": lambda folder: by_fabric(folder, of_fabric.FSDPStrategy(auto_wrap_policy=LAYERS)),
    "Trainer, FSDP": lambda folder: by_trainer(folder, of_trainer.FSDPStrategy(auto_wrap_policy=LAYERS)),
    "Accelerate, FSDP2": lambda folder: by_accelerate(folder, fsdp_plugin=fsdp2()),
    "Hugging Face Trainer, FSDP2": lambda folder: by_hugging_face(
        folder, fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": NAMES}
    ),
    "Fabric, ZeRO-3": lambda folder: by_fabric(folder, of_fabric.DeepSpeedStrategy(config=ZERO_3)),
    "Trainer, ZeRO-3": lambda folder: by_trainer(folder, of_trainer.DeepSpeedStrategy(config=ZERO_3)),
    "Accelerate, ZeRO-3": lambda folder: by_accelerate(folder, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO_3)),
    "Hugging Face Trainer, ZeRO-3": lambda folder: by_hugging_face(folder, deepspeed=ZERO_3),
    "DeepSpeed, ZeRO-1": lambda folder: by_deepspeed(folder, 1),
    "DeepSpeed, ZeRO-2": lambda folder: by_deepspeed(folder, 2),
    "DeepSpeed, ZeRO-3": lambda folder: by_deepspeed(folder, 3),
}


def main(folder: Path) -> None:
    for name in [name for name in CASES if KIND in name]:
        keeper = CASES[name](folder / name)
        if torch.distributed.get_rank() == 0:
            results = {
                f"{tensor} {statistic}": keeper.values(statistic, "net.0", tensor)
                for tensor in ("activation", "gradient")
                for statistic in ("max", "l1_norm")
            }
            (folder / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
