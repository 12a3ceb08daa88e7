"""Planned bytes are those of the tensors that layers keep and save on the reference backend."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.layers.naming import named_te_modules
from te_precision_callbacks.speed.memory import plan_memory
from tests.capability import any_capability, stand_for
from tests.check.running import BF16, RECIPES
from tests.speed.counting import Counts, count_kept, counting_saved

TOKENS = 256
PARTS = {
    "parameter": "high",
    "saved_high": "high",
    "weight_codes": "codes",
    "saved_codes": "codes",
    "gradient": "gradient",
    "scaling_state": "scaling",
}

CASES: dict[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    **RECIPES,
    "delayed on Blackwell": ((10, 0), recipes.DelayedScaling),
    "current on Blackwell": ((10, 0), recipes.Float8CurrentScaling),
    "E4M3": ((9, 0), lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E4M3, amax_history_len=16)),
    "current E4M3": ((9, 0), lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)),
    "mxfp8 HYBRID": ((10, 0), lambda: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID)),
    "nvfp4 without 2D": ((10, 0), lambda: recipes.NVFP4BlockScaling(disable_2d_quantization=True)),
}


class Layers(torch.nn.Module):
    """A layer of each class, of sizes that need padded scales; the experts share the tokens equally."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(96, 160, params_dtype=BF16)
        self.norm_linear = te.LayerNormLinear(160, 96, params_dtype=BF16)
        self.rms_linear = te.LayerNormLinear(96, 96, bias=False, normalization="RMSNorm", params_dtype=BF16)
        self.gelu = te.LayerNormMLP(96, 224, params_dtype=BF16)
        self.swiglu = te.LayerNormMLP(96, 224, activation="swiglu", normalization="RMSNorm", params_dtype=BF16)
        self.grouped = te.GroupedLinear(2, 96, 96, params_dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            x = layer(x, [TOKENS // 2] * 2) if name == "grouped" else layer(x)
        return x


def both(model: torch.nn.Module, recipe: Any) -> tuple[Counts, Counts]:
    """Planned and counted bytes of each module."""
    modules = named_te_modules(model)
    memory = plan_memory(model, modules, recipe, tokens=TOKENS)
    counted: Counts = Counter()
    with te.autocast(enabled=recipe is not None, recipe=recipe), counting_saved(modules, counted):
        out = model(torch.randn(TOKENS, 96, dtype=BF16, requires_grad=True))
    out.float().sum().backward()
    count_kept(modules, counted)
    planned: Counts = Counter()
    for row in memory:
        if row.kind in PARTS:
            planned[row.layer.partition(".")[0], PARTS[row.kind], row.lives] += row.low
    return +planned, +counted


@pytest.mark.parametrize("case", CASES)
def test_all_recipes(case: str) -> None:
    with any_capability():
        capability, recipe = CASES[case]
        stand_for(capability)
        planned, counted = both(Layers(), recipe())
    assert planned == counted


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("case", ["fp8_current_scaling", "mxfp8"])
def test_a_backward_in_high_precision(case: str, override: str) -> None:
    with any_capability():
        stand_for(CASES[case][0])
        recipe = CASES[case][1]()
        recipe.backward_override = override
        model = Layers()
        del model.gelu, model.swiglu  # LayerNormMLP refuses a backward in another precision
        planned, counted = both(model, recipe)
    assert planned == counted


@pytest.mark.parametrize("case", [name for name in RECIPES if name != "none"])
def test_primary_quantized_weights(case: str) -> None:
    with any_capability():
        capability, make = CASES[case]
        stand_for(capability)
        recipe = make()
        with te.quantized_model_init(enabled=True, recipe=recipe):
            model = Layers()
        planned, counted = both(model, recipe)
    assert planned == counted
    assert planned["linear", "high", "always"] == 160 * 2, "the bias alone"


def test_recomputed_activations() -> None:
    with any_capability():
        stand_for((9, 0))
        mlp = te.LayerNormMLP(96, 224, params_dtype=BF16, checkpoint=True)
        planned, counted = both(torch.nn.Sequential(OrderedDict(mlp=mlp)), recipes.Float8CurrentScaling())
    assert planned == counted
    assert planned["mlp", "high", "to_backward"] == TOKENS * 96 * 2
    assert ("mlp", "codes", "to_backward") not in planned


def test_the_original_input_is_saved() -> None:
    with any_capability():
        stand_for((9, 0))
        model = Layers()
        model.linear.save_original_input = True
        planned, counted = both(model, recipes.Float8CurrentScaling())
    assert planned == counted
    assert planned["linear", "high", "to_backward"] == TOKENS * 96 * 2
