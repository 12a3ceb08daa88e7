"""Small models of Transformer Engine, with a layer that suffers from low precision planted in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from tests.capability import any_capability, stand_for

RECIPES: dict[str, Callable[[], Any]] = {
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "delayed": recipes.DelayedScaling,
}

HIDDEN = 64


@contextmanager
def on_gpu_of(name: str) -> Iterator[None]:
    """Emulate a GPU that runs a recipe."""
    with any_capability():
        stand_for((10, 0) if name in ("mxfp8", "nvfp4") else (9, 0))
        yield


class Block(torch.nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = te.LayerNormLinear(width, width, params_dtype=dtype)
        self.mlp = te.LayerNormMLP(width, 2 * width, params_dtype=dtype)
        self.down = te.Linear(width, width, params_dtype=dtype)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + self.down(self.mlp(torch.nn.functional.gelu(self.up(hidden))))


class Net(torch.nn.Module):
    def __init__(
        self, recipe: Any, blocks: int = 3, dtype: torch.dtype = torch.bfloat16, *, width: int = HIDDEN
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.recipe = recipe
        self.blocks = torch.nn.ModuleList(Block(width, dtype) for _ in range(blocks))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(hidden.to(self.dtype))
        with te.autocast(enabled=True, recipe=self.recipe):
            for block in self.blocks:
                hidden = block(hidden)
        return hidden


def plant(block: Block, power: int = 18) -> None:
    """Scale a channel of the norm and its column of the weight against each other: nothing changes in high precision,
    but the weight's other columns vanish next to it in FP8 with one scale."""
    with torch.no_grad():
        block.up.layer_norm_weight[3] = 2.0**-power
        block.up.weight[:, 3] *= 2.0**power


def closure_of(model: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
    def closure(batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    return closure


def batches(seed: int = 0, width: int = HIDDEN) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    while True:
        inputs = torch.randn(width, width, generator=generator)
        yield inputs.bfloat16(), torch.tanh(inputs @ mixing)


def setup() -> dict[str, Any]:
    """The argument of ``te-precision search``."""
    model = Net(RECIPES["current"](), blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "closure": closure_of(model), "batches": batches(), "optimizer": optimizer}
