"""Layers under every recipe, watched by LogFp8TensorStats and LogNvfp4TensorStats side by side."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipes

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper
from tests.engine.exact import BLOCK_STATISTICS

ROWS, INPUTS, OUTPUTS = 96, 160, 96
TENSORS = ("activation", "weight", "gradient")
OF_ANY_RECIPE = ("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max")
BLOCK_RECIPES = ("mxfp8", "fp8_block_scaling", "nvfp4")


def names(own: bool) -> list[str]:
    """The statistics of LogFp8TensorStats: four formats at once, and of the layer's own recipe if it has blocks."""
    asked = [f"fp8_current_scaling_{name}" for name in OF_ANY_RECIPE]
    for recipe in BLOCK_RECIPES:
        asked += [f"{recipe}_{name}" for name in (*OF_ANY_RECIPE, *BLOCK_STATISTICS)]
        asked += [f"{recipe}_{name}_columnwise" for name in ("mse", "underflow_blocks%", "zero_blocks%")]
    if own:
        asked += [*OF_ANY_RECIPE, *BLOCK_STATISTICS, "zero_blocks%_columnwise", "block_dynamic_range_max_columnwise"]
    return asked


def normal(seed: int, *shape: int, by: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(by * torch.randn(shape, generator=generator))
    return x.bfloat16()


def tensors() -> dict[str, torch.Tensor]:
    """Operands of the layer; the first of NVFP4's blocks in each row of the activation are zeros."""
    x = normal(0, ROWS, INPUTS)
    x[:, :16] = 0
    return {"activation": x, "weight": normal(1, OUTPUTS, INPUTS), "gradient": normal(2, ROWS, OUTPUTS)}


def observed(recipe_name: str | None, folder: Path) -> dict[str, Any]:
    """``"<tensor> <statistic>"`` -> value, of one step of a ``Linear``; histograms as bin -> count."""
    recipe = getattr(te_recipes, recipe_name)() if recipe_name else None
    given = tensors()
    torch.manual_seed(0)
    layer = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(given["weight"])
    options = {"enabled": True, "tensors": list(TENSORS), "freq": 1}
    features = {
        "LogFp8TensorStats": {**options, "stats": names(own=recipe_name not in (None, "Float8CurrentScaling"))},
        "LogNvfp4TensorStats": {
            **options,
            "stats": ["underflows%", "zero_blocks%", "underflow_blocks%_columnwise"],
        },
    }
    section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}
    keeper = Keeper()
    model = torch.nn.ModuleDict({"fc": layer})
    with InspectSession({"s": section}, model=model, log_dir=folder, sinks=[keeper], strict=True) as session:
        x = given["activation"].requires_grad_()
        with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
            y = layer(x)
        y.backward(given["gradient"])
        session.step()
    (records,) = keeper.steps
    results: dict[str, Any] = {f"{row.tensor} {row.statistic}": row.value for row in records}
    for (_, tensor, statistic), counts in records.vectors.items():
        results[f"{tensor} {statistic}"] = {str(place): count for place, count in enumerate(counts) if count}
    return results
