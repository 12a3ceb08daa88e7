"""Trains small models with each kind of activation checkpoint, and saves the products that a session has counted.

    python -m gpu_parts.coverage_rows FILE --device cpu --backend reference

coverage.py compares what comes out on the GPU and on the CPU. A process can have one backend, so each is its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gpu_parts.rows import Settings, in_one_line
from te_precision_callbacks.session import InspectSession

CHECKPOINTS = ("none", "reentrant", "non-reentrant")
_BATCH, _LENGTH, _WIDTH, _HEADS = 4, 32, 64, 4


class Block(torch.nn.Module):
    """Attention and an MLP of torch, each product of which is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = torch.nn.Linear(_WIDTH, _WIDTH)
        self.up = torch.nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = torch.nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one.view(_BATCH, _LENGTH, _HEADS, -1).transpose(1, 2) for one in self.qkv(inputs).chunk(3, -1)
        )
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        inputs = inputs + self.out(found.transpose(1, 2).reshape(inputs.shape))
        result: torch.Tensor = inputs + self.down(torch.nn.functional.gelu(self.up(inputs)))
        return result


class Stack(torch.nn.Module):
    """Some blocks, each in a checkpoint."""

    def __init__(self, make: Callable[[], torch.nn.Module], kind: str, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(make() for _ in range(2))
        self._kind = kind
        self._checkpoint = checkpoint

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self._kind == "none":
                inputs = block(inputs)
            else:
                inputs = self._checkpoint(block, inputs, use_reentrant=self._kind == "reentrant")
        return inputs


def _blocks(settings: Settings) -> dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Any]]]:
    """Name -> a block, and the checkpoint that is meant for it: torch's recomputes nothing in FP8."""
    te = settings.transformer_engine()
    sizes: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": settings.device}
    return {
        "torch": (lambda: Block().bfloat16().to(settings.device), checkpoint),
        "Transformer Engine": (
            lambda: torch.nn.Sequential(
                te.LayerNormLinear(_WIDTH, 2 * _WIDTH, **sizes), te.Linear(2 * _WIDTH, _WIDTH, **sizes)
            ),
            te.checkpoint,
        ),
    }


def counted(settings: Settings, model: torch.nn.Module) -> list[list[Any]]:
    """The products of a step with two micro-batches: layer, GEMM, whether of the backward, sizes, calls, precision."""
    te = settings.transformer_engine()
    from transformer_engine.common.recipe import DelayedScaling

    with tempfile.TemporaryDirectory() as folder, InspectSession(model=model, log_dir=folder, strict=True) as session:
        for _ in range(2):
            inputs = torch.randn(_BATCH, _LENGTH, _WIDTH, dtype=torch.bfloat16, device=settings.device)
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                output = model(inputs.requires_grad_())
            output.float().square().mean().backward()
        session.step()
        return sorted(
            [one.layer, one.gemm, one.backward, one.n, one.m, one.k, one.batch, one.calls, one.macs, one.precision]
            for one in session.coverage()
        )


def all_counted(settings: Settings) -> dict[str, Any]:
    """Model and kind of checkpoint -> its products, or how it failed, as text."""
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for name, (make, recompute) in _blocks(settings).items():
        for kind in CHECKPOINTS:
            try:
                found[f"{name}, checkpoint: {kind}"] = counted(settings, Stack(make, kind, recompute))
            except Exception as error:
                found[f"{name}, checkpoint: {kind}"] = in_one_line(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_parts.coverage_rows")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--backend", choices=("reference", "compiled"), required=True)
    options = parser.parse_args()
    settings = Settings(torch.device(options.device), small=True, backend=options.backend)
    options.file.write_text(json.dumps(all_counted(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
