"""Layers under each recipe: statistics of their blocks and under other formats, and the pages' statements."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import Keeper, feature
from tests.engine import recipes
from tests.engine.recipes import Pair, by_block, quantize
from tests.features import layers

on_the_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the layers compute on the CPU, with the reference backend of two GPUs"
)

OWN = {"Float8BlockScaling": "fp8_block_scaling", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4"}
LAYERS = [None, "Float8CurrentScaling", *OWN]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Found]:
    folder = tmp_path_factory.mktemp("layers")
    results = {}
    with any_capability():
        for name in LAYERS:
            stand_for((9, 0) if name in LAYERS[:3] else (10, 0))
            results[name] = layers.observed(name, folder / str(name))
    return results


@cache
def expected(recipe: str, tensor: str, *, columnwise: bool = False, e5m2: bool = False) -> Found:
    x = layers.tensors()[tensor].float().numpy()
    quantized = quantize(recipe, x, weight=tensor == "weight", columnwise=columnwise, e5m2=e5m2)
    statistics = recipes.by_block(recipe, [Pair(x, quantized)])
    error = x.astype(float) - quantized.values
    statistics["mse"] = (error**2).mean()
    statistics["underflows%"] = 100 * ((x != 0) & (quantized.values == 0)).mean()
    return statistics


def assert_same(found: Any, value: Any, name: str) -> None:
    assert found == pytest.approx(value, rel=1e-12), name


@on_the_cpu
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_format_at_once(found: dict[str | None, Found], layer: str | None) -> None:
    for recipe in layers.BLOCK_RECIPES:
        for tensor in ["activation", "weight"]:
            for name, value in expected(recipe, tensor).items():
                assert_same(found[layer][f"{tensor} {recipe}_{name}"], value, name)
            columnwise = expected(recipe, tensor, columnwise=True)
            for name in ("mse", "underflow_blocks%", "zero_blocks%"):
                assert_same(found[layer][f"{tensor} {recipe}_{name}_columnwise"], columnwise[name], name)
            assert f"{tensor} fp8_current_scaling_mse" in found[layer]


@on_the_cpu
@pytest.mark.parametrize("layer", OWN)
def test_the_layers_own_blocks(found: dict[str | None, Found], layer: str) -> None:
    for tensor in ["activation", "weight"]:
        for name, value in expected(OWN[layer], tensor).items():
            assert_same(found[layer][f"{tensor} {name}"], value, name)
        columnwise = expected(OWN[layer], tensor, columnwise=True)
        for name in ("zero_blocks%", "block_dynamic_range_max"):
            assert_same(found[layer][f"{tensor} {name}_columnwise"], columnwise[name], name)


@on_the_cpu
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_statistics_of_gradients_equal_the_definitions(found: dict[str | None, Found], layer: str | None) -> None:
    """FP8 elements are E4M3, also of a layer with E5M2 gradients; NVFP4's are rounded at random."""
    for recipe in layers.BLOCK_RECIPES:
        at_random = layer == "NVFP4BlockScaling" and recipe == "nvfp4"
        for name, value in expected(recipe, "gradient").items():
            if not at_random or "scale" in name or "range" in name or name == "overflow_blocks%":
                assert_same(found[layer][f"gradient {recipe}_{name}"], value, name)


# --- the numbers of formats in docs/statistics.md


DOCS = Path(__file__).parents[2] / "docs"


def says(page: str, *words: str) -> bool:
    """Return whether the words are on the page, wherever its lines break."""
    text = " ".join((DOCS / page).read_text().split())
    return all(" ".join(word.split()) in text for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "elements", "blocks"), [(False, 3.4, 51), (True, 0.26, 52)])
def test_nvfp4_overflows_by_construction(weight: bool, elements: float, blocks: float) -> None:
    x = np.random.default_rng(0).standard_normal((512 if weight else 128, 512)).astype(np.float32)
    quantized = quantize("nvfp4", x, weight=weight)
    limits, magnitude = quantized.limits.astype(np.float64), np.abs(x).astype(np.float64)
    over = magnitude > limits
    assert 100 * over.mean() == pytest.approx(elements, rel=0.05)
    assert by_block("nvfp4", [Pair(x, quantized)])["overflow_blocks%"] == pytest.approx(blocks, abs=2.5)
    assert (magnitude / limits)[over].max() <= 1 / (1 - 1 / 17) * (1 + 1e-6)
    assert says("statistics.md", "3.4 % of the elements, in 51 % of the blocks", "0.26 % of the elements in 52 %")
    if not weight:
        cut = ((magnitude - limits)[over] ** 2).sum() / ((x - quantized.values.astype(np.float64)) ** 2).sum()
        assert 100 * cut == pytest.approx(1, abs=0.2)


def gradients(folder: Path, recipe: Any, *, disabled: bool = False) -> list[float]:
    """The ``sqnr_db`` of :data:`WOULD_BE` of the gradient of a layer, from N(0, 1)."""
    layer, keeper = te.Linear(64, 128, bias=False), Keeper()
    config = {"s": feature("LogFp8TensorStats", ["fc"], tensors=["gradient"], stats=WOULD_BE, freq=1)}
    if disabled:
        config["d"] = feature("DisableFP8Layer", ["fc"])
    model = torch.nn.ModuleDict({"fc": layer})
    with InspectSession(config, model=model, log_dir=folder, sinks=[keeper], strict=True) as session:
        with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
            y = layer(torch.ones(128, 64))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))
        session.step()
    return [value for name in WOULD_BE for value in keeper.values(name, tensor="gradient").values()]


WOULD_BE = ["mxfp8_sqnr_db", "mxfp8_e4m3_sqnr_db", "mxfp8_e5m2_sqnr_db", "fp8_current_scaling_sqnr_db"]


def test_what_a_recipe_would_give_has_its_own_format_whatever_the_layer_runs(tmp_path: Path) -> None:
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3)
    decibels = pytest.approx([31.5, 31.5, 25.5, 25.5], abs=0.1)
    assert gradients(tmp_path / "hybrid", hybrid) == decibels
    assert gradients(tmp_path / "disabled", hybrid, disabled=True) == decibels
    assert gradients(tmp_path / "e4m3", e4m3) == decibels
    assert gradients(tmp_path / "none", None) == decibels
    assert says("statistics.md", "costs 6 dB", "`mxfp8_sqnr_db` (E4M3) is 31.5 dB", "are 25.5 dB")
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    for recipe in ("fp8_current_scaling", "fp8_block_scaling", "mxfp8"):
        errors = [((x - quantize(recipe, x, e5m2=e5m2).values) ** 2).sum() for e5m2 in (False, True)]
        assert 10 * np.log10(errors[1] / errors[0]) == pytest.approx(6.0, abs=0.2)
