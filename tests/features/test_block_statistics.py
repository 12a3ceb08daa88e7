"""Real layers under each recipe: the statistics of their own blocks, and what other formats would give, in one run."""

import json
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine import recipes
from tests.engine.recipes import Pair, quantize
from tests.features import layers
from tests.reference.processes import REPOSITORY, python

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the layers compute on the CPU, with the reference backend of two GPUs"
)

OWN = {"Float8BlockScaling": "fp8_block_scaling", "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4"}
LAYERS = [None, "Float8CurrentScaling", *OWN]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Found]:
    folder = tmp_path_factory.mktemp("layers")
    done = python(
        f"""
        import runpy, sys
        sys.argv = ["layers.py", "10.0", {str(folder)!r}, "MXFP8BlockScaling", "NVFP4BlockScaling"]
        runpy.run_module("tests.features.layers", run_name="__main__")
        """,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    here = {name: layers.observed(name, folder / str(name)) for name in LAYERS[:3]}
    return here | {name: json.loads((folder / f"{name}.json").read_text()) for name in LAYERS[3:]}


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


@pytest.mark.processes
@pytest.mark.parametrize("tensor", ["activation", "weight"])
@pytest.mark.parametrize("recipe", layers.BLOCK_RECIPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_format_at_once(found: dict[str | None, Found], layer: str | None, recipe: str, tensor: str) -> None:
    for name, value in expected(recipe, tensor).items():
        assert_same(found[layer][f"{tensor} {recipe}_{name}"], value, name)
    columnwise = expected(recipe, tensor, columnwise=True)
    for name in ("mse", "underflow_blocks%", "zero_blocks%"):
        assert_same(found[layer][f"{tensor} {recipe}_{name}_columnwise"], columnwise[name], name)
    assert f"{tensor} fp8_current_scaling_mse" in found[layer]


@pytest.mark.processes
@pytest.mark.parametrize("tensor", ["activation", "weight"])
@pytest.mark.parametrize("layer", OWN)
def test_the_layers_own_blocks(found: dict[str | None, Found], layer: str, tensor: str) -> None:
    for name, value in expected(OWN[layer], tensor).items():
        assert_same(found[layer][f"{tensor} {name}"], value, name)
    columnwise = expected(OWN[layer], tensor, columnwise=True)
    for name in ("zero_blocks%", "block_dynamic_range_max"):
        assert_same(found[layer][f"{tensor} {name}_columnwise"], columnwise[name], name)


@pytest.mark.processes
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_gradients(found: dict[str | None, Found], layer: str | None) -> None:
    """FP8 elements are E4M3, also of a layer whose gradients are E5M2; NVFP4's are rounded at random."""
    for recipe in layers.BLOCK_RECIPES:
        at_random = layer == "NVFP4BlockScaling" and recipe == "nvfp4"
        for name, value in expected(recipe, "gradient").items():
            if not at_random or "scale" in name or "range" in name or name == "overflow_blocks%":
                assert_same(found[layer][f"gradient {recipe}_{name}"], value, name)
