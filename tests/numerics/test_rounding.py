"""Rounding to FP8 and FP4: conversions in one pass, against plain torch; recipes, against numpy and the formats."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, join_blocks, split_into_blocks
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, FloatFormat, _code_table
from te_precision_callbacks.engine.simulation import SIMULATED, QuantizerSettings, round_blocks, round_to_mxfp8
from te_precision_callbacks.reference import conversions
from te_precision_callbacks.reference.conversions import block_amaxes, decode_blocks, encode_blocks
from te_precision_callbacks.reference.nvfp4 import random_hadamard_transform
from tests.combinations import pairs
from tests.reference import block_formats as spec
from tests.reference import nvfp4_numpy

# --- conversions to codes and back ------------------------------------------------------------------------------------


CODE_BLOCKS = [(1, 16), (16, 16), (32, 1), (128, 128), (286, 264), (7, 24)]
# No multiple of most blocks.
SHAPE = (286, 264)


def every_kind(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of bfloat16: infinity, NaN, zeros and subnormals; and what lies half way between two codes."""
    numbers = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.tensor([E4M3.value(code) for code in range(127)])
    half_way = (codes[1:] + codes[:-1]) / 2 * 2.0 ** torch.arange(-40, 40).view(-1, 1)
    result = torch.cat([numbers, half_way.flatten()])
    rows, columns = SHAPE
    return result[torch.randperm(len(result))[: rows * columns]].view(SHAPE).to(dtype)


@pytest.fixture(autouse=True)
def compiled() -> None:
    assert conversions.FILE.is_compiled()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def matrix(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(0)
    return every_kind(request.param)


@contextmanager
def smallest(number: int) -> Iterator[None]:
    """So many elements at least are converted in one pass, and fewer by plain torch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conversions, "SMALLEST", number)
        yield


def plainly() -> AbstractContextManager[None]:
    return smallest(1 << 40)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Also of NaN, where the other bits mean nothing, and of the signs of zeros."""
    bits = [item.masked_fill(item.isnan(), 0.0).contiguous().view(torch.uint8) for item in (first, second)]
    return first.dtype == second.dtype and torch.equal(first.isnan(), second.isnan()) and torch.equal(*bits)


def test_largest_magnitudes(matrix: torch.Tensor) -> None:
    matrix[3] = torch.nan
    for block in CODE_BLOCKS:
        for spreads in (False, True):
            fast = block_amaxes(matrix, block, nan_spreads=spreads)
            with plainly():
                assert same(fast, block_amaxes(matrix, block, nan_spreads=spreads)), (block, spreads)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_fast_encoding_gives_the_codes_of_the_plain_one(matrix: torch.Tensor, fmt: FloatFormat) -> None:
    for block in CODE_BLOCKS:
        if block[1] * fmt.bits % 8 == 0:
            factors = 2.0 ** torch.randint(-12, 12, conversions.blocks.block_counts(SHAPE, block))
            factors[0, 0] = 1.37
            for random in (None, torch.rand(SHAPE) if fmt is E2M1 else None):
                fast = encode_blocks(matrix, factors, block, fmt, random)
                with plainly():
                    assert torch.equal(fast, encode_blocks(matrix, factors, block, fmt, random)), block


@pytest.mark.parametrize(("fmt", "dtype"), itertools.product([E4M3, E5M2, E2M1], [torch.float32, torch.bfloat16]))
def test_fast_decoding_gives_the_numbers_of_the_plain_one(fmt: FloatFormat, dtype: torch.dtype) -> None:
    for block in CODE_BLOCKS:
        codes = torch.randint(256, (SHAPE[0], SHAPE[1] * fmt.bits // 8), dtype=torch.uint8)
        factors = 2.0 ** torch.randint(-12, 12, conversions.blocks.block_counts(SHAPE, block))
        for of_blocks in (None, factors):
            with smallest(1):
                fast = decode_blocks(codes, fmt, of_blocks, block, dtype)
            with plainly():
                assert same(fast, decode_blocks(codes, fmt, of_blocks, block, dtype)), block


@pytest.mark.parametrize("turned", [False, True])
def test_the_fast_hadamard_transform_equals_the_plain_one(turned: bool) -> None:
    """Numbers of one scale, with sums exact in float64, and all others, infinity and NaN among them."""
    matrix = torch.randn(288, 288).bfloat16()
    matrix[:100] = every_kind(torch.bfloat16)[:100, :264].repeat(1, 2)[:, :288]
    matrix = matrix.t() if turned else matrix
    for mask in (0, 0x5A3C):
        fast = random_hadamard_transform(matrix, mask)
        with plainly():
            assert same(fast, random_hadamard_transform(matrix, mask))


def all_of(matrix: torch.Tensor) -> list[torch.Tensor]:
    factors = torch.ones(conversions.blocks.block_counts(SHAPE, (1, 16)), dtype=torch.float32, device="cpu")
    codes = encode_blocks(matrix, factors, (1, 16), E4M3)
    return [block_amaxes(matrix, (1, 16)), codes, decode_blocks(codes, E4M3, factors, (1, 16))]


def test_the_defaults_of_the_process_have_no_say() -> None:
    matrix = torch.randn(SHAPE)
    expected = [*all_of(matrix), E2M1.encode(matrix)]
    _code_table.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            results = [*all_of(matrix), E2M1.encode(matrix)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, results, expected))


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    matrix = torch.randn(SHAPE)
    expected = all_of(matrix)

    def fails() -> dict[str, object]:
        raise FileNotFoundError("g++")

    monkeypatch.setattr(conversions.FILE, "functions", {})
    monkeypatch.setattr(conversions.FILE, "failed", False)
    monkeypatch.setattr(conversions.FILE, "load", fails)
    assert all(map(torch.equal, all_of(matrix), expected))
    assert [record.getMessage().partition(", up to")[0] for record in caplog.records] == [
        "The reference backend converts to FP8 and FP4 and back by plain torch operations"
    ]


# --- blocks as recipes round them -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("dtype", "square", "epsilon", "power_of_two", "e5m2"),
    pairs(spec.DTYPES, [False, True], [0.0, 0.3], [False, True], [False, True]),
)
@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8"])
def test_fp8_in_every_setting(
    recipe: str, e5m2: bool, power_of_two: bool, epsilon: float, square: bool, dtype: torch.dtype
) -> None:
    settings = QuantizerSettings(e5m2, square, power_of_two, epsilon)
    for seed, kind in enumerate(FINITE):
        x = spec.example(kind, (96, 160), dtype, seed)
        block = SIMULATED[recipe].block(settings) or (96, 160)
        rounded = round_blocks(recipe, split_into_blocks(x, block), x.float().abs().max(), settings)
        expected = torch.from_numpy(numbers(spec.matrix(x), block, settings, dtype, recipe))
        assert torch.equal(join_blocks(rounded.values, block, (96, 160)), expected), kind


@pytest.mark.parametrize("square", [False, True], ids=["rows", "squares"])
@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_rounding_to_nvfp4_equals_numpy(dtype: torch.dtype, square: bool) -> None:
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
            "nvfp4", split_into_blocks(x, block), torch.tensor(float(amax)), QuantizerSettings(square=square)
        )
        result = join_blocks(rounded.values, block, (96, 160))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", spec.KINDS)
def test_a_tensor_rounded_to_mxfp8_is_the_recipes_also_where_it_is_not_finite(kind: str) -> None:
    """An infinite element makes the scale of its block 2^127: it stays infinite, and most others become 0."""
    for e5m2 in [False, True]:
        for columnwise in [False, True]:
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


def test_blocks_and_back() -> None:
    for shape in [(37, 150), (3, 5), (64, 64), (1, 7)]:
        for block in [(1, 32), (32, 1), (16, 16), (1, 1), (128, 128)]:
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            blocks = split_into_blocks(matrix, block)
            height, width = block
            number = 0
            for top in range(0, shape[0], height):
                for left in range(0, shape[1], width):
                    part = matrix[top : top + height, left : left + width]
                    kept = blocks[number][~blocks[number].isnan()]
                    assert torch.equal(kept, part.reshape(-1))
                    number += 1
            assert number == len(blocks)
            assert torch.equal(join_blocks(blocks, block, shape), matrix)
            assert torch.equal(as_matrix(matrix), matrix)
