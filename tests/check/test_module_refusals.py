"""What Transformer Engine refuses because of a module's options and the recipe is found in the plan."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.check import check_model
from te_precision_callbacks.check.module_refusals import REFUSALS
from te_precision_callbacks.config import load_config
from tests.capability import stand_for
from tests.conftest import statistics

pytestmark = pytest.mark.usefixtures("any_gpu")

BF16 = torch.bfloat16


class Case(NamedTuple):
    """A module that Transformer Engine refuses under a recipe.

    Attributes:
        make: the module.
        recipe: the recipe.
        works: another recipe, under which it trains.
        text: the beginning of the row's text.
    """

    make: Callable[[], torch.nn.Module]
    recipe: Any
    works: Any
    text: str
    capability: tuple[int, int] = (9, 0)


def quantized() -> torch.nn.Module:
    with te.quantized_model_init(recipe=recipes.DelayedScaling()):
        return te.Linear(32, 32, params_dtype=BF16)


def in_sequence() -> torch.nn.Module:
    made = te.Linear(32, 32, params_dtype=BF16)
    made.sequence_parallel = True
    return made


CASES = {
    "save_original_input": Case(
        lambda: te.Linear(32, 32, save_original_input=True, params_dtype=BF16),
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        "save_original_input=True excludes",
    ),
    "save_original_input of experts": Case(
        lambda: te.GroupedLinear(2, 32, 32, save_original_input=True, params_dtype=BF16),
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        "save_original_input=True excludes",
    ),
    "backward_override": Case(
        lambda: te.LayerNormMLP(32, 64, params_dtype=BF16),
        recipes.Float8CurrentScaling(backward_override="high_precision"),
        recipes.Float8CurrentScaling(),
        "LayerNormMLP excludes",
    ),
    "use_grouped_tensor": Case(
        lambda: te.GroupedLinear(2, 32, 32, use_grouped_tensor=True, params_dtype=BF16),
        recipes.Float8BlockScaling(),
        recipes.Float8CurrentScaling(),
        "use_grouped_tensor=True excludes",
        (10, 0),
    ),
    "quantized weights": Case(
        quantized, recipes.Float8CurrentScaling(), recipes.DelayedScaling(), "weights quantized by quantized_model_init"
    ),
    "sequence parallelism": Case(
        in_sequence, recipes.DelayedScaling(reduce_amax=False), recipes.DelayedScaling(), "sequence parallelism excl"
    ),
}


def train(module: Any, recipe: Any) -> None:
    te.quantization.FP8GlobalStateManager.reset()
    x = torch.randn(64, 32, dtype=BF16, requires_grad=True)
    with te.autocast(enabled=True, recipe=recipe):
        out = module(x, [32, 32]) if isinstance(module, te.GroupedLinear) else module(x)
    out.float().sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_a_plan_finds_what_the_first_forward_refuses(name: str) -> None:
    case = CASES[name]
    stand_for(case.capability)

    def found(recipe: Any) -> list[str]:
        net = torch.nn.ModuleDict({"layer": case.make()})
        checked = check_model(net, load_config(statistics()), recipe=recipe, tokens=64)
        return [finding.text for finding in checked.findings if finding.kind == "recipe"]

    [text] = found(case.recipe)
    assert text.startswith("Transformer Engine refuses layer")
    assert case.text in text
    with pytest.raises((ValueError, AssertionError, RuntimeError)) as raised:
        train(case.make(), case.recipe)
    sources = [row.source.strip() for row in REFUSALS if row.text.startswith(case.text)]
    assert any(source in str(raised.value) for source in sources)
    assert not found(case.works)
    if name != "sequence parallelism":  # which needs a process group
        train(case.make(), case.works)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.text)
def test_the_table_is_that_of_the_installed_transformer_engine(row: Any) -> None:
    module, _, path = row.place.partition(":")
    place: Any = importlib.import_module(f"transformer_engine.{module}")
    for name in path.split("."):
        place = getattr(place, name)
    assert row.source in inspect.getsource(place)


def test_a_frozen_layer_keeps_its_original_input() -> None:
    net = torch.nn.Sequential(te.Linear(32, 32, save_original_input=True, params_dtype=BF16), te.Linear(32, 32))
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    train(net[0], recipes.DelayedScaling())
    assert not check_model(net, load_config(statistics()), recipe=recipes.DelayedScaling(), tokens=64).findings
