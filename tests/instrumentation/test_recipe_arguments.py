"""Arguments of recipes that Transformer Engine accepts and does not use: the places that were read, and the bits."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops as te_ops
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.instrumentation.recipe_arguments import (
    IGNORED,
    Ignored,
    amax_reductions,
    computing,
    ignored_arguments,
    recipes_of,
)
from te_precision_callbacks.layers.naming import named_operations, named_te_modules
from tests.capability import stand_for

pytestmark = pytest.mark.usefixtures("any_gpu")

PACKAGE = Path(inspect.getfile(transformer_engine)).parent


@pytest.mark.parametrize("row", IGNORED, ids=lambda row: f"{row.recipe}.{row.argument}")
def test_the_table_is_that_of_the_transformer_engine_that_is_installed(row: Ignored) -> None:
    module, _, path = row.place.partition(":")
    place: Any = importlib.import_module(f"transformer_engine.{module}")
    for name in path.split("."):
        place = getattr(place, name)
    assert row.source in inspect.getsource(place)


@pytest.mark.parametrize(
    ("pattern", "readers"),
    [
        (r"[( ]recipe\.margin", {"pytorch/quantization.py"}),
        (r"recipe\.use_power_2_scales", {"pytorch/quantization.py"}),
        (r"\.use_f32_scales", set()),
    ],
)
def test_nothing_else_reads_an_argument(pattern: str, readers: set[str]) -> None:
    """Of attributes that nothing reads, no place can be named."""
    paths = [path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())]
    results = {str(path.relative_to(PACKAGE)) for path in paths}
    assert {path for path in results if "custom_recipes" not in path and "jax" not in path} == readers


def quantizing(recipe: Any, **options: Any) -> Any:
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(**options))
    return recipe


def nvfp4(**options: Any) -> NVFP4BlockScaling:
    return NVFP4BlockScaling(disable_stochastic_rounding=True, **options)


def trained(recipe: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = te.Linear(64, 64, params_dtype=torch.bfloat16)
    results = []
    for step in range(3):
        given = (torch.randn(64, 64) * 3**step).to(torch.bfloat16).requires_grad_()
        with te.autocast(recipe=recipe):
            out = model(given)
        out.float().pow(2).sum().backward()
        results += [out.detach(), given.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    FP8GlobalStateManager.reset()
    return results


CASES = [
    ("Float8CurrentScaling.use_power_2_scales", lambda: Float8CurrentScaling(use_power_2_scales=True)),
    ("Float8BlockScaling.use_f32_scales", lambda: Float8BlockScaling(use_f32_scales=True)),
    ("MXFP8BlockScaling.margin", lambda: MXFP8BlockScaling(margin=4)),
]
"""Recipe and argument, and a recipe in which it has no effect."""

PLAIN: dict[str, Callable[[], Any]] = {
    "Float8CurrentScaling": Float8CurrentScaling,
    "Float8BlockScaling": Float8BlockScaling,
    "MXFP8BlockScaling": MXFP8BlockScaling,
    "NVFP4BlockScaling": nvfp4,
}


def named(recipe: Any) -> list[str]:
    return [f"{row['recipe']}.{row['argument']}" for row in ignored_arguments([recipe])]


@pytest.mark.parametrize(("name", "make"), CASES, ids=[name for name, _ in CASES])
def test_an_ignored_argument_changes_no_bit(name: str, make: Callable[[], Any]) -> None:
    if name.startswith(("MXFP8", "NVFP4")):
        stand_for((10, 0))
    assert named(make()) == [name]
    assert all(map(torch.equal, trained(make()), trained(PLAIN[name.partition(".")[0]]())))


@pytest.mark.parametrize(
    "make",
    [
        *PLAIN.values(),
        lambda: DelayedScaling(margin=2, amax_history_len=16, reduce_amax=False),
        lambda: quantizing(Float8CurrentScaling(), power_2_scale=True),
        lambda: quantizing(Float8CurrentScaling(use_power_2_scales=True), power_2_scale=True),
        lambda: quantizing(Float8BlockScaling(), power_2_scale=False),
        lambda: nvfp4(disable_rht=True, disable_2d_quantization=True),
        lambda: nvfp4(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", disable_rht=True),
    ],
)
def test_arguments_that_have_an_effect(make: Callable[[], Any]) -> None:
    assert not named(make())


def test_what_a_model_keeps() -> None:
    delayed, current = DelayedScaling(), Float8CurrentScaling()
    net = torch.nn.Sequential(
        te.Linear(64, 64), te_ops.Sequential(te_ops.Linear(64, 64)), te.Linear(64, 64), te.Linear(64, 64)
    )
    result = computing(named_te_modules(net), named_operations(net))
    assert recipes_of(result) == []
    tensor = torch.randn(64, 64)
    for place, recipe in ((0, delayed), (1, delayed), (2, current)):
        with te.autocast(recipe=recipe):
            tensor = net[place](tensor)
    assert recipes_of(result) == [delayed, current]
    (row,) = amax_reductions(result)
    assert row == {"reduced": True, "ranks": 1, "tensor_parallel": 1, "outside": 0, "layers": ["0", "1.0"]}
