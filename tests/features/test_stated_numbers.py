"""What docs/statistics.md and docs/features.md say of formats in numbers, from numpy and from real layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature
from tests.engine.recipes import Pair, by_block, quantize

DOCS = Path(__file__).parents[2] / "docs"


def says(page: str, *words: str) -> bool:
    """Whether the words stand on the page, wherever its lines break."""
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


@pytest.mark.slow
def test_saturated_scales_of_nvfp4_by_construction() -> None:
    random = np.random.default_rng(0)
    uniform = random.uniform(-1, 1, (128, 512)).astype(np.float32)
    normal = random.standard_normal((128, 512)).astype(np.float32)
    found = [by_block("nvfp4", [Pair(x, quantize("nvfp4", x))])["saturated_scales%"] for x in (uniform, normal)]
    assert found[0] == pytest.approx(44, abs=2)
    assert found[1] < 0.1
    assert says("statistics.md", "44 % of the blocks for numbers that are uniform in [-1, 1]")


@mock.patch.object(compiled, "SMALLEST", sys.maxsize)
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
    expected = pytest.approx([31.5, 31.5, 25.5, 25.5], abs=0.1)
    assert gradients(tmp_path / "hybrid", hybrid) == expected
    assert gradients(tmp_path / "disabled", hybrid, disabled=True) == expected
    assert gradients(tmp_path / "e4m3", e4m3) == expected
    assert gradients(tmp_path / "none", None) == expected
    assert says("statistics.md", "costs 6 dB", "`mxfp8_sqnr_db` (E4M3) is 31.5 dB", "are 25.5 dB")
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    for recipe in ("fp8_current_scaling", "fp8_block_scaling", "mxfp8"):
        errors = [((x - quantize(recipe, x, e5m2=e5m2).values) ** 2).sum() for e5m2 in (False, True)]
        assert 10 * np.log10(errors[1] / errors[0]) == pytest.approx(6.0, abs=0.2)


def test_the_scale_of_fake_quant_is_now_and_then_one_unit_off() -> None:
    from transformer_engine.pytorch.quantization import _default_sf_compute

    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1
    for largest in (448.0, 57344.0):
        theirs = _default_sf_compute(amax, torch.ones_like(amax), largest, 0)
        divided = torch.from_numpy(np.float32(largest) / amax.numpy())
        off = (theirs.view(torch.int32) - divided.view(torch.int32)).abs()
        assert off.max() == 1
        assert (off > 0).double().mean().item() == pytest.approx(0.25, abs=0.05)
    assert says("features.md", "for a quarter of all amaxes the scale is one unit in the last place off")


MODULES: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te.Linear(64, 64),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128, activation="relu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, 64, 64),
}


@pytest.mark.parametrize(
    ("name", "config", "is_rounded"),
    [
        ("Linear", None, True),
        ("Linear", feature("DisableFP8Layer", ["m"]), False),
        ("Linear", feature("DisableFP8GEMM", ["m"], gemms=["fprop"]), False),
        ("LayerNormLinear", feature("DisableFP8GEMM", ["m"], gemms=["fprop"]), False),
        ("LayerNormMLP", feature("DisableFP8GEMM", ["m"], gemms=["fprop"]), False),
        ("LayerNormMLP", feature("DisableFP8Layer", ["fc2"]), True),
        ("GroupedLinear", feature("DisableFP8GEMM", ["m"], gemms=["fprop"]), True),
        ("GroupedLinear", feature("DisableFP8Layer", ["m"]), True),
    ],
)
def test_where_a_bias_stays_rounded_to_bfloat16(tmp_path: Path, name: str, config: Any, is_rounded: bool) -> None:
    """A float32 layer whose output is its bias, which bfloat16 does not have."""
    model = torch.nn.ModuleDict({"m": MODULES[name]()})
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "layer_norm" not in path:
                parameter.fill_(1 + 2**-10 if "bias" in path and "fc1" not in path else 0.0)
    section = config or feature("DisableFP8Layer", ["m"]) | {"enabled": False}
    x = torch.randn(64, 64)
    with InspectSession({"s": section}, model=model, log_dir=tmp_path, strict=True), te.autocast(enabled=True):
        y = model["m"](x, [32, 32]) if name == "GroupedLinear" else model["m"](x)
    assert y[0, 0].item() == (1 if is_rounded else 1 + 2**-10)
    words = "it stays rounded to bfloat16, as for an FP8 GEMM, in a GroupedLinear, and in fc2 of a LayerNormMLP"
    assert says("features.md", words)
