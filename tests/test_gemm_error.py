"""The error of a GEMM by products with probes, against whole products in float64."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm

from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.gemm_error import (
    MARGIN,
    Factor,
    GemmCall,
    KernelCheck,
    check_format,
    check_kernel,
    factor_of,
    probes,
    seed_of,
    thin,
)
from tests import quantizers
from tests.capability import any_capability, stand_for
from tests.combinations import half
from tests.docs.pages import PAGES
from tests.kernel_faults import KERNEL

BF16 = torch.bfloat16
CPU = torch.device("cpu")
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4", "nvfp4 rht", "nvfp4 rht stochastic")
N, M, K = 160, 256, 192
GEMMS = {"fprop": ("TN", False, False), "dgrad": ("NN", True, False), "wgrad": ("NT", True, True)}
"""GEMM -> its layout, and whether A and B are read columnwise."""


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    """It has every recipe."""
    with any_capability():
        stand_for((10, 0))
        yield


def quantizer(recipe: str, *, weight: bool = False, gradient: bool = False) -> Any:
    if recipe == "delayed":
        return quantizers.quantizer("fp8_delayed_scaling", e5m2=gradient, scale=40.0)
    if recipe == "current":
        return quantizers.quantizer("fp8_current_scaling", e5m2=gradient)
    if recipe in ("block", "mxfp8"):
        return quantizers.quantizer({"block": "fp8_block_scaling"}.get(recipe, recipe), weight=weight)
    rht = "rht" in recipe and not weight
    at_random = "stochastic" in recipe and gradient
    return quantizers.quantizer(
        "nvfp4", weight=weight, with_rht=rht, with_post_rht_amax=rht, stochastic_rounding=at_random
    )


class Gemm:
    """A GEMM of the reference backend: out, its factors, [n, k] and [m, k], and these before quantization."""

    def __init__(self, recipe: str, gemm: str = "fprop", *, seed: int = 0, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        layout, of_a, of_b = GEMMS[gemm]
        high_a = torch.randn((K, M) if of_a else (M, K), generator=generator).to(BF16)
        high_b = (size * torch.randn((K, N) if of_b else (N, K), generator=generator)).to(BF16)
        a = quantizer(recipe, weight=gemm != "wgrad")(high_a)
        b = quantizer(recipe, gradient=gemm != "fprop")(high_b)
        self.out: torch.Tensor = general_gemm(a, b, out_dtype=BF16, layout=layout, use_split_accumulator=True)[0]
        self.left, self.right = factor_of(b, columnwise=of_b), factor_of(a, columnwise=of_a)
        self.high_left, self.high_right = factor_of(high_b, columnwise=of_b), factor_of(high_a, columnwise=of_a)

    def check(self, out: torch.Tensor | None = None, x: torch.Tensor | None = None, **call: Any) -> KernelCheck:
        out = self.out if out is None else out
        x = probes(M, PROBES, 5, CPU) if x is None else x
        of_result = thin(factor_of(out, columnwise=False), x)
        return check_kernel(of_result, self.left, self.right, x, GemmCall(out.dtype, **call))


def whole(factor: Factor) -> torch.Tensor:
    return factor.multiply(torch.eye(factor.shape[1], dtype=torch.float64)).product


def norm_ratio(difference: torch.Tensor, whole: torch.Tensor) -> float:
    return float(difference.norm() / whole.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_healthy_gemm(recipe: str) -> None:
    for gemm in GEMMS:
        made = Gemm(recipe, gemm)
        product = whole(made.left) @ whole(made.right).t()
        high = whole(made.high_left) @ whole(made.high_right).t()
        check = made.check()
        assert float(check.error) == pytest.approx(norm_ratio(made.out.double() - product, product), rel=0.1)
        assert check.ratio < 0.4
        assert float(check.gain_dot / check.stored_square) == pytest.approx(1, abs=1e-3)
        x = probes(M, PROBES, 5, CPU)
        torch.testing.assert_close(check.stored.double(), product @ x.double(), rtol=1e-4, atol=1e-3)
        error, square = check_format(
            check.stored, made.high_left.multiply(made.high_right.t.multiply(x).product).product
        )
        assert float((error / square).sqrt()) == pytest.approx(norm_ratio(product - high, high), rel=0.1)


def test_pieces_are_as_the_whole() -> None:
    made = Gemm("mxfp8", "wgrad")
    x = torch.randn(K, 3, dtype=torch.float64)
    weights = torch.rand(K, dtype=torch.float64)
    pieces = Factor(made.left.memory, made.left.is_transposed, piece_bytes=1).multiply(x, weights)
    torch.testing.assert_close(pieces.product, whole(made.left) @ x)
    torch.testing.assert_close(pieces.squares, whole(made.left).square() @ weights)


@pytest.mark.parametrize(("fault", "recipe"), half(KERNEL, ["current", "mxfp8", "nvfp4"]))
def test_a_fault_of_a_kernel(fault: str, recipe: str) -> None:
    made = Gemm(recipe)
    out = made.out.clone()
    KERNEL[fault](out)
    check = made.check(out)
    assert check.ratio > 2
    if fault.startswith("scale off"):
        gain = 2.0 ** -int(fault[-1])
        assert float(check.gain_dot / check.stored_square) == pytest.approx(gain, abs=1e-3)
        assert float(check.error) == pytest.approx(1 - gain, abs=1e-2)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inf_and_nan_are_no_error(value: float) -> None:
    """Of a result, of a row of an operand, and of the other operand, without which nothing can be checked."""
    made = Gemm("current")
    made.out[5, 7] = value
    assert 0 < made.check().error < 0.01
    for side in (made.left, made.right):
        whole_side = torch.randn(side.shape)
        whole_side[3, 3] = value
        broken = {"left": made.left, "right": made.right} | {
            "left" if side is made.left else "right": factor_of(whole_side, columnwise=False)
        }
        x = probes(M, PROBES, 5, CPU)
        out = whole(broken["left"]).float() @ whole(broken["right"]).float().t()
        check = check_kernel(thin(factor_of(out, columnwise=False), x), *broken.values(), x, GemmCall(torch.float32))
        assert check.ratio < 1
        assert (check.stored_square > 0) == (side is made.left)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_small_and_large_gradients(recipe: str) -> None:
    for size in [1e-30, 1e-20, 1e-10, 1e10]:
        assert Gemm(recipe, "dgrad", size=size).check().ratio < 0.5
    zeros = Gemm(recipe, size=0.0)
    check = zeros.check()
    assert (check.error, check.ratio) == (0, 0)
    check = zeros.check(torch.ones_like(zeros.out))
    assert check.error == math.inf
    assert check.ratio > 1


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_is_added_to_the_product(dtype: torch.dtype) -> None:
    """Neither the bias nor the sum so far is an error; nor is the rounding of a sum that hides the product."""
    made = Gemm("block", "wgrad")
    bias = torch.randn(M, generator=torch.Generator().manual_seed(1))
    product = whole(made.left) @ whole(made.right).t()
    for size in (0.01, 1.0, 1e6):
        before = (size * torch.randn(N, M, generator=torch.Generator().manual_seed(2))).to(dtype)
        x = probes(M, PROBES, 5, CPU)
        of_before = thin(factor_of(before, columnwise=False), x)
        out = (product + bias.double() + before.double()).to(dtype)
        assert made.check(out, x, bias=bias, before=of_before).ratio < 0.5
        assert (made.check(out, x, bias=bias).ratio > 1) == (dtype is torch.float32 or size >= 1)


def accumulated(left: torch.Tensor, right: torch.Tensor, fraction_bits: int, interval: int) -> torch.Tensor:
    """Sum as a tensor core does: groups of 32 products are aligned with the sum so far, and truncated."""
    k = left.shape[1]
    total = left.new_zeros(left.shape[0], right.shape[0])
    for begin in range(0, k, interval):
        part = torch.zeros_like(total)
        for first in range(begin, begin + interval, 32):
            group = slice(first, first + 32)
            products = left[:, None, group] * right[None, :, group]
            aligned = torch.cat([products, part.unsqueeze(-1)], -1)
            exponent = torch.frexp(aligned.abs().amax(-1, keepdim=True)).exponent
            last = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1 - fraction_bits)
            part = (torch.trunc(aligned / last) * last).sum(-1)
        total = (total + part).float().double()
    return total


@pytest.mark.parametrize("mean", [0.0, 2.0], ids=["random signs", "of one sign"])
@pytest.mark.parametrize("splits", [False, True])
def test_the_accumulator_of_fp8_on_hopper(splits: bool, mean: float) -> None:
    """It is right where the call permits it, and wrong on a device that sums in float32."""
    generator = torch.Generator().manual_seed(0)
    made = [quantizer("current")(torch.randn(24, 2048, generator=generator) + mean) for _ in range(2)]
    left, right = (factor_of(item, columnwise=False) for item in made)
    x = probes(24, PROBES, 5, CPU)
    out = accumulated(whole(left), whole(right), 13, 128 if splits else 2048).float()
    result = thin(factor_of(out, columnwise=False), x)
    for capability, is_right in (((9, 0), True), ((10, 0), False)):
        call = GemmCall(torch.float32, split_accumulator=splits, capability=capability)
        assert (check_kernel(result, left, right, x, call).ratio < 1) == is_right


def test_probes_are_reproducible_and_leave_the_random_state_alone() -> None:
    """The stated probabilities: of an error of 3 times its tolerance that is missed, and of one of its bound that is
    above the margin."""
    state = torch.get_rng_state()
    seed = seed_of(7, "layers.0.fc1", "wgrad")
    assert torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed, CPU))
    assert not torch.equal(probes(64, 4, seed, CPU), probes(64, 4, seed_of(8, "layers.0.fc1", "wgrad"), CPU))
    assert torch.equal(torch.get_rng_state(), state)
    half = torch.tensor(PROBES / 2, dtype=torch.float64)
    assert torch.special.gammainc(half, half / 9).item() < 1e-5
    assert torch.special.gammaincc(half, half * MARGIN**2).item() < 1.2e-22


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
    stored = [whole(factor_of(make(item), columnwise=False)) for make, item in zip(makers, high, strict=True)]
    exact = high[0].double() @ high[1].double().t()
    error = norm_ratio(stored[0] @ stored[1].t() - exact, exact)
    assert 100 * error == pytest.approx(float(stated[1]), abs=0.1)
