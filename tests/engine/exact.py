"""The columns of a pass in float64, from numpy: the reference for the passes and the engine."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.gpu_parts.layout import layout
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    EXPONENT_BINS,
    MAXIMA,
    MOMENT_SUMS,
    NOTHING,
    SCALE_MAXIMA,
    SCALE_SUMS,
    Pending,
)
from te_precision_callbacks.statistics.table import BLOCK_SOURCES, STATISTICS

Array = npt.NDArray[np.float64]
Columns = dict[str, Any]

# What recipes with one scale for a tensor have not.
BLOCK_STATISTICS = tuple(name for name, statistic in STATISTICS.items() if statistic.source in BLOCK_SOURCES)

# How far sums may be off where C++ takes them in float over short runs: the largest of the bounds in one_pass.cpp.
IN_FLOAT = 10 * 2.0**-24

# How far a standard deviation may be off there.
STD_IN_FLOAT = 14 * 2.0**-24

# Into a sum of float32 in the Triton kernels, at most: `k` in their description, which has the bounds.
ADDITIONS = 16

# How far sums may be off there.
IN_TRITON = {
    "sum": 2 * (ADDITIONS + 1) * 2.0**-24,
    "abs_sum": ADDITIONS * 2.0**-24,
    "square_sum": (2 * ADDITIONS + 4) * 2.0**-24,
    "signal_square_sum": (2 * ADDITIONS + 4) * 2.0**-24,
    "error_square_sum": (ADDITIONS + 3) * 2.0**-24,
    "underflow_square_sum": (ADDITIONS + 3) * 2.0**-24,
}

# What elements may be above the largest code times the factor by, since factors are rounded, and not count as clipped.
ROUNDING = 1 + 2.0**-21

FLOAT8 = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}  # e5m2? -> torch's dtype, largest


def measured_by(
    add: Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None],
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    places, width, extremes = layout(codes=codes is not None, histogram=histogram)
    sums = torch.zeros(width, dtype=torch.float64, device=values.device)
    maxima = torch.full((extremes,), NOTHING, dtype=torch.float64, device=values.device)
    add([Pending(values, codes, scale_inv, e5m2, places)], sums, maxima)
    return sums, maxima


def measure(values: torch.Tensor, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return measured_by(kernels.add, values.detach(), *arguments, **keywords)


def as_array(values: torch.Tensor) -> Array:
    return values.detach().double().reshape(-1).numpy()


def moments(x: Array) -> Columns:
    kept = x[np.isfinite(x)]
    nonzero = np.abs(kept[kept != 0])
    return {
        "finite": len(kept),
        "nonfinite": len(x) - len(kept),
        "zeros": len(kept) - len(nonzero),
        "sum": math.fsum(kept),
        "square_sum": math.fsum(kept**2),
        "abs_sum": math.fsum(nonzero),
        "max": kept.max(initial=-math.inf),
        "negated_min": (-kept).max(initial=-math.inf),
        "negated_min_nonzero": (-nonzero).max(initial=-math.inf),
    }


def comparison(x: Array, y: Array, limit: float | Array) -> Columns:
    finite = np.isfinite(x)
    x, y = x[finite], y[finite]
    limit = limit if isinstance(limit, float) else limit[finite]
    return {
        "compared": len(x),
        "underflows": ((x != 0) & (y == 0)).sum(),
        "overflows": (np.abs(x) > limit).sum(),
        "error_square_sum": math.fsum((x - y) ** 2),
        "signal_square_sum": math.fsum(x**2),
        "underflow_square_sum": math.fsum(x[y == 0] ** 2),
    }


def scale(factor: float) -> Columns:
    if not 0 <= factor < math.inf:
        return dict.fromkeys(SCALE_SUMS, 0.0) | dict.fromkeys(SCALE_MAXIMA, -math.inf)
    maxima = {"scale_max": factor, "negated_scale_min": -factor}
    return {"scales": 1, "scale_sum": factor, "scale_square_sum": factor * factor, **maxima}


def histogram(x: Array) -> list[int]:
    nonzero = x[np.isfinite(x) & (x != 0)]
    bins = np.clip(np.frexp(nonzero)[1] + 126, 0, 255)  # frexp: 0.5 <= mantissa < 1
    return [int(count) for count in np.bincount(bins, minlength=EXPONENT_BINS)]


def columns(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram_too: bool = False,
) -> Columns:
    x = as_array(values)
    result = moments(x)
    if codes is not None and scale_inv is not None:
        dtype, largest = FLOAT8[e5m2]
        y = codes.contiguous().view(dtype).float() * scale_inv
        limit = torch.tensor(largest * ROUNDING) * scale_inv
        result |= comparison(x, as_array(y), float(limit)) | scale(scale_inv.item())
    if histogram_too:
        result["histogram"] = histogram(x)
    return result


def named(sums: torch.Tensor, maxima: torch.Tensor, *, compared: bool = False, histogram_too: bool = False) -> Columns:
    assert (sums.dtype, sums.dim(), maxima.dtype, maxima.dim()) == (torch.float64, 1, torch.float64, 1)
    names = [*MOMENT_SUMS, *((*COMPARISON_SUMS, *SCALE_SUMS) if compared else ())]
    extremes = [*MAXIMA, *(SCALE_MAXIMA if compared else ())]
    assert len(sums) == len(names) + EXPONENT_BINS * histogram_too
    results: Columns = dict(zip(names, sums.tolist(), strict=False))
    if histogram_too:
        results["histogram"] = sums[len(names) :].tolist()
    return results | dict(zip(extremes, maxima.tolist(), strict=True))


def assert_same(found: Columns, expected: Columns, *, rel: float | Mapping[str, float] = 1e-13) -> None:
    """Counts and extremes are exact; sums, and logarithms, are as good as float64, or within ``rel``."""
    assert found.keys() == expected.keys()
    rounded = {name for name in found if name.endswith("sum") or "range" in name}
    for name in rounded:
        bound = rel if isinstance(rel, float) else rel.get(name, 1e-13)
        size = expected["abs_sum"] if name == "sum" else abs(expected[name])
        assert found[name] == pytest.approx(expected[name], rel=bound, abs=bound * size, nan_ok=True), name
    rest = found.keys() - rounded
    assert {name: found[name] for name in rest} == {name: expected[name] for name in rest}


def quantized(values: torch.Tensor, scale_inv: float, *, e5m2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, largest = FLOAT8[e5m2]
    scaled = (values.float() / scale_inv).clamp(-largest, largest)
    return scaled.to(dtype).view(torch.uint8), torch.tensor([scale_inv])


def statistic(name: str, *passes: Columns) -> float:
    """A statistic of a tensor from the columns of some passes, merged as micro-batches and ranks are."""
    merged = {column: np.array([sum(item[column] for item in passes)]) for column in MOMENT_SUMS}
    merged |= {column: np.array([max(item[column] for item in passes)]) for column in MAXIMA}
    return float(STATISTICS[name].value(merged)[0])
