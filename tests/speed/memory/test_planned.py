"""The planned bytes of each kind are those of the tensors that the layers keep and save on the reference backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.layers.naming import named_te_modules
from te_precision_callbacks.speed.memory import plan_memory
from tests.capability import any_capability, stand_for
from tests.check.running import BF16, RECIPES
from tests.speed.memory.counting import SavedTensors, kept_rows

TOKENS = 256
NOT_COUNTED = {"gradient_codes"}

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
        self.operations = te.ops.Sequential(te.ops.Linear(96, 160, bias=False, dtype=BF16))
        self.own = torch.nn.Linear(160, 32, dtype=BF16)

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        for name in ("linear", "norm_linear", "rms_linear", "gelu", "swiglu"):
            x = self.get_submodule(name)(x, is_first_microbatch=first)
        x = self.grouped(x, [TOKENS // 2] * 2, is_first_microbatch=first)
        result: torch.Tensor = self.own(self.operations(x))
        return result


Totals = Mapping[tuple[str, str, str], int]


def module_of(layer: str) -> str:
    """The layer, or the GroupedLinear that it is a part of: it may save one tensor for all its groups."""
    return layer.partition(".gemm_")[0]


def both(model: torch.nn.Module, recipe: Any, *, first: bool | None = None, **keywords: Any) -> tuple[Totals, Totals]:
    """Planned and counted bytes of each layer, kind and time, without those that a count does not see."""
    modules = named_te_modules(model)
    memory = plan_memory(model, modules, recipe, tokens=TOKENS, cached=first is not None)
    with SavedTensors(model, modules) as saved, te.autocast(enabled=recipe is not None, recipe=recipe):
        out = model(torch.randn(TOKENS, 96, dtype=BF16, requires_grad=True), first, **keywords)
    out.float().sum().backward()
    assert saved.failures == {}
    planned: Counter[tuple[str, str, str]] = Counter()
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in memory:
        if row.kind not in NOT_COUNTED and row.layer != "own":
            planned[module_of(row.layer), row.kind, row.lives] += row.low
    for each in [*saved.rows, *kept_rows(model, modules)]:
        counted[module_of(each.layer), each.kind, each.lives] += each.bytes
    return +planned, +counted


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_all_recipes(case: str, cached: bool) -> None:
    with any_capability():
        capability, recipe = CASES[case]
        stand_for(capability)
        planned, counted = both(Layers(), recipe(), first=True if cached else None)
    assert planned == counted


@pytest.mark.parametrize("case", ["fp8_current_scaling", "mxfp8"])
def test_a_frozen_model_but_for_norms(case: str) -> None:
    with any_capability():
        capability, recipe = CASES[case]
        stand_for(capability)
        model = Layers()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 1)
        planned, counted = both(model, recipe())
    assert planned == counted


class WithoutMlp(Layers):
    """Without LayerNormMLP, which refuses a backward in another precision."""

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        x = self.rms_linear(self.norm_linear(self.linear(x)))
        result: torch.Tensor = self.operations(self.grouped(x, [TOKENS // 2] * 2))
        return result


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("case", ["fp8_current_scaling", "mxfp8"])
def test_a_backward_in_high_precision(case: str, override: str) -> None:
    with any_capability():
        stand_for(CASES[case][0])
        recipe = CASES[case][1]()
        recipe.backward_override = override
        model = WithoutMlp()
        del model.gelu, model.swiglu, model.own
        planned, counted = both(model, recipe)
    assert planned == counted


@pytest.mark.parametrize("case", [name for name in CASES if name != "none"])
def test_primary_quantized_weights(case: str) -> None:
    with any_capability():
        capability, make = CASES[case]
        stand_for(capability)
        recipe = make()
        with te.quantized_model_init(enabled=True, recipe=recipe):
            model = Layers()
        planned, counted = both(model, recipe)
    assert planned == counted
    assert planned["linear", "parameter", "always"] == 160 * 2, "the bias alone"


class Recomputed(torch.nn.Module):
    """A LayerNormMLP that computes its activations again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(96, 224, params_dtype=BF16, checkpoint=True)

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        result: torch.Tensor = self.mlp(x, is_first_microbatch=first)
        return result


@pytest.mark.parametrize("cached", [False, True])
def test_recomputed_activations(cached: bool) -> None:
    with any_capability():
        stand_for((9, 0))
        planned, counted = both(Recomputed(), recipes.Float8CurrentScaling(), first=True if cached else None)
    assert planned == counted
    assert planned["mlp.fc1", "saved_high", "to_backward"] == TOKENS * 96 * 2
    assert not any(kind.startswith("saved_") for layer, kind, _ in planned if layer == "mlp.fc2")


def test_the_original_input_is_saved() -> None:
    with any_capability():
        stand_for((9, 0))
        model = Layers()
        model.linear.save_original_input = True
        planned, counted = both(model, recipes.Float8CurrentScaling())
    assert planned == counted
    assert planned["linear", "saved_high", "to_backward"] == TOKENS * 96 * 2
