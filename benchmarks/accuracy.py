"""How far the statistics of difficult tensors are from exact sums: our passes, and Transformer Engine's functions.

    python benchmarks/accuracy.py [--json] [--elements 2097152]

Each number is a relative error: of the mean, relative to the mean magnitude. The exact values are sums by math.fsum of
float64 terms that have no rounding, or one. Paths:
  float64  the pass in plain torch: every element in float64, as all passes were before.
  C++      the pass that a CPU takes: float32 over short runs, with the bounds that one_pass.cpp derives.
  TE       the functions of Transformer Engine 2.20's LogTensorStats and LogFp8TensorStats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from measuring import Mode, arguments, machine, report, upstream_functions

from te_precision_callbacks import reference
from te_precision_callbacks.engine.kernels import eager, measured_by, native
from te_precision_callbacks.engine.kernels.columns import COMPARISON_SUMS, MAXIMA, MOMENT_SUMS, SCALE_MAXIMA, SCALE_SUMS
from te_precision_callbacks.statistics.table import STATISTICS

NAMES = ("mean", "std", "l1_norm", "l2_norm", "mse")
_EAGER: Mode = "eager"
COLUMNS = ("tensor", "path", *NAMES)

Draw = Callable[[torch.Tensor], torch.Tensor]

TENSORS: Mapping[str, Draw] = {
    "standard normal": lambda x: x,
    "mean of 1,000 deviations": lambda x: x + 1000.0,
    "mean of 100,000 deviations": lambda x: x + 1e5,
    "sums that cancel": lambda x: torch.cat([x[: len(x) // 2] * 1e4, -x[: len(x) // 2] * 1e4 + 1e-3]),
    "one outlier of 10^7": lambda x: torch.cat([x[:-1], torch.tensor([1e7])]),
    "log-normal, 16 decades": lambda x: torch.exp(4.0 * x),
    "large ones first": lambda x: x.abs().sort(descending=True).values ** 8,
    "around 10^38": lambda x: x.clamp(-3, 3) * 1e38,
    "around 10^-38": lambda x: x * 1e-38,
    "constant": lambda x: torch.full_like(x, 0.1),
}


def exact(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """The statistics from exact sums."""
    values, others = x.double().numpy(), y.double().numpy()
    number = len(values)
    mean = math.fsum(values) / number
    return {
        "mean": mean,
        "std": math.sqrt(math.fsum((values - mean) ** 2) / (number - 1)),
        "l1_norm": math.fsum(np.abs(values)),
        "l2_norm": math.sqrt(math.fsum(values**2)),
        "mse": math.fsum((values - others) ** 2) / number,
    }


def ours(
    measure: Callable[..., Any], x: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor
) -> dict[str, float]:
    """The statistics of one of our passes."""
    sums, maxima = measure(x, codes, scale_inv)
    found = [*sums.tolist(), *maxima.tolist()]
    names = (*MOMENT_SUMS, *COMPARISON_SUMS, *SCALE_SUMS, *MAXIMA, *SCALE_MAXIMA)
    columns = {name: np.array([value]) for name, value in zip(names, found, strict=True)}
    formulas = {name: STATISTICS[name].value for name in NAMES}
    return {name: float(formula(columns)[0]) for name, formula in formulas.items() if formula is not None}


def upstream(x: torch.Tensor, quantized: Any) -> dict[str, float]:
    """The statistics of Transformer Engine's functions, combined as its buffer combines them."""
    from transformer_engine.debug.features.utils.stats_computation import DEPENDENCIES, STATS, stats_to_num

    found = {}
    with upstream_functions(_EAGER):
        for name in NAMES:
            buffer = torch.zeros(1, max(stats_to_num.values()) + 1, dtype=torch.float32)
            for needed in DEPENDENCIES[name]:
                buffer[0, stats_to_num[needed]] = STATS[needed][0](x, {"": quantized})
            found[name] = float(STATS[name][1](buffer))
    return found


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--elements", type=int, default=2**21, help="of each tensor (default: 2^21)")
    options = parser.parse_args(given)
    reference.install_where_needed()
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    if not native.ONE_PASS.is_compiled():
        raise SystemExit("The pass in C++ cannot be compiled here: see the warning above.")
    drawn = torch.randn(options.elements, generator=torch.Generator().manual_seed(0))
    cases = []
    for tensor, draw in TENSORS.items():
        x = draw(drawn)
        quantized = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, x.device, columnwise=False)(x.view(-1, 64))
        codes, scale_inv = quantized._data.reshape(-1), quantized._scale_inv
        expected = exact(x, codes.view(torch.float8_e4m3fn).float() * scale_inv)
        paths = {
            "float64": ours(functools.partial(measured_by, eager.add), x, codes, scale_inv),
            "C++": ours(functools.partial(measured_by, native.add), x, codes, scale_inv),
            "TE": upstream(x.view(-1, 64), quantized),
        }
        for path, found in paths.items():
            sizes = {**expected, "mean": expected["l1_norm"] / len(x)}
            errors = {name: _relative(found[name] - expected[name], sizes[name]) for name in NAMES}
            cases.append(
                {"name": f"{tensor}, {path}", "tensor": tensor, "path": path, **errors, "machine": machine(x.device)}
            )
    if not options.json:
        print(machine(torch.device("cpu")), end="\n\n")
    report(cases, COLUMNS, "Relative errors. inf: a sum overflowed, or the exact value is 0.", as_json=options.json)


def _relative(error: float, size: float) -> float:
    if not error:
        return 0.0
    return abs(error) / abs(size) if size else math.inf


if __name__ == "__main__":
    main()
