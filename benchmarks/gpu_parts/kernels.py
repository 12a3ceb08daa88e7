"""One pass over a tensor, against the pass in plain torch over the same tensor in float64 on the CPU, which
``tests/engine`` compares with numpy.

On a GPU this is the Triton kernel. Its sums must lie within the bounds of the docstring of
``te_precision_callbacks/engine/kernels/triton_parts.py``; on a CPU the pass in C++ (``one_pass.cpp``). Counts,
extremes and histograms must be equal. The value of a row is the largest error of a sum as a share of its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from stats import path_of

from gpu_parts.layout import layout
from gpu_parts.rows import Rows, Settings
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
)

View = Callable[[torch.Tensor], torch.Tensor]

WIDE = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ONE_OF_EACH_SIZE = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
FORMATS = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}
"""Whether codes are E5M2 -> torch's dtype, and its largest number."""

_U = 2.0**-24
_K = 16  # additions in float32 on the way of an element into a sum, at most
BOUNDS_ON_GPU = {
    "sum": 2 * (_K + 1) * _U,  # of the sum of magnitudes
    "abs_sum": _K * _U,
    "square_sum": (2 * _K + 4) * _U,
    "signal_square_sum": (2 * _K + 4) * _U,
    "error_square_sum": (_K + 3) * _U,
    "underflow_square_sum": (_K + 3) * _U,
    "variance": (2 * _K + 4) * _U,
}
BOUNDS_ON_CPU = {**dict.fromkeys(BOUNDS_ON_GPU, 10 * _U), "variance": 28 * _U}
"""The largest of the bounds in one_pass.cpp."""


class Case(NamedTuple):
    """A measured case.

    Attributes:
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


SUMS_AND_MAXIMA = {
    False: (MOMENT_SUMS, MAXIMA),
    True: ((*MOMENT_SUMS, *COMPARISON_SUMS, *SCALE_SUMS), (*MAXIMA, *SCALE_MAXIMA)),
}
"""Whether there are codes -> the columns of :func:`layout`."""

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


def measured_tensor(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and maxima of one pass over a tensor."""
    places, width, extremes = layout(codes=codes is not None, histogram=histogram)
    sums = torch.zeros(width, dtype=torch.float64, device=values.device)
    maxima = torch.full((extremes,), NOTHING, dtype=torch.float64, device=values.device)
    kernels.add([Pending(values.detach(), codes, scale_inv, e5m2, places)], sums, maxima)
    return sums, maxima


def compared(
    measured: Sequence[torch.Tensor], right: Sequence[torch.Tensor], names: Sequence[str], bounds: Mapping[str, float]
) -> tuple[float, list[str]]:
    """Compare vectors of sums and maxima with the right ones.

    Args:
        names: of the sums and then of the maxima.
        bounds: name -> the largest relative error, for ``sum`` relative to the sum of magnitudes; others are exact.

    Returns:
        The largest error as a share of its bound, and what is wrong.
    """
    values, expected = ([number for vector in vectors for number in vector.tolist()] for vectors in (measured, right))
    abs_sum = expected[names.index("abs_sum")]
    worst, wrong = 0.0, []
    for name, value, number in zip(names, values, expected, strict=True):
        if value == number:
            continue
        allowed = bounds.get(name, 0.0) * (abs_sum if name == "sum" else abs(number))
        error = abs(value - number)
        share = error / allowed if allowed and math.isfinite(error) else math.inf
        worst = max(worst, share)
        if share > 1:
            wrong.append(f"{name} is {value!r}, not {number!r}")
    return worst, wrong


def _measured(case: Case, device: torch.device, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and maxima of the pass, and the variance that follows from them; perhaps in another dtype."""
    values, codes, scale_inv = case.view(case.base.to(device, dtype)), None, None
    if case.codes is not None:
        base_codes, scale_inv = (part.to(device) for part in quantized(case.base, e5m2=case.codes))
        codes = (case.codes_view or torch.Tensor.detach)(case.view(base_codes))
    sums, maxima = measured_tensor(values, codes, scale_inv, e5m2=bool(case.codes), histogram=case.histogram)
    finite, total, squares = (sums[MOMENT_SUMS.index(name)] for name in ("finite", "sum", "square_sum"))
    variance = squares / finite - (total / finite) ** 2
    return sums, torch.cat([maxima, variance.view(1)])


def _differing_together(dtype: torch.dtype, settings: Settings, *, with_codes: bool) -> int:
    """Count the columns that differ between tensors measured together and each measured alone."""
    sides = (16, 512, 2048, 4096) if settings.on_gpu else (16, 48, 96, 128)
    places, width, extremes = layout(codes=with_codes, histogram=False)
    pending, alone = [], []
    for number, side in enumerate(sides):
        on_cpu = drawn(side, side, seed=number).to(dtype)
        values, codes, scale_inv = on_cpu.to(settings.device), None, None
        if with_codes:
            codes, scale_inv = (part.to(settings.device) for part in quantized(on_cpu, e5m2=False))
        at = [place if place < 0 else place + 300 * number for place in places]
        pending.append(Pending(values, codes, scale_inv, False, ColumnPlaces(*at)))
        alone.append(measured_tensor(values, codes, scale_inv))
    sums = torch.zeros(300 * len(sides), dtype=torch.float64, device=settings.device)
    maxima = torch.full_like(sums, NOTHING)
    differing = 0
    for number in range(200 if settings.on_gpu else 2):  # on a GPU, another program is the last one each time
        sums.zero_()
        maxima.fill_(NOTHING)
        # In turn in another order, so that memory holds partial results of other tensors.
        kernels.add(pending[:: 1 - number % 2 * 2], sums, maxima)
        for begin, (alone_sums, alone_maxima) in zip(range(0, len(sums), 300), alone, strict=True):
            differing += int((sums[begin : begin + width] != alone_sums).sum())
            differing += int((maxima[begin : begin + extremes] != alone_maxima).sum())
    return differing


def check(settings: Settings, rows: Rows) -> None:
    bounds = BOUNDS_ON_GPU if settings.on_gpu else BOUNDS_ON_CPU
    for case in cases(small=not settings.on_gpu):
        sums, maxima = SUMS_AND_MAXIMA[case.codes is not None]
        bins = [f"exponent {number}" for number in range(EXPONENT_BINS if case.histogram else 0)]
        names = [*sums, *bins, *maxima, "variance"]
        right = _measured(case, torch.device("cpu"), torch.float64)
        worst, wrong = compared(_measured(case, settings.device), right, names, bounds)
        rows.add(case.name, worst, "of the bound", "<= 1, counts equal", ok=not wrong, note="; ".join(wrong))
    for dtype, with_codes in ((torch.float32, False), (torch.bfloat16, True)):
        name = f"{str(dtype).removeprefix('torch.')}, four tensors{' and their codes' if with_codes else ''}"
        differing = _differing_together(dtype, settings, with_codes=with_codes)
        rows.equal(f"{name}, together: columns that are not those of one at a time", differing, 0)
    path = path_of(torch.zeros(2**16, device=settings.device))  # after a failure of Triton it is ``eager``
    rows.equal_on_gpu("the pass that was taken", path, "triton", settings)
