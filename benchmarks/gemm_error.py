"""Accuracy, missed faults and false alarms of LogGemmError.

    python benchmarks/gemm_error.py [--json] [--trials 1000] [--healthy 100000] [--parts trials faults healthy]

Parts:
  trials   each recipe and GEMM on the reference backend: the error of the kernel and of the format, against whole
           products in float64, in standard deviations of the estimate.
           tests/instrumentation/test_gemm_errors.py checks the same through modules in a session.
  faults   faults of a kernel in a result of the reference backend: how many are missed, and of how many the rows and
           columns are located.
  healthy  GEMMs of operands of many kinds, summed by the models of the accumulators, with errors within rounding.

Values of a case: worst is the largest deviation in standard deviations (trials), or the least (faults) or largest
(healthy) ratio to the tolerance; beyond counts the estimates more than 6 standard deviations off, the missed faults, or
the false alarms. An error of 3 times its tolerance is missed in less than one of 100,000 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accumulating import accumulated
from measuring import arguments, report

from te_precision_callbacks import reference
from te_precision_callbacks.base.numerics.recipes import round_blocks
from te_precision_callbacks.base.vocabulary import GemmName
from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.gemm_error.factors import Factor, factor_of
from te_precision_callbacks.gemm_error.kernel_check import (
    FLOAT32,
    HOPPER_FAST,
    HOPPER_SPLIT,
    Accumulator,
    GemmCall,
    KernelCheck,
    check_kernel,
    probes,
    product,
    seed_of,
    thin,
)
from te_precision_callbacks.reference import target

CPU = torch.device("cpu")
BF16 = torch.bfloat16
COLUMNS = {name: name for name in ("case", "number", "worst", "beyond", "spread", "largest_ratio")}
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4", "nvfp4 rht", "nvfp4 rht stochastic")
LAYOUTS: Mapping[GemmName, str] = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}
N, M, K = 64, 96, 128
PARTS = ("trials", "faults", "healthy")


class Gemm(NamedTuple):
    """A GEMM of the reference backend.

    Attributes:
        left, right: its operands, [n, k] and [m, k].
        high_left, high_right: the same before quantization, float64.
        out: its result, [n, m].
    """

    left: Factor
    right: Factor
    high_left: torch.Tensor
    high_right: torch.Tensor
    out: torch.Tensor


def quantizer(recipe: str, *, weight: bool, gradient: bool) -> Any:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    dtype = DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3
    if recipe == "delayed":
        return Float8Quantizer(torch.tensor([40.0]), torch.zeros(1), dtype)
    if recipe == "current":
        return Float8CurrentScalingQuantizer(dtype, device=CPU)
    if recipe == "block":
        dims = 2 if weight else 1
        return te.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dims)
    if recipe == "mxfp8":
        return te.MXFP8Quantizer(DType.kFloat8E4M3)
    transformed = "rht" in recipe and not weight
    return te.NVFP4Quantizer(
        with_rht=transformed,
        with_post_rht_amax=transformed,
        with_2d_quantization=weight,
        stochastic_rounding="stochastic" in recipe and gradient,
    )


def gemm_of(recipe: str, gemm: GemmName, seed: int, sizes: tuple[int, int, int] = (N, M, K)) -> Gemm:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    torch.manual_seed(seed)
    n, m, k = sizes
    layout = LAYOUTS[gemm]
    transposed_a, transposed_b = layout[0] == "N", layout[1] == "T"
    high_a = torch.randn((k, m) if transposed_a else (m, k)).to(BF16)
    high_b = torch.randn((k, n) if transposed_b else (n, k)).to(BF16)
    a = quantizer(recipe, weight=gemm != "wgrad", gradient=False)(high_a)
    b = quantizer(recipe, weight=False, gradient=gemm != "fprop")(high_b)
    out = general_gemm(a, b, out_dtype=BF16, layout=layout, use_split_accumulator=True)[0]
    left, right = factor_of(b, columnwise=transposed_b), factor_of(a, columnwise=transposed_a)
    highs = (high_b.t() if transposed_b else high_b).double(), (high_a.t() if transposed_a else high_a).double()
    return Gemm(left, right, *highs, out)


def kernel_check(gemm: Gemm, out: torch.Tensor, seed: int, accumulator: Accumulator = FLOAT32) -> KernelCheck:
    n, m = out.shape
    x, y = probes(m, PROBES, seed_of(seed, "x"), CPU), probes(n, PROBES, seed_of(seed, "y"), CPU)
    call = GemmCall(gemm.left.shape[1], out.dtype, x, y, accumulator)
    return check_kernel(thin(factor_of(out, columnwise=False), x, y), product(gemm.left, gemm.right, x, y), call)


def deviation(estimate: float, error: torch.Tensor) -> float:
    """By how many standard deviations an estimate of |E|^2 is off. Its relative variance is 2 / (s r)."""
    r = error.square().sum() ** 2 / (error.t() @ error).square().sum()
    return float((estimate / error.square().sum() - 1) / math.sqrt(2 / (PROBES * float(r))))


def trials(number: int) -> Iterator[dict[str, Any]]:
    for recipe in RECIPES:
        for kind in LAYOUTS:
            results: dict[str, list[float]] = {"kernel": [], "format": []}
            ratios = []
            for seed in range(number):
                gemm = gemm_of(recipe, kind, seed)
                decoded = gemm.left.matrix() @ gemm.right.matrix().t()
                exact = gemm.high_left @ gemm.high_right.t()
                x = probes(M, PROBES, seed_of(seed, "x"), CPU)
                check = kernel_check(gemm, gemm.out, seed)
                ratios.append(float(check.ratio))
                results["kernel"].append(deviation(float(check.error_square) / PROBES, gemm.out.double() - decoded))
                v_hp = gemm.high_left @ (gemm.high_right.t() @ x.double())
                v_deq = gemm.left.matrix() @ (gemm.right.matrix().t() @ x.double())
                results["format"].append(deviation(float((v_deq - v_hp).square().sum()) / PROBES, decoded - exact))
            for what, deviations in results.items():
                yield {
                    "case": f"{recipe}, {kind}: {what}",
                    "number": number,
                    "worst": max(map(abs, deviations)),
                    "spread": math.sqrt(sum(deviation**2 for deviation in deviations) / number),
                    "beyond": sum(abs(deviation) > 6 for deviation in deviations),
                    "largest_ratio": max(ratios),
                }


def _elements(out: torch.Tensor) -> None:
    flat = out.view(-1)
    places = torch.randperm(flat.numel())[: max(2, flat.numel() // 1000)]
    flat[places] = flat[places.roll(1)]


def _swap_rows(out: torch.Tensor) -> None:
    out[[1, 20]] = out[[20, 1]]


def _transpose(out: torch.Tensor) -> None:
    out[16:32, 32:48] = out[16:32, 32:48].t().clone()


FAULTS: Mapping[str, tuple[Callable[[torch.Tensor], Any], set[int] | None, set[int] | None]] = {
    "a tile of 16 x 16 zeroed": (lambda out: out[16:32, 32:48].zero_(), {*range(16, 32)}, {*range(32, 48)}),
    "a tile of 16 x 16 transposed": (_transpose, {*range(16, 32)}, {*range(32, 48)}),
    "two rows swapped": (_swap_rows, {1, 20}, None),
    "two columns swapped": (lambda out: _swap_rows(out.t()), None, {1, 20}),
    "a row uninitialised": (lambda out: out[5].fill_(0.01), {5}, None),
    "all times 2^-1": (lambda out: out.mul_(0.5), None, None),
    "all times 2^-7": (lambda out: out.mul_(2.0**-7), None, None),
    "0.1 % of the elements wrong": (_elements, None, None),
}
"""Fault -> what does it, and the rows and columns that are wrong; None: not asked."""


def faults(number: int) -> Iterator[dict[str, Any]]:
    """Faults of a kernel, in E4M3 by blocks."""
    gemms = [gemm_of("mxfp8", "fprop", seed, (96, 128, 256)) for seed in range(8)]
    for name, (fault, rows, columns) in FAULTS.items():
        least, missed, elsewhere = math.inf, 0, 0
        for seed in range(number):
            torch.manual_seed(seed)
            gemm = gemms[seed % len(gemms)]
            out = gemm.out.clone()
            fault(out)
            check = kernel_check(gemm, out, seed)
            least = min(least, float(check.ratio))
            missed += float(check.ratio) <= 1
            for ratios, places in ((check.rows, rows), (check.columns, columns)):
                wrong = set(torch.nonzero(ratios > 1).view(-1).tolist())
                elsewhere += places is not None and wrong != places
        yield {
            "case": f"fault: {name}",
            "number": number,
            "worst": least,
            "beyond": missed,
            "not_localized": elsewhere,
        }


DRAWS: Mapping[str, Callable[[int, int], torch.Tensor]] = {
    "Gaussian": torch.randn,
    "of one sign": lambda rows, k: torch.rand(rows, k) + 0.1,
    "log-normal": lambda rows, k: torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, k)),
    "sparse": lambda rows, k: torch.randn(rows, k) * (torch.rand(rows, k) < 0.05),
    "an outlier row": lambda rows, k: torch.randn(rows, k) * torch.where(torch.arange(rows) == 3, 1e4, 1.0)[:, None],
    "sums that cancel": lambda rows, k: torch.randn(rows, k // 2).repeat(1, 2) + 1e-3 * torch.randn(rows, k),
}


def healthy(number: int) -> Iterator[dict[str, Any]]:
    from te_precision_callbacks.base.numerics.recipes import RECIPES as ARITHMETIC

    settings = ARITHMETIC["mxfp8"].defaults("activation")
    cases: Sequence[tuple[str, Accumulator, torch.dtype]] = [
        (name, accumulator, dtype)
        for name in DRAWS
        for accumulator in (FLOAT32, HOPPER_FAST, HOPPER_SPLIT)
        for dtype in (BF16, torch.float32, torch.float16)
    ]
    repeats = -(-number // len(cases))
    for name, accumulator, dtype in cases:
        largest, alarms = 0.0, 0
        for seed in range(repeats):
            torch.manual_seed(seed_of(name, seed) % 2**31)
            k = (128, 256, 512, 1024)[seed % 4]
            rows, columns = (8, 16, 24)[seed % 3], (8, 20)[seed % 2]
            drawn = DRAWS[name](rows, k), DRAWS[name](columns, k)
            if name == "sums that cancel":
                drawn[0][:, k // 2 :] *= -1
            left, right = (
                round_blocks("mxfp8", x.reshape(-1, 32), x.abs().amax(), settings).values.view(x.shape) for x in drawn
            )
            if dtype == torch.float16:
                left, right = (factor / factor.abs().amax().clamp(min=1) for factor in (left, right))
            out = accumulated(left, right, accumulator).float().to(dtype)
            gemm = Gemm(factor_of(left, columnwise=False), factor_of(right, columnwise=False), left, right, out)
            ratio = float(kernel_check(gemm, out, seed, accumulator).ratio)
            largest, alarms = max(largest, ratio), alarms + (ratio > 1)
        yield {
            "case": f"healthy: {name}, {accumulator.name}, {str(dtype).removeprefix('torch.')}",
            "number": repeats,
            "worst": largest,
            "beyond": alarms,
        }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--healthy", type=int, default=100_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    reference.install()
    target.choose((10, 0))  # which has every recipe
    parts = {"trials": trials(given.trials), "faults": faults(given.trials), "healthy": healthy(given.healthy)}
    cases = [case for part in given.parts for case in parts[part]]
    report(cases, COLUMNS, CPU, as_json=given.json)


if __name__ == "__main__":
    main()
