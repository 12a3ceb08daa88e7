"""Accuracy, missed faults and false alarms of LogGemmError, and its cost.

    python benchmarks/gemm_error.py [--json] [--trials 1000] [--healthy 100000]
        [--parts trials faults healthy cost] [--layers 1 --hidden 768] [--seconds 300]

Parts:
  trials   each recipe and GEMM on the reference backend: the error of the kernel and of the format, against whole
           products in float64, in standard deviations of the estimate.
           tests/instrumentation/test_gemm_errors.py checks the same through modules in a session.
  faults   faults of a kernel in a result of the reference backend: how many are missed, and of how many the rows and
           columns are located.
  healthy  GEMMs of operands of many kinds, summed by the models of the accumulators, with errors within rounding.
  cost     cost of a session with LogGemmError in a training step of examples/byte_lm.py, as step.py trains it: in a
           step in which all GEMMs are measured, in another one, and at the default freq; with default options. Its
           processor time, and the most memory that torch holds in a step. OMP_NUM_THREADS=1 where other work runs:
           threads that wait for a core use processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accumulating import accumulated
from in_turn import Interval, add_arguments
from measuring import arguments, report
from step import Run, Training, measure, with_ours, without

from te_precision_callbacks import reference
from te_precision_callbacks.base.numerics.recipes import round_blocks
from te_precision_callbacks.base.vocabulary import GemmName
from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.gemm_error.factors import Factor, factor_of
from te_precision_callbacks.gemm_error.judging import (
    FLOAT32,
    HOPPER_FAST,
    HOPPER_SPLIT,
    Accumulator,
    GemmCall,
    Judged,
    judged,
    probes,
    product,
    seed_of,
    thin,
)
from te_precision_callbacks.reference import target

CPU = torch.device("cpu")
BF16 = torch.bfloat16
COLUMNS = ("case", "number", "worst", "beyond", "seconds")
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4", "nvfp4 rht", "nvfp4 rht stochastic")
LAYOUTS: Mapping[GemmName, str] = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}
N, M, K = 64, 96, 128


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
    """One of Transformer Engine's quantizers, as a recipe has it."""
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
    """A GEMM of Gaussian operands."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    torch.manual_seed(seed)
    n, m, k = sizes
    layout = LAYOUTS[gemm]
    of_a, of_b = layout[0] == "N", layout[1] == "T"
    high_a = torch.randn((k, m) if of_a else (m, k)).to(BF16)
    high_b = torch.randn((k, n) if of_b else (n, k)).to(BF16)
    a = quantizer(recipe, weight=gemm != "wgrad", gradient=False)(high_a)
    b = quantizer(recipe, weight=False, gradient=gemm != "fprop")(high_b)
    out = general_gemm(a, b, out_dtype=BF16, layout=layout, use_split_accumulator=True)[0]
    left, right = factor_of(b, columnwise=of_b), factor_of(a, columnwise=of_a)
    highs = (high_b.t() if of_b else high_b).double(), (high_a.t() if of_a else high_a).double()
    return Gemm(left, right, *highs, out)


def judge(gemm: Gemm, out: torch.Tensor, seed: int, accumulator: Accumulator = FLOAT32) -> Judged:
    """Judge a result by probes."""
    n, m = out.shape
    x, y = probes(m, PROBES, seed_of(seed, "x"), CPU), probes(n, PROBES, seed_of(seed, "y"), CPU)
    expected = product(gemm.left, gemm.right, x, y)
    return judged(
        thin(factor_of(out, columnwise=False), x, y),
        expected,
        GemmCall(gemm.left.shape[1], out.dtype, x, y, accumulator),
    )


def relative_variance(matrix: torch.Tensor) -> float:
    """Relative variance of an estimate of |E|^2: 2 / (s r)."""
    r = matrix.square().sum() ** 2 / (matrix.t() @ matrix).square().sum()
    return 2 / (PROBES * float(r))


def deviation(estimate: float, error: torch.Tensor) -> float:
    """By how many standard deviations an estimate of |E|^2 is off."""
    return float((estimate / error.square().sum() - 1) / math.sqrt(relative_variance(error)))


def trials(number: int) -> Iterator[dict[str, Any]]:
    """Estimates, against whole products."""
    for recipe in RECIPES:
        for kind in LAYOUTS:
            begin = time.process_time()
            results: dict[str, list[float]] = {"kernel": [], "format": []}
            ratios = []
            for seed in range(number):
                gemm = gemm_of(recipe, kind, seed)
                decoded = gemm.left.matrix() @ gemm.right.matrix().t()
                exact = gemm.high_left @ gemm.high_right.t()
                x = probes(M, PROBES, seed_of(seed, "x"), CPU)
                one = judge(gemm, gemm.out, seed)
                ratios.append(float(one.ratio))
                results["kernel"].append(deviation(float(one.error_square) / PROBES, gemm.out.double() - decoded))
                v_hp = gemm.high_left @ (gemm.high_right.t() @ x.double())
                v_deq = gemm.left.matrix() @ (gemm.right.matrix().t() @ x.double())
                results["format"].append(deviation(float((v_deq - v_hp).square().sum()) / PROBES, decoded - exact))
            for what, deviations in results.items():
                yield _estimates(f"{recipe}, {kind}: {what}", deviations, ratios, begin)


def _estimates(case: str, deviations: Sequence[float], ratios: Sequence[float], begin: float) -> dict[str, Any]:
    """Return a case, from the deviations of estimates and the ratios of errors to tolerances."""
    return {
        "case": case,
        "number": len(deviations),
        "worst": max(map(abs, deviations)),
        "spread": math.sqrt(sum(one**2 for one in deviations) / len(deviations)),
        "beyond": sum(abs(one) > 6 for one in deviations),
        "largest_ratio": max(ratios),
        "seconds": time.process_time() - begin,
    }


def _elements(out: torch.Tensor) -> None:
    flat = out.view(-1)
    places = torch.randperm(flat.numel())[: max(2, flat.numel() // 1000)]
    flat[places] = flat[places.roll(1)]


def _swap(out: torch.Tensor, *, columns: bool) -> None:
    matrix = out.t() if columns else out
    matrix[[1, 20]] = matrix[[20, 1]]


def _transpose(out: torch.Tensor) -> None:
    out[16:32, 32:48] = out[16:32, 32:48].t().clone()


FAULTS: Mapping[str, tuple[Callable[[torch.Tensor], Any], set[int] | None, set[int] | None]] = {
    "a tile of 16 x 16 zeroed": (lambda out: out[16:32, 32:48].zero_(), {*range(16, 32)}, {*range(32, 48)}),
    "a tile of 16 x 16 transposed": (_transpose, {*range(16, 32)}, {*range(32, 48)}),
    "two rows swapped": (lambda out: _swap(out, columns=False), {1, 20}, None),
    "two columns swapped": (lambda out: _swap(out, columns=True), None, {1, 20}),
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
        begin = time.process_time()
        least, missed_ones, elsewhere = math.inf, 0, 0
        for seed in range(number):
            torch.manual_seed(seed)
            gemm = gemms[seed % len(gemms)]
            out = gemm.out.clone()
            fault(out)
            one = judge(gemm, out, seed)
            least = min(least, float(one.ratio))
            missed_ones += float(one.ratio) <= 1
            for ratios, places in ((one.rows, rows), (one.columns, columns)):
                wrong = set(torch.nonzero(ratios > 1).view(-1).tolist())
                elsewhere += places is not None and wrong != places
        yield {
            "case": f"fault: {name}",
            "number": number,
            "worst": least,
            "beyond": missed_ones,
            "not_localized": elsewhere,
            "seconds": time.process_time() - begin,
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
    """Healthy GEMMs, summed by the models of the accumulators."""
    from te_precision_callbacks.base.numerics.recipes import RECIPES as ARITHMETIC

    settings = ARITHMETIC["mxfp8"].defaults("activation")
    cases: Sequence[tuple[str, Accumulator, torch.dtype]] = [
        (name, accumulator, dtype)
        for name in DRAWS
        for accumulator in (FLOAT32, HOPPER_FAST, HOPPER_SPLIT)
        for dtype in (BF16, torch.float32, torch.float16)
    ]
    each = -(-number // len(cases))
    for name, accumulator, dtype in cases:
        begin = time.process_time()
        largest, alarms = 0.0, 0
        for seed in range(each):
            torch.manual_seed(seed_of(name, seed) % 2**31)
            k = (128, 256, 512, 1024)[seed % 4]
            rows, columns = (8, 16, 24)[seed % 3], (8, 20)[seed % 2]
            drawn = DRAWS[name](rows, k), DRAWS[name](columns, k)
            if name == "sums that cancel":
                drawn[0][:, k // 2 :] *= -1
            left, right = (
                round_blocks("mxfp8", one.reshape(-1, 32), one.abs().amax(), settings).values.view(one.shape)
                for one in drawn
            )
            if dtype == torch.float16:
                left = left / left.abs().amax().clamp(min=1)
                right = right / right.abs().amax().clamp(min=1)
            out = accumulated(left, right, accumulator).float().to(dtype)
            gemm = Gemm(factor_of(left, columnwise=False), factor_of(right, columnwise=False), left, right, out)
            ratio = float(judge(gemm, out, seed, accumulator).ratio)
            largest, alarms = max(largest, ratio), alarms + (ratio > 1)
        yield {
            "case": f"healthy: {name}, {accumulator.name}, {str(dtype).removeprefix('torch.')}",
            "number": each,
            "worst": largest,
            "beyond": alarms,
            "seconds": time.process_time() - begin,
        }


SEQUENCE, BATCH = 512, 4
"""Of the trained model: 2,048 tokens."""


def cost(layers: int, hidden: int, seconds: float, least: int) -> Iterator[dict[str, Any]]:
    """Cost of measuring GEMMs in training steps."""
    from te_precision_callbacks.config.schemas import LogGemmErrorItem

    training = Training(layers, hidden, SEQUENCE, BATCH, CPU)
    freq, max_memory = (LogGemmErrorItem.model_fields[key].get_default() for key in ("freq", "max_memory"))
    every = {"a step in which all GEMMs are measured": 1, "a step in which none is due": freq}
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, schedule in every.items():
            options = {"enabled": True, "gemms": list(LAYOUTS), "freq": schedule}
            section = {
                "enabled": True,
                "layers": {"layer_types": ["all"]},
                "transformer_engine": {"LogGemmError": options},
            }
            path = Path(folder) / f"{schedule}.yaml"
            path.write_text(yaml.safe_dump({"s": section}))
            runs[name] = functools.partial(with_ours, training.model, path, "auto")
        due, other = (results.ratio("processor") for results in measure(training, runs, seconds, least).values())
        added = [
            100 * (one / freq + rest * (1 - 1 / freq) - 1)
            for one, rest in zip(dataclasses.astuple(due), dataclasses.astuple(other), strict=True)
        ]
        alone, measured = (most_held(training, run) / 2**20 for run in (without, next(iter(runs.values()))))
    sizes = {"layers": layers, "hidden": hidden, "tokens": SEQUENCE * BATCH, "threads": torch.get_num_threads()}
    for case, worst in {
        **dict(zip((f"{name}, as a multiple of one without a session" for name in runs), (due, other), strict=True)),
        f"added to a training at freq: {freq}, percent": Interval(*added),
        f"held by torch in a step without, MiB; max_memory is {max_memory}": alone,
        "the same in a measured step": measured,
    }.items():
        yield {"case": f"cost: {case}", "worst": worst, **sizes}


def most_held(training: Training, run: Run) -> float:
    """The most bytes of what torch allocates in a step that are held at once, by torch's profiler."""
    with training.within(run) as step, tempfile.TemporaryDirectory() as folder:
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return float(max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"))


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "trials": lambda given: trials(given.trials),
    "faults": lambda given: faults(given.trials),
    "healthy": lambda given: healthy(given.healthy),
    "cost": lambda given: cost(given.layers, given.hidden, given.seconds, given.least),
}


def main() -> None:
    """Run the parts."""
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--healthy", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=1, help="of the model of cost (default: 1)")
    parser.add_argument("--hidden", type=int, default=768, help="of the model of cost (default: 768)")
    add_arguments(parser, 300, "cost may take")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    reference.install()
    target.choose((10, 0))  # which has every recipe
    cases = [case for part in given.parts for case in PARTS[part](given)]
    notes = (
        "worst: the largest deviation in standard deviations (trials), the least (faults) or largest (healthy)"
        " ratio to the tolerance, what is measured (cost; processor time). beyond: estimates more than 6"
        " standard deviations off, faults missed, false alarms. An error of 3"
        " times its tolerance is missed in less than one of 100,000 cases."
    )
    report(cases, COLUMNS, notes, as_json=given.json)


if __name__ == "__main__":
    main()
