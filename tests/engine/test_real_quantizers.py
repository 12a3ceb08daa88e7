"""What is simulated and what is read, against Transformer Engine's own quantizers on the reference backend."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.engine.blockwise import as_matrix, in_blocks
from te_precision_callbacks.engine.engine import StatisticsEngine, Watched
from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.engine.quantization import SIMULATED, InBlocks, QuantizationError, read, round_blocks
from te_precision_callbacks.engine.statistics import BLOCK_STATISTICS, PERCENTILES, quantized_request
from te_precision_callbacks.formats import E2M1, E4M3, E5M2
from tests.engine.test_quantization import fp8_dtype, te

ROWS, COLUMNS = 160, 288
BLOCK_RECIPES = ("mxfp8", "fp8_block_scaling", "nvfp4")


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SMALLEST", sys.maxsize)


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
        simulated = SIMULATED[recipe]
        block = simulated.weight_block if weight else simulated.block
        assert block is not None
        number_format = E2M1 if recipe == "nvfp4" else E5M2 if e5m2 else E4M3

        def blocks(
            values: torch.Tensor, filler: float, block: tuple[int, int] = block, columnwise: bool = columnwise
        ) -> torch.Tensor:
            return in_blocks(values.t() if columnwise else values, block, filler)

        would_be = round_blocks(recipe, blocks(as_matrix(x), np.nan), x.float().abs().max(), number_format)
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
    return {one.statistic: one.value for one in engine.flush(reduce=False)}


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
    found = statistics_of(x, swizzled, swizzling, columnwise=columnwise)
    assert found == statistics_of(x, in_rows, plain, columnwise=columnwise)
    part = read(swizzled, columnwise=False)
    assert isinstance(part, InBlocks)
    assert torch.equal(part.part.dequantized(), in_rows.dequantize(dtype=torch.float32))


def test_fp8_blocks_with_float32_scales() -> None:
    """Which are no powers of two: percentiles are the lower edges of their bins."""
    x = spread()
    its = quantizer("fp8_block_scaling", force_pow_2_scales=False)
    real = its(x)
    part = read(real, columnwise=False)
    assert isinstance(part, InBlocks)
    assert torch.equal(part.part.dequantized(), real.dequantize(dtype=torch.float32))
    factors = part.part.factors().numpy()
    assert (np.frexp(factors)[0] != 0.5).mean() > 0.9
    found = statistics_of(x, real, its, columnwise=False)
    for percent in PERCENTILES:
        exactly = np.percentile(factors, percent, method="inverted_cdf")
        assert exactly * 2**-0.125 < found[f"scale_inv_p{percent}"] <= exactly


def test_columnwise_nvfp4_of_a_hadamard_transform() -> None:
    its = quantizer("nvfp4", with_rht=True, with_post_rht_amax=True)
    real = its(spread().bfloat16())
    assert isinstance(read(real, columnwise=False), InBlocks)
    with pytest.raises(QuantizationError, match="columnwise data are of a random Hadamard transform of the tensor"):
        read(real, columnwise=True)
