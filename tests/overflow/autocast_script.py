"""A rank of two under torchrun: autocast_script.py FOLDER. What each case ended with goes to FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from te_precision_callbacks.transformers import Trainer, TrainingArguments
from tests.preparing import prepare

prepare()  # before the models need the reference backend

from tests.transformers.models import Tokens, arguments

BAD_BATCH = 2


def llama() -> transformers.LlamaForCausalLM:
    """A PreTrainedModel of torch's own layers, whose loss leaves the logits and the cache unused."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


class Unused(torch.nn.Module):
    """The llama, with a parameter that no output depends on, and an output that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = llama()
        self.spare = torch.nn.Linear(32, 32)

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.llama(**batch)


def plant(model: torch.nn.Module, precision: str, rank: int, case: dict[str, Any]) -> None:
    """An inf in one batch of rank 1; in float16 an overflow in every batch of both, in a finite model."""
    projection = next(module for path, module in model.named_modules() if path.endswith("mlp.down_proj"))
    case["in_transformer_engine"] = type(projection).__module__.startswith("transformer_engine")
    if precision == "fp16":
        with torch.no_grad():
            projection.weight.fill_(6e4)  # type: ignore[operator, union-attr]
        projection.register_forward_pre_hook(lambda _, inputs: inputs[0].abs() + 1)
        own: Callable[..., Any] = model.forward
        model.forward = torch.autocast("cpu", torch.float16)(own)
        return
    calls = iter(range(100))

    def spoil(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        return inputs[0] * float("inf") if next(calls) == BAD_BATCH and rank == 1 else None

    projection.register_forward_pre_hook(spoil)


def with_trainer(folder: Path, precision: str, rank: int, case: dict[str, Any]) -> None:
    model = llama()
    args = arguments(folder, TrainingArguments, ddp_backend="gloo", debug="activation_overflow", max_steps=6)
    args.mixed_precision = "no" if precision == "fp16" else precision
    made = Trainer(model, args, train_dataset=Tokens())
    if precision == "fp16":
        made.accelerator.scaler = torch.amp.GradScaler("cpu")
    found = made.accelerator.prepare

    def prepare(*given: Any, **keywords: Any) -> Any:  # the layers that are hooked are those that it has made
        prepared = found(*given, **keywords)
        plant(made.model, precision, rank, case)
        return prepared

    made.accelerator.prepare = prepare
    try:
        made.train()
    finally:
        assert made.model_wrapped.find_unused_parameters


def with_accelerate(folder: Path, precision: str, rank: int, case: dict[str, Any]) -> None:
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    mixed = "no" if precision == "fp16" else precision
    accelerator = Accelerator(mixed_precision=mixed, cpu=True, kwargs_handlers=[unused])
    if precision == "fp16":
        accelerator.scaler = torch.amp.GradScaler("cpu")
    inner = Unused()
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=0.01))
    plant(accelerator.unwrap_model(model, keep_fp32_wrapper=True), precision, rank, case)
    tokens = torch.stack([Tokens()[index]["input_ids"] for index in range(4)])
    with DebugActivationOverflow(model):
        for _ in range(6):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    ended: dict[str, Any] = {}
    for front in (with_trainer, with_accelerate):
        for precision in ("bf16", "fp8", "fp16"):
            AcceleratorState._reset_state()
            GradientState._reset_state()
            os.environ["ACCELERATE_FP8_BACKEND"] = "TE" if precision == "fp8" else "NO"
            case: dict[str, Any] = {"error": None, "path": None, "batch": None, "rank": None}
            ended[f"{front.__name__} {precision}"] = case
            try:
                front(folder / precision, precision, rank, case)
            except ActivationOverflowError as error:
                case |= {"error": str(error), "path": error.path, "batch": error.batch, "rank": error.rank}
    (folder / f"{rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
