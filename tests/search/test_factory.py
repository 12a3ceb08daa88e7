"""The factory of quantizers: all-low gives the bits of the built-in recipe, a choice the debug features' bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.search.units import Units
from te_precision_callbacks.search.writing import write_config
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.te.custom_recipe import assign_names, custom_recipe
from tests.search.models import HIDDEN, RECIPES, Net, batches, closure_of, on_gpu_of


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A recipe's name, on a GPU that runs it."""
    with on_gpu_of(request.param):
        yield request.param


def dtype_of(name: str) -> torch.dtype:
    """FP32, so that norms and activation functions fused with casts round as all others; NVFP4 needs BF16."""
    return torch.bfloat16 if name == "nvfp4" else torch.float32


def modules(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    options: Any = {"params_dtype": dtype}
    return torch.nn.ModuleDict(
        {
            "linear": te.Linear(HIDDEN, HIDDEN, **options),
            "norm": te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options),
            "mlp": te.LayerNormMLP(HIDDEN, HIDDEN, **options),
            "block": te.TransformerLayer(HIDDEN, HIDDEN, 4, hidden_dropout=0, attention_dropout=0, **options),
        }
    )


def steps(model: Any, recipe: Any, count: int = 2) -> dict[str, torch.Tensor]:
    """Outputs and gradients of some steps."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # of stochastic rounding
    dtype = next(model.parameters()).dtype
    results = {}
    for step in range(count):
        hidden = torch.randn(64, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for module in model.values():
                hidden = module(hidden)
        model.zero_grad()
        hidden.float().square().mean().backward()
        results |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results[f"output {step}"] = hidden.detach()
    return results


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    assert len(a) == len(b)
    return {label.partition(" ")[0] for label in a if not torch.equal(a[label], b[label])}


def units_of(model: torch.nn.Module) -> list[str]:
    return list(Units(model).layers)


FIRST_BIAS = {"mlp.fc1_bias", "block.layernorm_mlp.fc1_bias"}
"""Its gradient is summed elsewhere in the backward of a LayerNormMLP with a CustomRecipe."""


def test_all_low_is_the_built_in_recipe(name: str) -> None:
    low = RECIPES[name]()
    dtype = dtype_of(name)
    built_in = steps(modules(dtype), low)
    model = modules(dtype)
    ours = steps(model, custom_recipe(low, dict.fromkeys(units_of(model), ())))
    assert differing(ours, built_in) == set()
    assert len(differing(built_in, steps(modules(dtype), None))) > 20, "the recipe changes the results"


def test_linear_layers_in_bf16_have_the_bits_of_the_built_in_recipe(name: str) -> None:
    low = RECIPES[name]()

    def linear() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"linear": te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16)})

    model = linear()
    ours = steps(model, custom_recipe(low, dict.fromkeys(units_of(model), ())), 3)
    assert differing(ours, steps(linear(), low, 3)) == set()


def test_all_high_is_high_precision(name: str) -> None:
    model = modules(torch.bfloat16)
    ours = steps(model, custom_recipe(RECIPES[name](), dict.fromkeys(units_of(model), GEMMS)))
    high = steps(modules(torch.bfloat16), None)
    assert differing(ours, high) <= FIRST_BIAS
    for label in ours:
        torch.testing.assert_close(ours[label], high[label], rtol=0.02, atol=1e-4)


def test_options_of_the_recipe_are_kept() -> None:
    low = recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)
    low.fp8_quant_fwd_weight = recipes.QParams(power_2_scale=True)
    model = modules(torch.float32)
    ours = steps(model, custom_recipe(low, dict.fromkeys(units_of(model), ())))
    assert differing(ours, steps(modules(torch.float32), low)) == set()
    assert differing(ours, steps(modules(torch.float32), recipes.Float8CurrentScaling())) > FIRST_BIAS


HIGH = {
    "blocks.0.up": ("fprop",),
    "blocks.0.mlp.fc1": ("dgrad",),
    "blocks.0.mlp.fc2": ("wgrad",),
    "blocks.0.down": ("fprop", "dgrad"),
    "blocks.1.up": ("dgrad", "wgrad"),
    "blocks.1.down": GEMMS,
}


def loss_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    loss = closure_of(model)(next(batches()))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"], indirect=True)  # the others: see docs/search.md
def test_a_choice_gives_the_bits_of_the_debug_features(name: str, tmp_path: Path) -> None:
    low = RECIPES[name]()
    model = Net(low, blocks=2, dtype=torch.float32)
    units = Units(model)
    choice = frozenset((unit, gemm) for unit, gemms in HIGH.items() for gemm in gemms)
    write_config(tmp_path / "config.yaml", choice, units, model, low)
    with InspectSession(tmp_path / "config.yaml", log_dir=tmp_path / "logs") as session:
        session.attach(model)
        by_features = loss_and_gradients(model)
        session.step()

    model = Net(low, blocks=2, dtype=torch.float32)
    assign_names(model)
    model.recipe = custom_recipe(low, units.high(choice))
    ours = loss_and_gradients(model)
    assert {name.rpartition(".")[2] for name in differing(ours, by_features)} <= {"fc1_bias"}
    assert len(differing(ours, loss_and_gradients(Net(low, blocks=2, dtype=torch.float32)))) > 10


def test_an_unknown_name_raises() -> None:
    model = modules(torch.float32)
    recipe = custom_recipe(recipes.Float8CurrentScaling(), {"layers.0.fc": ()})
    assign_names(model)
    with pytest.raises(ValueError, match=r"'linear' is not a layer of the searched model, which has layers.0.fc"):
        steps(model, recipe)


def test_float32_weights_under_torch_autocast() -> None:
    """As with Lightning's bf16-mixed: high precision is the dtype of the activations, not of the weights."""
    model = modules(torch.float32)
    assign_names(model)
    low = RECIPES["current"]()
    with torch.autocast("cpu", torch.bfloat16):
        plain = steps(model, None, 1)
        high = steps(model, custom_recipe(low, dict.fromkeys(units_of(model), GEMMS)), 1)
        assert differing(high, plain) <= {"mlp.fc1_bias", "block.layernorm_mlp.fc1_bias"}  # its sum is in another dtype
        for gemm in GEMMS:
            mixed = steps(model, custom_recipe(low, dict.fromkeys(units_of(model), (gemm,))), 1)
            assert differing(mixed, plain) != set()
            assert all(torch.isfinite(value).all() for value in mixed.values())
