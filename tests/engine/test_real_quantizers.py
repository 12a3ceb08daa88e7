"""What is simulated and what is read, against Transformer Engine's own quantizers on the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, in_blocks
from te_precision_callbacks.base.numerics.recipes import RECIPES, round_blocks
from te_precision_callbacks.base.vocabulary import WITH_ELEMENT_FORMAT, recipe_of
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels.columns import InBlocks
from te_precision_callbacks.engine.quantization import (
    PerTensor,
    default_settings,
    read,
    settings_of,
)
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request
from tests.engine import exact
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.test_quantization import fp8_dtype, te

ROWS, COLUMNS = 160, 288
BLOCK_RECIPES = ("mxfp8", "fp8_block_scaling", "nvfp4")


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def spread(seed: int = 0, by: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.exp(by * torch.randn(ROWS, COLUMNS, generator=generator))
    return torch.randn(ROWS, COLUMNS, generator=generator) * factors


def quantizer(recipe: str, *, weight: bool = False, e5m2: bool = False, **options: Any) -> Any:
    """As the recipe's default has it, without random rounding and without the random Hadamard transform."""
    if recipe == "mxfp8":
        return te().MXFP8Quantizer(fp8_dtype(e5m2))
    if recipe == "fp8_block_scaling":
        dims = 2 if weight else 1
        return te().Float8BlockQuantizer(
            fp8_dtype(e5m2), rowwise=True, columnwise=True, block_scaling_dim=dims, **options
        )
    return te().NVFP4Quantizer(with_2d_quantization=weight, **options)


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


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("weight", [False, True], ids=["activation", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("recipe", "e5m2"), [(recipe, e5m2) for recipe in BLOCK_RECIPES for e5m2 in (False, True)][:-1], ids=str
)
def test_simulated_blocks_are_the_real_ones_bit_for_bit(
    recipe: str, e5m2: bool, dtype: torch.dtype, weight: bool, columnwise: bool
) -> None:
    """Values, factors and stored scales."""
    for name, tensor in TENSORS.items():
        x = tensor.to(dtype).nan_to_num(posinf=60_000.0, neginf=-60_000.0)
        real = read(quantizer(recipe, weight=weight, e5m2=e5m2)(x), columnwise=columnwise)
        assert isinstance(real, InBlocks)
        settings = default_settings(recipe, "weight" if weight else "activation", e5m2=e5m2)
        block = RECIPES[recipe].block(settings)
        assert block is not None

        def blocks(
            values: torch.Tensor, filler: float, block: tuple[int, int] = block, columnwise: bool = columnwise
        ) -> torch.Tensor:
            return in_blocks(values.t() if columnwise else values, block, filler)

        would_be = round_blocks(recipe, blocks(as_matrix(x), np.nan), x.float().abs().max(), settings)
        assert_identical(would_be.values, blocks(real.part.dequantized(), 0.0), name)
        # MXFP8's columnwise scales lie in rows of columns; of NVFP4's squares each is there for every row.
        factors, scales = real.part.factors(), real.part.block_scales()
        if recipe == "mxfp8" and columnwise:
            factors, scales = factors.t(), scales.t()
        once = 16 if recipe == "nvfp4" and weight else 1
        assert_identical(would_be.factors, factors[::once].reshape(-1, 1), name)
        assert_identical(would_be.scales, scales[::once].reshape(-1, 1), name)


def assert_identical(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal, the sign of zero aside; nan where nan is: a factor beyond float32 makes them of zeros."""
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan()), name
    assert torch.equal(found.nan_to_num(0.0, torch.inf, -torch.inf), expected.nan_to_num(0.0, torch.inf, -torch.inf)), (
        name
    )


def statistics_of(x: torch.Tensor, quantized: Any, its: Any, *, columnwise: bool) -> dict[str, Any]:
    engine = StatisticsEngine()
    engine.on_failure = lambda doing, of, error: pytest.fail(f"{doing} {of}: {error}")
    end = "_columnwise" if columnwise else ""
    names = [f"{name}{end}" for name in (*BLOCK_STATISTICS, "mse", "underflows%", "scale_inv_std")]
    watched = Watched("l", "activation", 0, x, rowwise=quantized, columnwise=quantized, quantizer=its)
    engine.note(watched, [quantized_request(name) for name in names])
    engine.measure()
    return {item.statistic: item.value for item in engine.flush(reduce=False)}


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_swizzled_scales_are_read_as_any(recipe: str, columnwise: bool) -> None:
    x = spread().bfloat16()
    plain, swizzling = quantizer(recipe), quantizer(recipe)
    swizzling.optimize_for_gemm = True
    in_rows, swizzled = plain(x), swizzling(x)
    assert swizzled._with_gemm_swizzled_scales
    assert not in_rows._with_gemm_swizzled_scales
    direction = "columnwise" if columnwise else "rowwise"
    assert not torch.equal(
        *(getattr(tensor, f"_{direction}_scale_inv").view(torch.uint8) for tensor in (in_rows, swizzled))
    )
    result = statistics_of(x, swizzled, swizzling, columnwise=columnwise)
    assert result == statistics_of(x, in_rows, plain, columnwise=columnwise)
    part = read(swizzled, columnwise=False)
    assert isinstance(part, InBlocks)
    assert torch.equal(part.part.dequantized(), in_rows.dequantize(dtype=torch.float32))


def current(**options: Any) -> Any:
    return te().Float8CurrentScalingQuantizer(fp8_dtype(options.pop("e5m2", False)), torch.device("cpu"), **options)


SET = {  # how a quantizer may be set -> it
    "current scaling, powers of two": lambda: current(force_pow_2_scales=True),
    "current scaling, an epsilon, E5M2": lambda: current(amax_epsilon=1e30, e5m2=True),
    "FP8 blocks, float32 scales": lambda: quantizer("fp8_block_scaling", force_pow_2_scales=False),
    "FP8 squares, float32 scales": lambda: quantizer("fp8_block_scaling", weight=True, force_pow_2_scales=False),
    "FP8 blocks, an epsilon, E5M2": lambda: quantizer("fp8_block_scaling", e5m2=True, amax_epsilon=0.3),
    "MXFP8, E5M2": lambda: quantizer("mxfp8", e5m2=True),
    "MXFP8 squares": lambda: te().MXFP8Quantizer(fp8_dtype(False), with_2d_quantization=True),
    "NVFP4 squares": lambda: quantizer("nvfp4", weight=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SET)
def test_a_recipe_is_simulated_as_the_layers_quantizer_is_set(name: str, dtype: torch.dtype) -> None:
    """Bit for bit; also where a scale is beyond float32, for which the tensor's own type tells what is taken."""
    its = SET[name]()
    recipe, settings = recipe_of(its), settings_of(its)
    assert recipe is not None
    block = RECIPES[recipe].block(settings)
    for of, tensor in TENSORS.items():
        x = tensor.to(dtype).nan_to_num()
        for columnwise in (False, True):
            real = read(its(x), columnwise=columnwise)
            if isinstance(real, PerTensor):
                whole = round_blocks(recipe, x.reshape(1, -1), x.float().abs().max(), settings)
                assert_identical(whole.values, its(x).dequantize(dtype=torch.float32).reshape(1, -1), of)
                assert whole.factors.item() == real.scale_inv.item()
                continue
            assert block is not None
            matrix = x.t() if columnwise else x
            would_be = round_blocks(recipe, in_blocks(matrix, block, np.nan), x.float().abs().max(), settings)
            stored = real.part.dequantized()
            assert_identical(would_be.values, in_blocks(stored.t() if columnwise else stored, block, 0.0), of)


def without(direction: str, quantized: Any) -> Any:
    setattr(quantized, f"_{direction}_data", None)
    setattr(quantized, f"_{direction}_scale_inv", None)
    return quantized


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", [name for name in SET if "current" not in name])
def test_data_that_a_layer_lacks_are_simulated_as_its_quantizer_is_set_and_that_is_said(
    name: str, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same statistics as of the data where they are there; in high precision too, under the recipe's name."""
    its, columnwise, end = SET[name](), direction == "columnwise", "_columnwise" if direction == "columnwise" else ""
    x = spread(by=1.0)
    expected = statistics_of(x, its(x), its, columnwise=columnwise)
    assert not caplog.records
    result = statistics_of(x, without(direction, its(x)), its, columnwise=columnwise)
    assert_equal(result, expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"the quantized tensor has no {direction} data" in record.getMessage()
    assert f"mse{end}" in record.getMessage()
    recipe = recipe_of(its)
    would_be = statistics_of(x, None, its, columnwise=columnwise)
    assert_equal(would_be, {f"{recipe}_{statistic}": value for statistic, value in expected.items()})


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """But for the order in which float64 is added."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("runs", ["mxfp8", "fp8_block_scaling", "fp8_current_scaling", "nvfp4"])
@pytest.mark.parametrize("e5m2", [False, True], ids=["runs E4M3", "runs E5M2"])
def test_a_format_in_the_name_is_what_a_quantizer_of_that_format_makes(runs: str, e5m2: bool) -> None:
    """Of whatever recipe and format the layer runs; without a format its own, and of other recipes the default."""

    def named(recipe: str, e5m2: bool) -> Any:
        return current(e5m2=e5m2) if recipe == "fp8_current_scaling" else quantizer(recipe, e5m2=e5m2)

    x = spread(by=1.0)
    expected: dict[str, float] = {}
    for recipe in WITH_ELEMENT_FORMAT:
        for element_format, is_e5m2 in (("e4m3", False), ("e5m2", True)):
            made = named(recipe, is_e5m2)(x).dequantize(dtype=torch.float32)
            expected[f"{recipe}_{element_format}_mse"] = (made.double() - x.double()).square().mean().item()
        default = "e5m2" if recipe == "fp8_current_scaling" else "e4m3"
        own = ("e4m3", "e5m2")[e5m2] if recipe == runs else default
        expected[f"{recipe}_mse"] = expected[f"{recipe}_{own}_mse"]
    its = named(runs, e5m2)
    expected["mse"] = (its(x).dequantize(dtype=torch.float32).double() - x.double()).square().mean().item()
    engine = StatisticsEngine()
    engine.on_failure = lambda doing, of, error: pytest.fail(f"{doing} {of}: {error}")
    watched = Watched("l", "gradient", 0, x, rowwise=its(x), columnwise=its(x), quantizer=its)
    engine.note(watched, [quantized_request(name) for name in expected])
    engine.measure()
    results = {item.statistic: item.value for item in engine.flush(reduce=False)}
    assert results == pytest.approx(expected, rel=exact.IN_FLOAT)
    assert all(results[f"{recipe}_e5m2_mse"] > 2 * results[f"{recipe}_e4m3_mse"] for recipe in WITH_ELEMENT_FORMAT)
