"""Conversions to codes of FP8 and FP4 and back, in one pass, are plain torch's bit for bit."""

import itertools

import pytest
import torch

from te_precision_callbacks.base.numerics import conversions
from te_precision_callbacks.base.numerics.conversions import block_amaxes, decoded, encoded
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, FloatFormat, _code_table
from te_precision_callbacks.base.numerics.nvfp4 import random_hadamard_transform

BLOCKS = [(1, 16), (16, 16), (32, 1), (128, 128), (286, 264), (7, 24)]
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


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "SMALLEST", 1 << 40)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Also of NaN, whose other bits mean nothing, and of the signs of zeros."""
    bits = [item.masked_fill(item.isnan(), 0.0).contiguous().view(torch.uint8) for item in (first, second)]
    return first.dtype == second.dtype and torch.equal(first.isnan(), second.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_largest_magnitudes(matrix: torch.Tensor, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix[3] = torch.nan
    fast = [block_amaxes(matrix, block, nan_spreads=spreads) for spreads in (False, True)]
    plainly(monkeypatch)
    assert all(map(same, fast, [block_amaxes(matrix, block, nan_spreads=spreads) for spreads in (False, True)]))


@pytest.mark.parametrize(
    ("fmt", "block"),
    [(fmt, block) for fmt in (E4M3, E5M2, E2M1) for block in BLOCKS if block[1] * fmt.bits % 8 == 0],
    ids=lambda each: getattr(each, "name", None) or str(each),
)
def test_codes(matrix: torch.Tensor, fmt: FloatFormat, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    factors = 2.0 ** torch.randint(-12, 12, conversions.blocks.number(SHAPE, block))
    factors[0, 0] = 1.37
    random = torch.rand(SHAPE) if fmt is E2M1 else None
    fast = [encoded(matrix, factors, block, fmt), encoded(matrix, factors, block, fmt, random)]
    plainly(monkeypatch)
    assert torch.equal(fast[0], encoded(matrix, factors, block, fmt))
    assert torch.equal(fast[1], encoded(matrix, factors, block, fmt, random))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("fmt", "dtype"), itertools.product([E4M3, E5M2, E2M1], [torch.float32, torch.bfloat16]))
def test_numbers(fmt: FloatFormat, dtype: torch.dtype, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(256, (SHAPE[0], SHAPE[1] * fmt.bits // 8), dtype=torch.uint8)
    factors = 2.0 ** torch.randint(-12, 12, conversions.blocks.number(SHAPE, block))
    monkeypatch.setattr(conversions, "SMALLEST", 1)
    fast = [decoded(codes, fmt, of_blocks, block, dtype) for of_blocks in (None, factors)]
    plainly(monkeypatch)
    assert all(map(same, fast, [decoded(codes, fmt, of_blocks, block, dtype) for of_blocks in (None, factors)]))


@pytest.mark.parametrize("turned", [False, True])
def test_transforms(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of one scale, whose sums float64 holds exactly, and all others, infinity and NaN among them."""
    matrix = torch.randn(288, 288).bfloat16()
    matrix[:100] = every_kind(torch.bfloat16)[:100, :264].repeat(1, 2)[:, :288]
    matrix = matrix.t() if turned else matrix
    for mask in (0, 0x5A3C):
        fast = random_hadamard_transform(matrix, mask)
        with monkeypatch.context() as patched:
            plainly(patched)
            assert same(fast, random_hadamard_transform(matrix, mask))


def all_of(matrix: torch.Tensor) -> list[torch.Tensor]:
    factors = torch.ones(conversions.blocks.number(SHAPE, (1, 16)), dtype=torch.float32, device="cpu")
    codes = encoded(matrix, factors, (1, 16), E4M3)
    return [block_amaxes(matrix, (1, 16)), codes, decoded(codes, E4M3, factors, (1, 16))]


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
    monkeypatch.setattr(conversions.FILE, "loaded", fails)
    assert all(map(torch.equal, all_of(matrix), expected))
    assert [record.getMessage().partition(", up to")[0] for record in caplog.records] == [
        "The reference backend converts to FP8 and FP4 and back by plain torch operations"
    ]
