"""What thin products tell of a GEMM, against the whole products in float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accumulating import accumulated
from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.gemm_error.factors import Factor, factor_of
from te_precision_callbacks.gemm_error.judging import (
    FLOAT32,
    HOPPER_FAST,
    HOPPER_SPLIT,
    GemmCall,
    Judged,
    bound,
    judged,
    probes,
    product,
    seed_of,
    thin,
)
from tests.gemm_error.gemms import BF16, RECIPES, SIZES, Gemm, gemm_of
from tests.replay.faults import KERNEL

CPU = torch.device("cpu")


def judge(gemm: Gemm, out: torch.Tensor, seed: int = 0, **more: object) -> Judged:
    n, m, k = SIZES["n"], SIZES["m"], SIZES["k"]
    x, y = probes(m, PROBES, seed, CPU), probes(n, PROBES, seed + 1, CPU)
    expected = product(gemm.left, gemm.right, x, y)
    run = thin(factor_of(out, columnwise=False), x, y)
    return judged(run, expected, GemmCall(k, out.dtype, x, y, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_factor_is_the_operand_and_its_thin_products_are_those_of_the_whole(recipe: str, gemm: str) -> None:
    """In pieces too. The reference's own result is within rounding of float64, and nothing is found."""
    result = gemm_of(recipe, gemm)
    left, right = (Factor(factor.memory, factor.turned, piece_bytes=1) for factor in (result.left, result.right))
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
    judgement = judge(result, result.out)
    assert judgement.counts == 1
    assert judgement.ratio < 0.6
    assert abs(judgement.gain_dot / judgement.expected_square - 1) < 1e-3


def _one_nan(out: torch.Tensor) -> None:
    out[5, 7] = torch.nan


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
    damage, _ = KERNEL.get(fault, (_one_nan, ""))
    damage(out)
    result = judge(gemm, out)
    assert result.ratio > 1
    for ratios, places in zip((result.rows, result.columns), FAULTS[fault], strict=True):
        if places is not None:
            assert set(torch.nonzero(ratios > 1).view(-1).tolist()) == places
    if fault.startswith("scale off"):
        factor = {"1": 0.5, "7": 2.0**-7}[fault[-1]]
        assert result.gain_dot / result.expected_square == pytest.approx(factor, abs=1e-3)


@pytest.mark.parametrize("accumulator", [FLOAT32, HOPPER_FAST, HOPPER_SPLIT], ids=lambda one: one.name)
@pytest.mark.parametrize("mean", [0.0, 2.0], ids=["random signs", "of one sign"])
def test_the_tolerance_is_of_the_accumulator(accumulator: object, mean: float) -> None:
    """A device that sums with 14 bits is right where the call says so, and wrong where it does not."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(24, 2048, generator=generator) + mean for _ in range(2))
    x, y = probes(24, PROBES, 5, CPU), probes(24, PROBES, 6, CPU)
    expected = product(factor_of(left, columnwise=False), factor_of(right, columnwise=False), x, y)
    assert isinstance(accumulator, type(FLOAT32))
    out = accumulated(left, right, accumulator).float()
    run = thin(factor_of(out, columnwise=False), x, y)
    own = judged(run, expected, GemmCall(2048, torch.float32, x, y, accumulator))
    assert own.ratio < 1
    if accumulator is not FLOAT32:
        assert judged(run, expected, GemmCall(2048, torch.float32, x, y, FLOAT32)).ratio > 1


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
        result = judged(run, expected, GemmCall(SIZES["k"], torch.float32, x, y, bias=bias, before=of_before))
        assert result.counts == counts
        assert result.ratio < 1
    zero = torch.zeros(SIZES["n"], SIZES["m"])
    run = thin(factor_of(zero, columnwise=False), x, y)
    result = judged(run, expected._replace(right=expected.right * 0, left=expected.left * 0), GemmCall(192, BF16, x, y))
    assert result.ratio == 0
    assert result.gain_dot == 0


def test_probes_are_reproducible_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    seed = seed_of(7, "layers.0.fc1", "wgrad")
    assert torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed, CPU))
    assert not torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed_of(8, "layers.0.fc1", "wgrad"), CPU))
    assert torch.equal(torch.get_rng_state(), state)


def test_how_many_probes_it_takes() -> None:
    """The stated number, for an error of 3 times its tolerance that is missed in less than one of 100,000 cases."""

    def missed(number: int) -> float:  # the probability that chi^2 of so many degrees of freedom is below number / 3^2
        half = torch.tensor(number / 2, dtype=torch.float64)
        return torch.special.gammainc(half, half / 9).item()

    assert missed(PROBES) < 1e-5 < missed(PROBES - 2)
    assert bound(PROBES) == pytest.approx(4.6, abs=0.05)
