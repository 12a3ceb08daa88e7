"""The formats of the reference extension, against the specifications and against torch's own casts."""

import math

import pytest
import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat

# OFP8 specification, revision 1.0, table 1; Microscaling specification, version 1.0, tables 1, 3 and 7.
# format, largest, smallest normal, smallest subnormal, bias
LIMITS = [
    (E4M3, 448.0, 2.0**-6, 2.0**-9, 7),
    (E5M2, 57344.0, 2.0**-14, 2.0**-16, 15),
    (E2M1, 6.0, 1.0, 0.5, 1),
    (E8M0, 2.0**127, 2.0**-127, 2.0**-127, 127),
]
FP8 = [E4M3, E5M2]
SIGNED = [*FP8, E2M1]


@pytest.mark.parametrize(
    ("fmt", "largest", "normal", "subnormal", "bias"), LIMITS, ids=lambda x: getattr(x, "name", "")
)
def test_limits_are_those_of_the_specification(
    fmt: FloatFormat, largest: float, normal: float, subnormal: float, bias: int
) -> None:
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.bias) == (largest, normal, subnormal, bias)


def test_every_code_of_blocks() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [E2M1.value(code) for code in range(16)] == magnitudes + [-value for value in magnitudes]
    assert [E8M0.value(code) for code in range(255)] == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(E8M0.value(255))
    with pytest.raises(ValueError, match="E8M0"):  # scales are not encoded to nearest
        E8M0.encode(torch.ones(2))


@pytest.mark.parametrize("fmt", FP8, ids=lambda fmt: fmt.name)
def test_every_byte_decodes_like_torch(fmt: FloatFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected, decoded = codes.view(fmt.dtype).float(), fmt.decode(codes)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)  # of the same dtype
    assert bool((torch.signbit(decoded) == torch.signbit(expected)).logical_or(decoded.isnan()).all())
    assert torch.equal(fmt.decode(codes.t())[:7], decoded.t()[:7]), "also of a view that is not contiguous"


@pytest.mark.parametrize("fmt", FP8, ids=lambda fmt: fmt.name)
def test_small_numbers_stay_where_the_processor_has_no_subnormals(fmt: FloatFormat) -> None:
    codes = torch.arange(fmt.max_code + 1, dtype=torch.uint8)
    expected = [fmt.value(code) for code in codes.tolist()]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has them always")
    try:
        assert fmt.decode(codes).tolist() == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("fmt", SIGNED, ids=lambda fmt: fmt.name)
def test_encoding_takes_the_nearest_number_ties_to_even(fmt: FloatFormat) -> None:
    for spread in [1.0, 1e-3, 1e-6, 100.0]:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            torch.manual_seed(0)
            values = (torch.randn(4000) * spread).to(dtype).float()
            assert torch.equal(fmt.encode(values), _nearest(fmt, values))


@pytest.mark.parametrize("fmt", SIGNED, ids=lambda fmt: fmt.name)
def test_ties_go_to_even(fmt: FloatFormat) -> None:
    numbers = torch.tensor([fmt.value(code) for code in range(fmt.max_code + 1)], dtype=torch.float64)
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    codes = fmt.encode(torch.cat([ties, -ties]))
    lower = torch.arange(fmt.max_code)
    even = (lower + lower % 2).to(torch.uint8)
    assert torch.equal(codes, torch.cat([even, even | sign(fmt)]))
    for end, nearest in ((math.inf, lower + 1), (0.0, lower)):  # the next float32 is no tie
        assert torch.equal(fmt.encode(ties.nextafter(torch.tensor(end))), nearest.to(torch.uint8))


@pytest.mark.parametrize("fmt", SIGNED, ids=lambda fmt: fmt.name)
def test_every_number_survives_and_others_saturate(fmt: FloatFormat) -> None:
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    values = fmt.decode(codes)
    finite = values.isfinite()
    assert torch.equal(fmt.encode(values)[finite], codes[finite])
    large = torch.tensor([fmt.max, fmt.max * 1.001, fmt.max * 1.2, 1e30, float("inf")])
    assert fmt.encode(large).tolist() == [fmt.max_code] * 5
    assert fmt.encode(-large).tolist() == [fmt.max_code | sign(fmt)] * 5
    nans = torch.copysign(torch.tensor([math.nan] * 2), torch.tensor([1.0, -1.0]))
    assert fmt.encode(nans).tolist() == [7 if fmt is E2M1 else 0x7F] * 2
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, fmt.min_subnormal / 2, fmt.min_subnormal * 0.51])
    assert fmt.encode(tiny).tolist() == [0, sign(fmt), 0, sign(fmt), 0, 1]
    for shape in [(), (0,), (3, 0, 2), (2, 3, 4)]:
        assert fmt.encode(torch.zeros(shape)).shape == shape
        assert fmt.decode(torch.zeros(shape, dtype=torch.uint8)).shape == shape


def sign(fmt: FloatFormat) -> int:
    return int(2 ** (fmt.bits - 1))


def _nearest(fmt: FloatFormat, values: torch.Tensor) -> torch.Tensor:
    """By distance, in float64: exact for float32 values and the numbers of these formats."""
    numbers = torch.tensor([fmt.value(code) for code in range(fmt.max_code + 1)], dtype=torch.float64)
    distance = (values.double().abs().unsqueeze(1) - numbers).abs()
    candidates = distance == distance.amin(dim=1, keepdim=True)
    lowest = candidates.int().argmax(dim=1)
    tie_to_upper = (candidates.sum(dim=1) == 2) & (lowest % 2 == 1)
    codes = lowest + tie_to_upper.int()
    return (codes | (torch.signbit(values).int() * sign(fmt))).to(torch.uint8)
