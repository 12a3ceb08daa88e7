"""Blocks as recipes round them, against numpy, from the formats' specifications and the recipes' formulas."""

import numpy as np
import pytest
import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, from_blocks, in_blocks
from te_precision_callbacks.base.numerics.recipes import RECIPES, QuantizerSettings, round_blocks, round_to_mxfp8
from tests.reference import block_formats as spec
from tests.reference import nvfp4_numpy

FINITE = ("random", "spread", "denormal", "huge", "zero", "negative zero")


def numbers(
    values: spec.Array, block: tuple[int, int], settings: QuantizerSettings, dtype: torch.dtype, recipe: str
) -> spec.Array:
    fmt = spec.E5M2 if settings.e5m2 else spec.E4M3
    if recipe == "mxfp8":
        codes, scales = spec.mxfp8(values, block, fmt)
        factors = spec.power_of_two(scales).astype(np.float32)
    else:
        codes, factors = spec.fp8_block(
            values,
            block,
            fmt,
            power_of_2=settings.power_of_two,
            epsilon=settings.amax_epsilon,
            largest=spec.LARGEST[torch.float32 if recipe == "fp8_current_scaling" else dtype],
        )
    with np.errstate(over="ignore"):
        return fmt.decode(codes) * spec.spread(factors, block, values.shape).astype(np.float32)


@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
@pytest.mark.parametrize("square", [False, True], ids=["rows", "squares"])
@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float32 scales", "powers of two"])
@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8"])
def test_fp8_in_every_setting(
    recipe: str, e5m2: bool, power_of_two: bool, epsilon: float, square: bool, dtype: torch.dtype
) -> None:
    settings = QuantizerSettings(e5m2, square, power_of_two, epsilon)
    for seed, kind in enumerate(FINITE):
        x = spec.example(kind, (96, 160), dtype, seed)
        block = RECIPES[recipe].block(settings) or (96, 160)
        rounded = round_blocks(recipe, in_blocks(x, block), x.float().abs().max(), settings)
        expected = torch.from_numpy(numbers(spec.matrix(x), block, settings, dtype, recipe))
        assert torch.equal(from_blocks(rounded.values, block, (96, 160)), expected), kind


@pytest.mark.parametrize("square", [False, True], ids=["rows", "squares"])
@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_nvfp4(dtype: torch.dtype, square: bool) -> None:
    for seed, kind in enumerate(FINITE):
        x = spec.example(kind, (96, 160), dtype, seed)
        values = spec.matrix(x)
        amax = nvfp4_numpy.amax(values)
        codes, scales, _ = nvfp4_numpy.quantize(values, amax, square=square)
        with np.errstate(over="ignore", invalid="ignore"):  # of huge numbers a factor is infinite, and a code may be 0
            factors = nvfp4_numpy.e4m3_numbers(scales) * amax * np.float32(1 / (6 * 448))
            expected = torch.from_numpy(nvfp4_numpy.e2m1_numbers(codes) * factors.repeat(16, 1))
        block = (16 if square else 1, 16)
        rounded = round_blocks(
            "nvfp4", in_blocks(x, block), torch.tensor(float(amax)), QuantizerSettings(square=square)
        )
        result = from_blocks(rounded.values, block, (96, 160))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("kind", spec.KINDS)
def test_a_tensor_rounded_to_mxfp8_is_the_recipes_also_where_it_is_not_finite(
    kind: str, e5m2: bool, columnwise: bool
) -> None:
    """An infinite element makes the scale of its block 2^127: it stays infinite, and most others become 0."""
    for dtype in spec.DTYPES:
        x = spec.example(kind, (64, 96), dtype)
        fmt, block = spec.E5M2 if e5m2 else spec.E4M3, (32, 1) if columnwise else (1, 32)
        codes, scales = spec.mxfp8(spec.matrix(x), block, fmt)
        is_nan = codes == 0x7F
        factors = spec.spread(spec.power_of_two(scales), block, codes.shape).astype(np.float32)
        with np.errstate(over="ignore"):
            expected = np.where(is_nan, np.float32(np.nan), fmt.decode(np.where(is_nan, 0, codes)) * factors)
        result = round_to_mxfp8(x, e5m2=e5m2, columnwise=columnwise)
        torch.testing.assert_close(result, torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (16, 16), (1, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("shape", [(37, 150), (3, 5), (64, 64), (1, 7)], ids=str)
def test_blocks_and_back(shape: tuple[int, int], block: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks = in_blocks(matrix, block)
    height, width = block
    number = 0
    for top in range(0, shape[0], height):
        for left in range(0, shape[1], width):
            part = matrix[top : top + height, left : left + width]
            kept = blocks[number][~blocks[number].isnan()]
            assert torch.equal(kept, part.reshape(-1))
            number += 1
    assert number == len(blocks)
    assert torch.equal(from_blocks(blocks, block, shape), matrix)
    assert torch.equal(as_matrix(matrix), matrix)
