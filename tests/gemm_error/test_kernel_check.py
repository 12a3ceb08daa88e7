"""Checks of a GEMM by thin products and of a quantizer by its codes, against float64; by ranks and on the page."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.accumulating import accumulated
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3
from te_precision_callbacks.base.numerics.layouts import pack_fp4, read_stored, unpack_fp4
from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.gemm_error.codes import CodeCheck, check_codes, distance, rules_of
from te_precision_callbacks.gemm_error.factors import Factor, factor_of
from te_precision_callbacks.gemm_error.kernel_check import (
    FLOAT32,
    HOPPER_FAST,
    HOPPER_SPLIT,
    KERNEL_MAXIMA,
    KERNEL_SUMS,
    GemmCall,
    KernelCheck,
    bound,
    check_kernel,
    kernel_columns,
    probes,
    product,
    seed_of,
    thin,
)
from te_precision_callbacks.statistics.table import STATISTICS
from tests.combinations import pairs
from tests.docs.pages import PAGES
from tests.gemm_error.gemms import BF16, RECIPES, SIZES, Gemm, gemm_of, quantizer
from tests.replay.faults import KERNEL, QUANTIZER

CPU = torch.device("cpu")


def kernel_check(gemm: Gemm, out: torch.Tensor, seed: int = 0, **more: object) -> KernelCheck:
    n, m, k = SIZES["n"], SIZES["m"], SIZES["k"]
    x, y = probes(m, PROBES, seed, CPU), probes(n, PROBES, seed + 1, CPU)
    expected = product(gemm.left, gemm.right, x, y)
    run = thin(factor_of(out, columnwise=False), x, y)
    return check_kernel(run, expected, GemmCall(k, out.dtype, x, y, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_factor_is_the_operand_and_its_thin_products_are_those_of_the_whole(recipe: str, gemm: str) -> None:
    """In pieces too. The reference's own result is within rounding of float64, and nothing is found."""
    result = gemm_of(recipe, gemm)
    left, right = (Factor(factor.memory, factor.is_transposed, piece_bytes=1) for factor in (result.left, result.right))
    whole_left, whole_right = result.left.matrix(), result.right.matrix()
    assert torch.equal(left.matrix(), whole_left)
    relative = {"delayed": 0.06, "current": 0.06, "block": 0.05, "mxfp8": 0.05}.get(recipe, 0.2)
    if "rht" not in recipe:
        for name, whole in (("a", whole_right), ("b", whole_left)):
            assert (whole - result.high(name)).norm() < relative * result.high(name).norm()
    c = whole_left @ whole_right.t()
    assert (result.out.double() - c).norm() < 0.003 * c.norm()
    x, y = probes(SIZES["m"], 4, 1, CPU), probes(SIZES["n"], 4, 2, CPU)
    expected = product(left, right, x, y, alpha=2.0)
    torch.testing.assert_close(expected.right.double(), 2 * c @ x.double(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(expected.left.double(), 2 * c.t() @ y.double(), rtol=1e-4, atol=1e-3)
    terms = 4 * whole_left.square() @ whole_right.square().t()
    torch.testing.assert_close(expected.row_squares.double(), terms.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(expected.column_squares.double(), terms.sum(0), rtol=1e-5, atol=0)
    check = kernel_check(result, result.out)
    assert check.counts == 1
    assert check.ratio < 0.6
    assert abs(check.gain_dot / check.expected_square - 1) < 1e-3


FAULTS: dict[str, tuple[set[int] | None, set[int] | None]] = {
    "tile zeroed": (set(range(16, 48)), set(range(32, 64))),
    "rows swapped": ({3, 17}, None),
    "columns swapped": (None, {5, 100}),
    "row uninitialised": ({9}, None),
    "tile transposed": (set(range(32, 64)), set(range(64, 96))),
    "0.1 % wrong": (None, None),
    "scale off by 2^-1": (set(range(160)), set(range(256))),
    "scale off by 2^-7": (set(range(160)), set(range(256))),
    "a nan": ({5}, {7}),
}
"""A fault -> the rows and the columns that are beyond their tolerance; None: any."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_kernel_is_found_and_localized(fault: str) -> None:
    gemm = gemm_of("mxfp8", "fprop")
    out = gemm.out.clone()
    damage, _ = KERNEL.get(fault, (lambda out: out[5, 7].fill_(torch.nan), ""))
    damage(out)
    result = kernel_check(gemm, out)
    assert result.ratio > 1
    for ratios, places in zip((result.rows, result.columns), FAULTS[fault], strict=True):
        if places is not None:
            assert set(torch.nonzero(ratios > 1).view(-1).tolist()) == places
    if fault.startswith("scale off"):
        assert result.gain_dot / result.expected_square == pytest.approx(2.0 ** -int(fault[-1]), abs=1e-3)


@pytest.mark.parametrize("accumulator", [FLOAT32, HOPPER_FAST, HOPPER_SPLIT], ids=lambda one: one.name)
@pytest.mark.parametrize("mean", [0.0, 2.0], ids=["random signs", "of one sign"])
def test_the_tolerance_is_of_the_accumulator(accumulator: object, mean: float) -> None:
    """A device that sums with 14 bits is right where the call permits it, and wrong where it does not."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(24, 2048, generator=generator) + mean for _ in range(2))
    x, y = probes(24, PROBES, 5, CPU), probes(24, PROBES, 6, CPU)
    expected = product(factor_of(left, columnwise=False), factor_of(right, columnwise=False), x, y)
    run = thin(factor_of(accumulated(left, right, accumulator).float(), columnwise=False), x, y)
    assert check_kernel(run, expected, GemmCall(2048, torch.float32, x, y, accumulator)).ratio < 1
    if accumulator is not FLOAT32:
        assert check_kernel(run, expected, GemmCall(2048, torch.float32, x, y, FLOAT32)).ratio > 1


def test_what_is_added_to_the_product() -> None:
    """Bias and the sum so far are no error; beyond 1 % of the product their rounding hides it."""
    gemm = gemm_of("block", "wgrad", dtype=torch.float32)
    x, y = probes(SIZES["m"], PROBES, 5, CPU), probes(SIZES["n"], PROBES, 6, CPU)
    expected = product(gemm.left, gemm.right, x, y)
    bias = torch.randn(SIZES["m"], generator=torch.Generator().manual_seed(1))
    for size, counts in ((1.0, 1), (1e9, 0)):
        before = size * torch.randn(SIZES["n"], SIZES["m"], generator=torch.Generator().manual_seed(2))
        run = thin(factor_of(gemm.out + bias + before, columnwise=False), x, y)
        of_before = thin(factor_of(before, columnwise=False), x, y)
        result = check_kernel(run, expected, GemmCall(SIZES["k"], torch.float32, x, y, bias=bias, before=of_before))
        assert result.counts == counts
        assert result.ratio < 1
    zero = torch.zeros(SIZES["n"], SIZES["m"])
    run = thin(factor_of(zero, columnwise=False), x, y)
    result = check_kernel(
        run, expected._replace(right=expected.right * 0, left=expected.left * 0), GemmCall(192, BF16, x, y)
    )
    assert (result.ratio, result.gain_dot) == (0, 0)


def test_probes_are_reproducible_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    seed = seed_of(7, "layers.0.fc1", "wgrad")
    assert torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed, CPU))
    assert not torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed_of(8, "layers.0.fc1", "wgrad"), CPU))
    assert torch.equal(torch.get_rng_state(), state)


def test_how_many_probes_it_takes() -> None:
    """The stated number, for an error of 3 times its tolerance that is missed in less than one of 100,000 cases."""

    def missed(number: int) -> float:  # the probability that chi^2 with these degrees of freedom is below number / 3^2
        half = torch.tensor(number / 2, dtype=torch.float64)
        return torch.special.gammainc(half, half / 9).item()

    assert missed(PROBES) < 1e-5 < missed(PROBES - 2)
    assert bound(PROBES) == pytest.approx(4.6, abs=0.05)


# ---------------------------------------------------------------------- columns, merged over ranks


def on_rank(rank: int, rows: list[float], error: float) -> tuple[torch.Tensor, torch.Tensor]:
    ratios = torch.tensor(rows, dtype=torch.float64)
    first = torch.ones((), dtype=torch.float64)
    result = KernelCheck(first * error, first, first, ratios.amax(), ratios, torch.zeros(4, dtype=torch.float64), first)
    return kernel_columns(result, rank)


def merged(*ranks: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    sums = torch.stack([sums for sums, _ in ranks]).sum(0)
    maxima = torch.stack([maxima for _, maxima in ranks]).amax(0)
    pairs = (*zip(KERNEL_SUMS, sums, strict=True), *zip(KERNEL_MAXIMA, maxima, strict=True))
    columns = {name: np.array([value.item()]) for name, value in pairs}
    rows = {name: row for name, row in STATISTICS.items() if row.source.name == "GEMM" and row.value is not None}
    return {name: float(row.value(columns)[0]) for name, row in rows.items() if row.value is not None}


def test_one_bad_device_is_not_averaged_away() -> None:
    healthy = [on_rank(rank, [0.3, 0.4, 0.2], 1e-6) for rank in range(7)]
    result = merged(*healthy, on_rank(7, [0.2, 5.0, 1.5], 1e-2))
    assert result["gemm_kernel_ratio"] == 5
    assert result["gemm_kernel_ratio_rank"] == 7
    assert (result["gemm_kernel_rank_first"], result["gemm_kernel_rank_last"]) == (7, 7)
    assert (result["gemm_kernel_row_first"], result["gemm_kernel_row_last"], result["gemm_kernel_rows"]) == (1, 2, 2)
    assert (result["gemm_kernel_column_first"], result["gemm_kernel_columns"]) == (-1, 0)
    assert result["gemm_kernel_error"] == np.sqrt((7e-6 + 1e-2) / 8)
    both = merged(*healthy, on_rank(7, [0.2, 5.0, 1.5], 1e-2), on_rank(9, [8.0], 1e-2))
    assert (both["gemm_kernel_ratio_rank"], both["gemm_kernel_rank_first"], both["gemm_kernel_rank_last"]) == (9, 7, 9)


def test_nothing_divided_by_nothing() -> None:
    """A product of zeros that is zero has no error; otherwise its error is infinite, and a finding."""
    zero = torch.zeros((), dtype=torch.float64)
    healthy = KernelCheck(zero, zero, zero, zero, torch.zeros(3), torch.zeros(3), zero + 1)
    result = merged(kernel_columns(healthy, 0))
    assert (result["gemm_kernel_error"], result["gemm_gain"], result["gemm_kernel_ratio"]) == (0, 1, 0)
    result = merged(kernel_columns(healthy._replace(error_square=zero + 1), 0))
    assert (result["gemm_kernel_error"], result["gemm_gain"]) == (np.inf, np.inf)


# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize(
    ("name", "recipe", "gradient"),
    [
        ("E4M3 and E4M3", "current", False),
        ("E5M2 and E4M3", "current", True),
        ("NVFP4 without Hadamard", "nvfp4", False),
    ],
)
def test_the_floor_of_a_format(name: str, recipe: str, gradient: bool) -> None:
    stated = re.search(rf"\| {name} \| ([\d.]+) % \|", PAGES["docs/gemm-error.md"].read_text(encoding="utf-8"))
    torch.manual_seed(0)
    high = [torch.randn(512, 512).to(BF16) for _ in range(2)]
    makers = [quantizer(recipe, gradient=gradient), quantizer(recipe)]
    decoded = [factor_of(make(item), columnwise=False).matrix() for make, item in zip(makers, high, strict=True)]
    exact = high[0].double() @ high[1].double().t()
    error = (decoded[0] @ decoded[1].t() - exact).norm() / exact.norm()
    assert 100 * error.item() == pytest.approx(float(stated[1]), abs=0.1)


# --- codes and scales of Transformer Engine's quantizers, and of quantizers with a fault


ROWS, COLUMNS = 256, 512


def made(recipe: str, **which: bool) -> tuple[Any, torch.Tensor, Any]:
    torch.manual_seed(0)
    high = (torch.randn(ROWS, COLUMNS) * torch.randn(ROWS, COLUMNS).exp()).to(BF16)
    made_by = quantizer(recipe, **which)
    return made_by(high), high, made_by


def check(tensor: Any, high: torch.Tensor, made_by: Any, *, columnwise: bool, seed: int = 0) -> CodeCheck:
    rules = rules_of(made_by, columnwise=columnwise)
    return check_codes(read_stored(tensor, columnwise=columnwise), high, rules, seed, seed >> 20)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("which", ["weight", "gradient"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_right_quantizer(recipe: str, which: str, columnwise: bool) -> None:
    tensor, high, made_by = made(recipe, **{which: True})
    for seed in (0, 1, 1 << 20):
        result = check(tensor, high, made_by, columnwise=columnwise, seed=seed)
        assert result.codes >= 32768
        assert (result.wrong, result.wrong_scales) == (0, 0)
        if "rht" not in recipe and recipe != "delayed":
            assert result.scales > 0
        stochastic = "stochastic" in recipe and which == "gradient"
        assert (result.rounded > 0) == stochastic
        if stochastic:
            assert abs(result.rounding_bias / result.rounded) < 0.01
            assert abs(result.rounded_to_0 - result.expected_0) / result.rounded < 0.01


@pytest.mark.parametrize(
    ("recipe", "value", "which", "columnwise"),
    pairs(RECIPES, [math.inf, -math.inf, math.nan], ["weight", "gradient"], [False, True]),
)
def test_what_inf_and_nan_do_is_not_blamed_on_the_quantizer(
    recipe: str, value: float, which: str, columnwise: bool
) -> None:
    torch.manual_seed(0)
    high = torch.randn(ROWS, COLUMNS).to(BF16)
    high[3, 3] = value
    made_by = quantizer(recipe, **{which: True})
    result = check(made_by(high), high, made_by, columnwise=columnwise)
    assert (result.wrong, result.wrong_scales) == (0, 0)
    whole = check(
        made_by(high.nan_to_num(1.0, 1.0, 1.0)), high.nan_to_num(1.0, 1.0, 1.0), made_by, columnwise=columnwise
    )
    assert result.codes < whole.codes
    if whole.scales:
        assert result.scales < whole.scales
    if "nvfp4" in recipe and not math.isnan(value):
        assert (result.codes, result.scales) == (0, 0), "its amax is inf"
    else:
        assert result.codes > 0.9 * whole.codes
    if recipe in ("block", "mxfp8"):
        assert result.scales > 0.9 * whole.scales or which == "weight"


@pytest.mark.parametrize(
    ("fault", "share"), [("rounding always down", 0.2), ("all-zero codes", 0.4), ("scale off by 2^-1", 0.5)]
)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4", "nvfp4 rht stochastic"])
def test_a_quantizer_with_a_fault(recipe: str, fault: str, share: float) -> None:
    tensor, high, made_by = made(recipe, gradient=True)
    QUANTIZER[fault](tensor, high)
    result = check(tensor, high, made_by, columnwise=False)
    stochastic = "stochastic" in recipe
    if stochastic and fault == "rounding always down":
        assert result.wrong == 0
        assert result.rounding_bias / result.rounded < -0.2
        assert (result.rounded_to_0 - result.expected_0) / result.rounded > 0.05
    else:
        assert result.wrong / result.codes > (0.4 if stochastic else share)
    if fault.startswith("scale"):
        assert result.wrong_scales > 0.9 * result.scales > 0
    if stochastic and fault == "all-zero codes":
        assert result.rounding_bias / result.rounded < -0.5


def test_the_distance_of_neighbours() -> None:
    for number_format in (E2M1, E4M3):
        numbers = torch.tensor([number_format.value(code) for code in range(number_format.max_code + 1)]).double()
        middles = (numbers[1:] + numbers[:-1]) / 2
        assert torch.equal(distance(middles, number_format), numbers[1:] - numbers[:-1])
    assert torch.equal(unpack_fp4(pack_fp4(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))), torch.tensor([1, 2, 3, 4]))
