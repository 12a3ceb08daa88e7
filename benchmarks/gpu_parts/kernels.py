"""One pass over a tensor, against sums in float64 on the CPU.

On a GPU this is the Triton kernel. Its sums must lie within the bounds of the docstring of
``te_precision_callbacks/engine/kernels/triton_parts.py``; on a CPU the pass in C++ (``one_pass.cpp``). Counts,
extremes and histograms must be equal. The value of a row is the largest error of a sum as a share of its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measuring import as_in_a_long_run, measured_tensor
from stats import path_of

from gpu_parts.rows import Rows, Settings, run_part
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    EXPONENT_BINS,
    MAXIMA,
    MOMENT_SUMS,
    NOTHING,
    SCALE_MAXIMA,
    SCALE_SUMS,
    ColumnPlaces,
    Pending,
    layout,
)

Array = npt.NDArray[np.float64]
View = Callable[[torch.Tensor], torch.Tensor]

WIDE = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ONE_OF_EACH_SIZE = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
FORMATS = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}
"""Whether codes are E5M2 -> torch's dtype, and its largest number."""

_U = 2.0**-24
_K = 16
"""The additions in float32 on the way of an element into a sum, at most."""
BOUNDS_ON_GPU = {
    "sum": 2 * (_K + 1) * _U,  # of the sum of magnitudes
    "abs_sum": _K * _U,
    "square_sum": (2 * _K + 4) * _U,
    "signal_square_sum": (2 * _K + 4) * _U,
    "error_square_sum": (_K + 3) * _U,
    "variance": (2 * _K + 4) * _U,
}
BOUNDS_ON_CPU = {**dict.fromkeys(BOUNDS_ON_GPU, 10 * _U), "variance": 28 * _U}
"""The largest of the bounds in one_pass.cpp."""

_FSUM_UP_TO = 2**21
"""Elements that math.fsum adds in a moment; of more, numpy's pairwise sum in float64 is wrong by some 2^-48."""


@dataclass(frozen=True)
class Case:
    """A measured case.

    Attributes:
        name: printed name.
        base: a contiguous tensor on the CPU.
        view: function from the base to the measured tensor, also applied to its codes.
        codes: whether it is compared with codes, and then whether they are E5M2.
        codes_view: how the codes lie, if other than the tensor.
        histogram: whether exponents are counted.
    """

    name: str
    base: torch.Tensor
    view: View = torch.Tensor.detach
    codes: bool | None = None
    codes_view: View | None = None
    histogram: bool = True


VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], View]] = {
    "transposed": ((1000, 1201), (40, 33), lambda x: x.t()),
    "sliced": ((1000, 1201), (40, 33), lambda x: x[1:-2, 3:-1:2]),
    "rows in whole runs": ((40, 8192), (3, 4096), lambda x: x[:, : x.shape[1] // 2]),
    "5 dimensions": ((5, 14, 9, 14, 130), (3, 4, 3, 4, 10), lambda x: x[:, ::2, :, 1::2, :-1]),
    "6 dimensions": ((11,) * 6, (4,) * 6, lambda x: x[:-1, :-1, :-1, :-1, :-1, :-1]),
}
"""Name -> the shape, the small shape, and what is taken of it."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (0.7 * torch.randn(shape, generator=generator))


def cases(*, small: bool) -> Iterator[Case]:
    """Yield all cases.

    On a GPU each new combination of dtype, codes, histogram, number of dimensions, and sizes that are multiples of 16
    or not compiles a kernel, in some seconds. Addresses depend on the dtype through its size alone, so all views are
    measured in float32, and one in each smaller size. Values and codes are decoded separately.
    """
    side = 96 if small else 4096
    large, odd = drawn(side, side), drawn(4099 if small else 300_007, seed=1)
    for dtype in (*WIDE, *FLOAT8):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{name}, {side} x {side}", large.to(dtype))
        yield Case(f"{name}, {len(odd)} elements", odd.to(dtype))
        yield Case(f"{name}, with inf and nan", _with_gaps(odd.to(dtype)))
        for view in VIEWS if dtype is torch.float32 else ("transposed", "sliced") if dtype in ONE_OF_EACH_SIZE else ():
            shape, small_shape, take = VIEWS[view]
            yield Case(f"{name}, {view}", drawn(*(small_shape if small else shape)).to(dtype), take)
        for e5m2 in (False, True) if dtype in WIDE[:2] else (dtype is torch.float8_e4m3fn,):
            codes = "E5M2" if e5m2 else "E4M3"
            yield Case(f"{name}, {side} x {side}, codes {codes}", large.to(dtype), codes=e5m2)
            if dtype is WIDE[e5m2]:
                yield Case(f"{name}, with inf and nan, codes {codes}", _with_gaps(odd.to(dtype)), codes=e5m2)
    for dtype in (torch.float32, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{name}, {len(odd)} elements, without histogram", odd.to(dtype), histogram=False)
    yield Case("float32, 1 element", torch.tensor([-0.75]))
    yield Case("float32, 3 x 5 x 7", drawn(3, 5, 7))
    matrix = drawn(33, 47) if small else drawn(1000, 1201)
    yield Case("float32, transposed with its codes", matrix, lambda x: x.t(), codes=False)
    yield Case(
        "float32, transposed, codes not", matrix, lambda x: x.t(), codes=False, codes_view=torch.Tensor.contiguous
    )
    yield Case("bfloat16, sliced with its codes", matrix.bfloat16(), VIEWS["sliced"][2], codes=True, histogram=False)
    normal = torch.randn(len(odd), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{name}, at 1e38", (normal.clamp(-3, 3) * 1e38).to(dtype))
        yield Case(f"{name}, at 1e-38", (normal * 1e-38).to(dtype))
        yield Case(f"{name}, from 1e-30 to 1e30", (normal * 10 ** (8 * odd.sign() * normal.abs())).to(dtype))
        yield Case(f"{name}, a mean of a thousand deviations", (1000 + normal).to(dtype))
    yield Case("float16, a mean of a thousand deviations", (1000 + normal).half())


def _with_gaps(values: torch.Tensor) -> torch.Tensor:
    """Some elements replaced by inf, -inf and nan; E4M3 has nan alone."""
    wide = values.float()
    for start, what in ((5, math.inf), (1000, -math.inf), (2001, math.nan)):
        wide[start::3001] = what
    return wide.to(values.dtype)


def quantized(values: torch.Tensor, *, e5m2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor on the CPU, with less than half of the scale that its largest element needs."""
    dtype, largest = FORMATS[e5m2]
    wide = values.float().nan_to_num(0.0, 0.0, 0.0)
    scale_inv = (wide.abs().max() / largest * 0.4).reshape(1)
    return (wide / scale_inv).clamp(-largest, largest).to(dtype).view(torch.uint8), scale_inv


# --- what must come out -----------------------------------------------------------------------------------------------


def exact(
    values: torch.Tensor, codes: torch.Tensor | None, scale_inv: torch.Tensor | None, e5m2: bool
) -> dict[str, Any]:
    """Return all columns in float64, the histogram as a list, and the variance."""
    x = _array(values)
    finite = np.isfinite(x)
    kept = x[finite]
    magnitudes = np.abs(kept[kept != 0])
    results: dict[str, Any] = {
        "finite": kept.size,
        "nonfinite": x.size - kept.size,
        "zeros": kept.size - magnitudes.size,
        "sum": _sum(kept),
        "square_sum": _sum(kept**2),
        "abs_sum": _sum(magnitudes),
        "max": kept.max(initial=-math.inf),
        "negated_min": (-kept).max(initial=-math.inf),
        "negated_min_nonzero": (-magnitudes).max(initial=-math.inf),
        "variance": _sum((kept - _sum(kept) / kept.size) ** 2) / kept.size if kept.size else 0.0,
    }
    bins = np.clip(np.frexp(magnitudes)[1] + 126, 0, EXPONENT_BINS - 1)  # frexp: 0.5 <= mantissa < 1
    results["histogram"] = np.bincount(bins, minlength=EXPONENT_BINS).tolist()
    if codes is not None and scale_inv is not None:
        dtype, largest = FORMATS[e5m2]
        y = _array(codes.contiguous().view(dtype).float() * scale_inv)[finite]
        limit = float(torch.tensor(largest) * scale_inv)
        results |= {
            "compared": kept.size,
            "underflows": int(((kept != 0) & (y == 0)).sum()),
            "overflows": int((np.abs(kept) > limit).sum()),
            "error_square_sum": _sum((kept - y) ** 2),
            "signal_square_sum": results["square_sum"],
        }
        factor = scale_inv.item()
        results |= {"scales": 1, "scale_sum": factor, "scale_square_sum": factor * factor}
        results |= {"scale_max": factor, "negated_scale_min": -factor}
    return results


def _array(values: torch.Tensor) -> Array:
    array: Array = values.double().reshape(-1).numpy()
    return array


def _sum(numbers: Array) -> float:
    return math.fsum(numbers) if numbers.size <= _FSUM_UP_TO else float(np.sum(numbers))


def _named(sums: torch.Tensor, maxima: torch.Tensor, case: Case) -> dict[str, Any]:
    """The columns of a pass by their names, and the variance that follows from them."""
    with_codes = case.codes is not None
    names = [*MOMENT_SUMS, *((*COMPARISON_SUMS, *SCALE_SUMS) if with_codes else ())]
    extremes = [*MAXIMA, *(SCALE_MAXIMA if with_codes else ())]
    numbers = sums.tolist()
    if (sums.dtype, maxima.dtype) != (torch.float64, torch.float64) or len(numbers) != len(names) + (
        EXPONENT_BINS * case.histogram
    ):
        raise RuntimeError(f"{case.name}: {len(numbers)} sums of {sums.dtype}, maxima of {maxima.dtype}")
    results: dict[str, Any] = dict(zip(names, numbers, strict=False)) | dict(
        zip(extremes, maxima.tolist(), strict=True)
    )
    if case.histogram:
        results["histogram"] = numbers[len(names) :]
    count = max(1.0, results["finite"])
    mean = results["sum"] / count
    results["variance"] = results["square_sum"] / count - mean * mean
    return results


def compared(results: dict[str, Any], expected: dict[str, Any], bounds: dict[str, float]) -> tuple[float, list[str]]:
    """The largest error as a share of its bound, and the columns that are wrong."""
    worst, wrong = 0.0, []
    for name, value in results.items():
        right = expected[name]
        if name not in bounds:
            if value != right:
                where = "" if name == "histogram" else f" is {value}, not {right}"
                wrong.append(f"{name}{where}")
            continue
        size = expected["abs_sum"] if name == "sum" else abs(right)
        allowed = bounds[name] * size
        if name == "variance":  # and what float64 rounds where the mean's square is subtracted
            allowed += 8 * 2.0**-52 * expected["square_sum"] / max(1, expected["finite"])
        error = abs(value - right)
        share = 0.0 if error == 0 else error / allowed if allowed else math.inf
        if not share <= 1:
            wrong.append(f"{name} is {value!r}, not {right!r}")
        worst = max(worst, share if not math.isnan(share) else math.inf)
    return worst, wrong


def _run(case: Case, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the pass, and the expected ones."""
    base_codes, scale_inv = quantized(case.base, e5m2=case.codes) if case.codes is not None else (None, None)
    arguments = []
    for place in (device, torch.device("cpu")):
        values = case.view(case.base.to(place))
        codes = None if base_codes is None else case.view(base_codes.to(place))
        if codes is not None and case.codes_view is not None:
            codes = case.codes_view(codes)
        arguments.append((values, codes, None if scale_inv is None else scale_inv.to(place)))
    e5m2 = bool(case.codes)
    results = _named(*measured_tensor(*arguments[0], e5m2=e5m2, histogram=case.histogram), case)
    return results, exact(*arguments[1], e5m2)


def _differing_together(dtype: torch.dtype, settings: Settings, *, with_codes: bool) -> int:
    """Count the columns that differ between tensors measured together and each measured alone."""
    sides = (16, 48, 96, 128) if settings.small else (16, 512, 2048, 4096)
    places, width, extremes = layout(codes=with_codes, histogram=False)
    pending, alone = [], []
    for number, side in enumerate(sides):
        values = drawn(side, side, seed=number).to(dtype)
        codes, scale_inv = quantized(values, e5m2=False) if with_codes else (None, None)
        codes, scale_inv = (None if x is None else x.to(settings.device) for x in (codes, scale_inv))
        at = [place if place < 0 else place + 300 * number for place in places]
        values = values.to(settings.device)
        pending.append(Pending(values, codes, scale_inv, False, ColumnPlaces(*at)))
        alone.append(measured_tensor(values, codes, scale_inv))
    sums = torch.zeros(300 * len(sides), dtype=torch.float64, device=settings.device)
    maxima = torch.full_like(sums, NOTHING)
    kernels.add(pending, sums, maxima)
    differing = 0
    for number, (alone_sums, alone_maxima) in enumerate(alone):
        begin = 300 * number
        differing += int((sums[begin : begin + width] != alone_sums).sum())
        differing += int((maxima[begin : begin + extremes] != alone_maxima).sum())
    return differing


def check(settings: Settings, rows: Rows) -> None:
    bounds = BOUNDS_ON_GPU if settings.on_gpu else BOUNDS_ON_CPU
    with as_in_a_long_run():
        for case in cases(small=settings.small):
            worst, wrong = compared(*_run(case, settings.device), bounds)
            rows.add(case.name, worst, "of the bound", "<= 1, counts equal", ok=not wrong, note="; ".join(wrong)[:400])
        for dtype, with_codes in ((torch.float32, False), (torch.bfloat16, True)):
            name = f"{str(dtype).removeprefix('torch.')}, four tensors{' and their codes' if with_codes else ''}"
            differing = _differing_together(dtype, settings, with_codes=with_codes)
            rows.equal(f"{name}, together: columns that are not those of one at a time", differing, 0)
        path = path_of(torch.zeros(2**16, device=settings.device))  # after a failure of Triton it is ``eager``
    if settings.on_gpu:
        rows.equal("the pass that was taken", path, "triton")
    else:
        rows.measured("the pass that was taken", path)


if __name__ == "__main__":
    run_part("kernels", check)
