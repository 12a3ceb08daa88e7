"""Simulated quantization and read codes, against Transformer Engine's own quantizers on the reference backend."""

from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, split_into_blocks
from te_precision_callbacks.base.vocabulary import WITH_ELEMENT_FORMAT, recipe_of
from te_precision_callbacks.engine.quantization import PerTensor, default_settings, read, settings_of
from te_precision_callbacks.engine.simulation import SIMULATED, round_blocks
from te_precision_callbacks.layers.gemm_events import Watched
from tests.engine import exact, forms
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.one_step import Found, statistics
from tests.quantizers import quantizer

ROWS, COLUMNS = 160, 288


def spread(by: float = 4.0) -> torch.Tensor:
    return forms.spread(ROWS, COLUMNS, by=by)


TENSORS = {
    "normal": spread(by=0.0),
    "of many magnitudes": spread(),
    "of very many magnitudes": spread(by=8.0),
    "small": spread() * 1e-37,
    "subnormal": spread(by=1.0) * 1e-41,
    "huge": spread(by=0.0).clamp(-3, 3) * 1e38,
    "with zero blocks": spread().where(torch.arange(ROWS).view(-1, 1) % 64 > 31, 0.0),
    "zeros": torch.zeros(ROWS, COLUMNS),
}
DEFAULTS = [  # recipe, E5M2?, of a weight?
    (recipe, e5m2, weight)
    for recipe in SIMULATED
    for e5m2 in ((False,) if recipe == "nvfp4" else (False, True))
    for weight in (False, True)
]
SET = {  # how a quantizer may be set -> it
    "FP8 blocks, float32 scales": lambda: quantizer("fp8_block_scaling", force_pow_2_scales=False),
    "FP8 squares, float32 scales": lambda: quantizer("fp8_block_scaling", weight=True, force_pow_2_scales=False),
    "FP8 blocks, an epsilon, E5M2": lambda: quantizer("fp8_block_scaling", e5m2=True, amax_epsilon=0.3),
    "MXFP8, E5M2": lambda: quantizer("mxfp8", e5m2=True),
    "MXFP8 squares": lambda: quantizer("mxfp8", with_2d_quantization=True),
    "NVFP4 squares": lambda: quantizer("nvfp4", weight=True),
}
QUANTIZERS = {
    "current scaling, powers of two": lambda: quantizer("fp8_current_scaling", force_pow_2_scales=True),
    "current scaling, an epsilon, E5M2": lambda: quantizer("fp8_current_scaling", amax_epsilon=1e30, e5m2=True),
    **{str(row): lambda row=row: quantizer(row[0], e5m2=row[1], weight=row[2]) for row in DEFAULTS},
    **SET,
}


@pytest.mark.few
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_recipe_is_simulated_as_the_layers_quantizer_is_set(name: str) -> None:
    """Values, factors and stored scales, bit for bit; also where a scale is beyond float32 and depends on the tensor's
    type."""
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        its = QUANTIZERS[name]()
        recipe, settings = recipe_of(its), settings_of(its)
        block = SIMULATED[recipe].block(settings)
        for of, tensor in TENSORS.items():
            x = tensor.to(dtype).nan_to_num(posinf=60_000.0, neginf=-60_000.0)
            for columnwise in (False, True):
                real = read(its(x), columnwise=columnwise)
                if isinstance(real, PerTensor):
                    would_be = round_blocks(recipe, x.reshape(1, -1), x.float().abs().max(), settings)
                    assert_identical(would_be.values, its(x).dequantize(dtype=torch.float32).reshape(1, -1), of)
                    assert would_be.factors.item() == real.scale_inv.item()
                    continue
                # MXFP8's columnwise scales lie in rows of columns; the squares of MXFP8 and NVFP4 are there for every
                # row.
                factors, scales = real.part.factors(), real.part.block_scales()
                if recipe == "mxfp8" and columnwise:
                    factors, scales = factors.t(), scales.t()
                once = 1 if recipe == "fp8_block_scaling" else block[0]
                matrix, values = as_matrix(x), real.part.dequantized()
                if columnwise:
                    matrix, values = matrix.t(), values.t()
                would_be = round_blocks(
                    recipe, split_into_blocks(matrix, block, np.nan), x.float().abs().max(), settings
                )
                assert_identical(would_be.values, split_into_blocks(values, block, 0.0), of)
                assert_identical(would_be.factors, factors[::once].reshape(-1, 1), of)
                assert_identical(would_be.scales, scales[::once].reshape(-1, 1), of)


def assert_identical(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal, the sign of zero aside; nan where nan is: a factor beyond float32 makes them of zeros."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def test_what_is_simulated_by_default_is_what_quantizers_do_by_default() -> None:
    for recipe, e5m2, weight in DEFAULTS:
        settings = default_settings(recipe, "weight" if weight else "activation", e5m2=e5m2)
        assert settings == settings_of(quantizer(recipe, weight=weight, e5m2=e5m2))


def statistics_of(x: torch.Tensor, quantized: Any, its: Any, *, columnwise: bool) -> Found:
    end = "_columnwise" if columnwise else ""
    names = [f"{name}{end}" for name in (*BLOCK_STATISTICS, "mse", "underflows%", "underflow_norm%", "scale_inv_std")]
    return statistics([Watched("l", "activation", 0, x, quantized, quantized, its)], names)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_swizzled_scales_are_read_as_any(recipe: str, columnwise: bool) -> None:
    x = spread().bfloat16()
    plain, swizzling = quantizer(recipe), quantizer(recipe)
    swizzling.optimize_for_gemm = True
    in_rows, swizzled = plain(x), swizzling(x)
    assert swizzled._with_gemm_swizzled_scales
    assert not in_rows._with_gemm_swizzled_scales
    result = statistics_of(x, swizzled, swizzling, columnwise=columnwise)
    assert result == statistics_of(x, in_rows, plain, columnwise=columnwise)
    part = read(swizzled, columnwise=False).part
    assert torch.equal(part.dequantized(), in_rows.dequantize(dtype=torch.float32))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", SET)
def test_data_that_a_layer_lacks_are_simulated_as_its_quantizer_is_set_and_that_is_said(
    name: str, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same statistics as of the data where they are there; in high precision too, under the recipe's name."""
    its, x, columnwise = SET[name](), spread(by=1.0), direction == "columnwise"
    expected = statistics_of(x, its(x), its, columnwise=columnwise)
    assert not caplog.records
    lacking = its(x)
    for kind in ("data", "scale_inv"):
        setattr(lacking, f"_{direction}_{kind}", None)
    result = statistics_of(x, lacking, its, columnwise=columnwise)
    assert result == pytest.approx(expected, rel=1e-12)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"the quantized tensor has no {direction} data" in record.getMessage()
    assert ("mse_columnwise" if columnwise else "mse") in record.getMessage()
    would_be = statistics_of(x, None, its, columnwise=columnwise)
    renamed = {f"{recipe_of(its)}_{statistic}": value for statistic, value in expected.items()}
    assert would_be == pytest.approx(renamed, rel=1e-12)


@pytest.mark.parametrize("runs", [*SIMULATED, None])
def test_a_format_in_the_name_is_what_a_quantizer_of_that_format_makes(runs: str | None) -> None:
    """Of whatever recipe and format the layer runs; without a format its own, and of other recipes the default."""
    x = spread(by=1.0)

    def mse(its: Any) -> float:
        return (its(x).dequantize(dtype=torch.float32).double() - x.double()).square().mean().item()

    for e5m2 in (False, True):
        expected: dict[str, float] = {}
        for recipe in WITH_ELEMENT_FORMAT:
            for element_format, is_e5m2 in (("e4m3", False), ("e5m2", True)):
                expected[f"{recipe}_{element_format}_mse"] = mse(quantizer(recipe, e5m2=is_e5m2))
            default = "e5m2" if recipe == "fp8_current_scaling" else "e4m3"
            own = ("e4m3", "e5m2")[e5m2] if recipe == runs else default
            expected[f"{recipe}_mse"] = expected[f"{recipe}_{own}_mse"]
        watched = Watched("l", "gradient", 0, x)
        if runs is not None:
            its = quantizer(runs) if runs == "nvfp4" else quantizer(runs, e5m2=e5m2)
            expected["mse"] = mse(its)
            watched = Watched("l", "gradient", 0, x, its(x), its(x), its)
        results = statistics([watched], list(expected))
        assert results == pytest.approx(expected, rel=exact.IN_FLOAT)
        assert all(results[f"{recipe}_e5m2_mse"] > 2 * results[f"{recipe}_e4m3_mse"] for recipe in WITH_ELEMENT_FORMAT)
