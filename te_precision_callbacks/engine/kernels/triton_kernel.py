"""The columns of :mod:`~te_precision_callbacks.engine.kernels.columns` from one pass over a tensor, in Triton.

Usage::

    from te_precision_callbacks.engine.kernels import triton_kernel

    sums, maxima = triton_kernel.measure(activation, histogram=True)
    sums, maxima = triton_kernel.measure(gradient, codes, scale_inv, e5m2=True)  # and how well the codes represent it

It runs on a GPU, and on CPU tensors where ``TRITON_INTERPRET=1`` was set before triton was imported. The host never
waits for the device.

Counts and extremes are exact. Sums are taken in float32 over the elements that one thread has of a tile, and in float64
from there on: a GPU does float64 at half (H100) to a 64th (consumer GPUs) of its float32 rate. A thread subtracts the
mean of its elements before it squares, so that a variance that is a millionth of the mean's square keeps its digits.
With u = 2^-24, one rounding of float32, k additions at most on the way of an element into a sum of float32 (10; 16 for
values in FP8), and what float64 rounds left out, the sums are at most this wrong (N. J. Higham, Accuracy and Stability
of Numerical Algorithms, 2002, section 4.2):

- ``abs_sum``: k u of itself.
- ``sum``: (k + 1) u times the sum of the distances from the threads' means, which is below 2 ``abs_sum``.
- the squared distances from the threads' means: (k + 3) u of themselves. ``square_sum``, which is made of these, of the
  means, and of the products of means and distances: (2 k + 4) u of itself.
- the variance: the same share of itself, as its error comes from the same two sums; the standard deviation: (k + 2) u,
  which is 7e-7 for k = 10.
- ``error_square_sum``: (k + 3) u of itself.

A tile whose squares might leave float32's range, or that has inf or NaN, is measured by :func:`_careful_moments`, which
scales by a power of two for each thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import Pending, Places, layout, measured_by

# dtype -> name in the kernel, integers of the same size to load in its place, and a value that is not finite. Only
# float32 and float16 are loaded as such: the kernel decodes the others by their bits, which is exact on every GPU.
_FORMATS: dict[torch.dtype, tuple[str, torch.dtype | None, float | int]] = {
    torch.float32: ("float32", None, math.inf),
    torch.float16: ("float16", None, math.inf),
    torch.bfloat16: ("bfloat16", torch.int16, 0x7FC0),
    torch.float8_e4m3fn: ("e4m3", torch.uint8, 0x7F),
    torch.float8_e5m2: ("e5m2", torch.uint8, 0x7F),
}
_CODE_FORMATS = {False: ("e4m3", 448.0), True: ("e5m2", 57344.0)}  # e5m2? -> name in the kernel, largest number

# Between these magnitudes the largest of a tile must lie for a plain measurement. Above, the sum of 32 squares of twice
# its size might overflow; below, squared distances that float32 has no exponents for, under 2^-126, might matter: a
# number has digits down to 2^-24 of itself.
_PLAIN = (2.0**-36, 2.0**60)
_MAX_DIMENSIONS = 5
_THREADS = 128
_BYTES_PER_LOAD = 16
# In one tile, without codes and with codes: enough loads in flight to hide the latency of memory, and few enough for
# the registers of the programs that share a processor.
_ELEMENTS_PER_THREAD = {False: 32, True: 16}
_PROGRAMS_PER_PROCESSOR = 4
_PROGRAMS_OF_INTERPRETER = 4

_MOST_TOGETHER = 4
"""The tensors of one launch; a GEMM has three."""

# Of the results of programs that are merged at a time.
_COLUMNS_TOGETHER = 32
_ROWS_TOGETHER = 64

# Numbers that differ from tensor to tensor, of which Triton is not to make kernels of their own.
_BEGINS = ["begin1", "begin2", "begin3"]
_NUMBERS = [
    *(f"end{tensor}" for tensor in range(_MOST_TOGETHER)),
    *(f"{name}{tensor}" for tensor in range(_MOST_TOGETHER) for name in Places._fields),
]

# triton has no types: this keeps the module typed.
_jit: Callable[[Callable[..., Any]], Any] = triton.jit
_jit_of_tensors: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=_BEGINS)
_jit_of_places: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=_NUMBERS)


def measure(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`te_precision_callbacks.engine.kernels.measure`; its tensors and errors are those of :func:`add`."""
    return measured_by(add, values.detach(), codes, scale_inv, e5m2=e5m2, histogram=histogram)


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """Measure tensors, and their quantized values if there are any, and merge the results into vectors.

    The result is the same bits for the same tensors, strides and device, together or alone. A quantized value that is
    inf or NaN makes ``error_square_sum`` inf or NaN, unless its element is not finite either.

    Args:
        pending: the values are float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. More than 5 dimensions that
            cannot be merged into fewer cost a contiguous copy. A quantized value is its decoded code times
            ``scale_inv``, in float32; an element overflows if its magnitude is above the largest number of the format
            (E4M3 448, E5M2 57344) times this.
        sums, maxima: float64, one dimension, on the device of the tensors.

    Raises:
        TypeError: a tensor has a dtype other than these.
        ValueError: codes and values differ in shape or device, ``scale_inv`` is missing for codes, or does not have
            exactly one element.
    """
    for together in grouped(pending):
        add_together(together, sums, maxima)


def grouped(pending: Sequence[Pending]) -> list[list[Pending]]:
    """The tensors by the launches that measure them: alike ones without gaps share one, up to :data:`_MOST_TOGETHER`.

    Raises:
        TypeError, ValueError: as :func:`add`.
    """
    groups: list[list[Pending]] = []
    open_groups: dict[tuple[object, ...], list[Pending]] = {}
    for one in pending:
        _check(one.values, one.codes, one.scale_inv)
        key = _shared_launch(one)
        group = None if key is None else open_groups.get(key)
        if group is None or len(group) == _MOST_TOGETHER or any(_meet(one.places, other.places) for other in group):
            group = []
            groups.append(group)
            if key is not None:
                open_groups[key] = group
        group.append(one)
    return groups


def _meet(places: Places, others: Places) -> bool:
    """Whether two results go to the same place."""
    return any(place == other >= 0 for place, other in zip(places, others, strict=True))


def _shared_launch(one: Pending) -> tuple[object, ...] | None:
    """What tensors of one launch have in common; None for one that is measured alone."""
    values, codes = one.values, one.codes
    if values.numel() % 16 or not 0 < values.numel() < 2**31 or values.data_ptr() % 16:
        return None
    if codes is not None and codes.data_ptr() % 16:
        return None
    ((_, *strides), *others) = _collapse(values, codes)
    if others or strides != [1, 0 if codes is None else 1]:
        return None
    return values.dtype, codes is None, one.e5m2, one.places.exponents >= 0


def add_together(together: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """:func:`add` for a group of :func:`grouped`, in two launches."""
    values, codes, _, e5m2, places = first = together[0]
    if values.numel() == 0:
        return eager.add(together, sums, maxima)
    histogram = places.exponents >= 0
    at, columns, extremes = layout(codes=codes is not None, histogram=histogram)
    name, integers, not_finite = _FORMATS[values.dtype]
    elements = [one.values.detach() if integers is None else one.values.detach().view(integers) for one in together]
    all_codes = [one.codes for one in together]
    dimensions = _collapse(elements[0], codes)
    if len(dimensions) > _MAX_DIMENSIONS:
        elements = [elements[0].contiguous()]
        all_codes = [None if codes is None else codes.contiguous()]
        dimensions = _collapse(elements[0], all_codes[0])
    outer, *inner = dimensions
    inner = [*reversed(inner), *[(1, 0, 0)] * (_MAX_DIMENSIONS - 1 - len(inner))]

    vector = _BYTES_PER_LOAD // elements[0].element_size()
    run = _THREADS * vector
    rows = _ELEMENTS_PER_THREAD[codes is not None] // vector
    most = _programs(values.device)
    ends = list(itertools.accumulate(min(most, -(-one.values.numel() // (rows * run))) for one in together))
    partials = torch.empty((ends[-1], columns + extremes), dtype=torch.float64, device=values.device)
    code_name, largest = _CODE_FORMATS[e5m2]
    alone = len(together) == 1
    begins = _filled(ends[:-1], ends[-1])[:-1]
    with torch.cuda.device(values.get_device()):
        _measure[(ends[-1],)](
            *_filled(elements, None if alone else elements[0]),
            *_filled(all_codes, None if alone else all_codes[0]),
            *_filled([one.scale_inv for one in together], None if alone else first.scale_inv),
            *_filled([one.values.numel() for one in together], None if alone else values.numel()),
            *begins,
            partials,
            *[size for size, _, _ in inner],
            *[stride for _, stride, _ in [*inner, outer]],
            *[stride for _, _, stride in [*inner, outer]],
            FORMAT=name,
            NOT_FINITE=not_finite,
            CODES="" if codes is None else code_name,
            LARGEST=largest,
            SMALLEST_PLAIN=_PLAIN[0],
            LARGEST_PLAIN=_PLAIN[1],
            HISTOGRAM=histogram,
            ALONE=alone,
            WHOLE_RUNS=len(dimensions) > 1 and inner[0][0] % run == 0,
            SMALL=values.numel() < 2**31,
            ROWS=rows,
            PER_THREAD=rows * vector,
            THREADS=_THREADS,
            VECTOR=vector,
            COLUMNS=columns,
            EXTREMES=extremes,
            num_warps=_THREADS // 32,
            # Fused, the product of a code and the scale would not be rounded before it is subtracted.
            enable_fp_fusion=codes is None,
        )
        _merge[(len(together), -(-(columns + extremes) // _COLUMNS_TOGETHER))](
            partials,
            sums,
            maxima,
            *_filled(ends, 0),
            *[place for one in _filled(together, first) for place in one.places],
            COMPARED=at.compared,
            SCALES=at.scales,
            EXPONENTS=at.exponents,
            SCALE_MAXIMA=at.scale_maxima,
            COLUMNS=columns,
            EXTREMES=extremes,
            WIDTH=_COLUMNS_TOGETHER,
            ROWS=_ROWS_TOGETHER,
            num_warps=_THREADS // 32,
            enable_fp_fusion=True,
        )
    return None


def _filled(given: Sequence[Any], filling: Any) -> list[Any]:
    """As many as a launch can take, the missing ones all the same."""
    return [*given, *[filling] * (_MOST_TOGETHER - len(given))]


def _check(values: torch.Tensor, codes: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
    if values.dtype not in _FORMATS:
        known = ", ".join(str(dtype) for dtype in _FORMATS)
        raise TypeError(f"values: the dtype is {values.dtype}, must be one of {known}.")
    if codes is None:
        return
    if scale_inv is None:
        raise ValueError("scale_inv: must be given with codes.")
    for argument, tensor, dtype in (("codes", codes, torch.uint8), ("scale_inv", scale_inv, torch.float32)):
        if tensor.dtype != dtype:
            raise TypeError(f"{argument}: the dtype is {tensor.dtype}, must be {dtype}.")
        if tensor.device != values.device:
            raise ValueError(f"{argument}: is on {tensor.device}, must be where the values are, on {values.device}.")
    if codes.shape != values.shape:
        raise ValueError(
            f"codes: the shape is {tuple(codes.shape)}, must be that of the values, {tuple(values.shape)}."
        )
    if scale_inv.numel() != 1:
        raise ValueError(f"scale_inv: has {scale_inv.numel()} elements, must have 1.")


def _collapse(values: torch.Tensor, codes: torch.Tensor | None) -> list[tuple[int, int, int]]:
    """As few (size, stride of values, stride of codes) as reach the same pairs of elements, outermost first.

    The order of elements does not matter, only their pairing, so dimensions are sorted by stride first: every dense
    tensor, transposed or not, becomes one dimension of stride 1.
    """
    code_strides: Sequence[int] = [0] * values.dim() if codes is None else codes.stride()
    found = [found for found in zip(values.shape, values.stride(), code_strides, strict=True) if found[0] != 1]
    found.sort(key=lambda dimension: dimension[1] or math.inf, reverse=True)
    collapsed: list[tuple[int, int, int]] = []
    for size, stride, code_stride in found:
        if collapsed and collapsed[-1][1:] == (stride * size, code_stride * size):
            size *= collapsed.pop()[0]
        collapsed.append((size, stride, code_stride))
    return collapsed or [(1, 1, 1)]


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * _PROGRAMS_PER_PROCESSOR


@_jit_of_tensors
def _measure(
    # Up to four tensors, alone or together; of absent ones there is the first again, which no program takes.
    values: tl.tensor,
    values1: tl.tensor,
    values2: tl.tensor,
    values3: tl.tensor,
    codes: tl.tensor,
    codes1: tl.tensor,
    codes2: tl.tensor,
    codes3: tl.tensor,
    scale_inv: tl.tensor,
    scale_inv1: tl.tensor,
    scale_inv2: tl.tensor,
    scale_inv3: tl.tensor,
    numel: tl.tensor,
    numel1: tl.tensor,
    numel2: tl.tensor,
    numel3: tl.tensor,
    # The first programs of the second, third and fourth tensor.
    begin1: tl.tensor,
    begin2: tl.tensor,
    begin3: tl.tensor,
    partials: tl.tensor,
    # Sizes and strides from the innermost dimension on; the last of 5 needs no size, absent ones have 1 and 0.
    size0: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    stride4: tl.tensor,
    code_stride0: tl.tensor,
    code_stride1: tl.tensor,
    code_stride2: tl.tensor,
    code_stride3: tl.tensor,
    code_stride4: tl.tensor,
    FORMAT: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    CODES: tl.constexpr,  # "" without codes
    LARGEST: tl.constexpr,
    SMALLEST_PLAIN: tl.constexpr,
    LARGEST_PLAIN: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    ALONE: tl.constexpr,  # there is one tensor; several have one dimension, and numel and addresses are multiples of 16
    WHOLE_RUNS: tl.constexpr,  # the innermost size is a multiple of THREADS * VECTOR
    SMALL: tl.constexpr,  # every index fits int32
    ROWS: tl.constexpr,
    PER_THREAD: tl.constexpr,  # ROWS * VECTOR
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTREMES: tl.constexpr,
) -> None:
    """Write row ``program_id`` of ``partials``: ``COLUMNS`` sums and counts, then ``EXTREMES`` maxima.

    A program reads tiles of [ROWS, THREADS, VECTOR] elements. Each thread has the elements of one index THREADS: a
    tile is reduced to [THREADS] in registers, and only the end of the program brings threads together.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if not ALONE:
        which = (program >= begin1).to(tl.int32) + (program >= begin2).to(tl.int32) + (program >= begin3).to(tl.int32)
        begin = _chosen(which, 0, begin1, begin2, begin3)
        programs = _chosen(which, begin1, begin2, begin3, programs) - begin
        program -= begin
        values = tl.multiple_of(_chosen(which, values, values1, values2, values3), 16)
        numel = tl.multiple_of(_chosen(which, numel, numel1, numel2, numel3), 16)
        if CODES != "":
            codes = tl.multiple_of(_chosen(which, codes, codes1, codes2, codes3), 16)
            scale_inv = _chosen(which, scale_inv, scale_inv1, scale_inv2, scale_inv3)

    run: tl.constexpr = THREADS * VECTOR
    row = (tl.arange(0, ROWS) * run)[:, None, None].to(tl.int64)
    lane = (tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :])[None, :, :]

    # int32 is enough for what one thread counts: 2^31 elements a thread would be 2^38 a program.
    finite_count = tl.full([THREADS], 0, tl.int32)
    nonzero_count = tl.full([THREADS], 0, tl.int32)
    total = tl.full([THREADS], 0, tl.float64)
    square_sum = tl.full([THREADS], 0, tl.float64)
    abs_sum = tl.full([THREADS], 0, tl.float64)
    maximum = tl.full([THREADS], float("-inf"), tl.float32)
    negated_min = tl.full([THREADS], float("-inf"), tl.float32)
    from_above = tl.full([THREADS], 0, tl.uint32)
    underflow_count = tl.full([THREADS], 0, tl.int32)
    overflow_count = tl.full([THREADS], 0, tl.int32)
    error_square_sum = tl.full([THREADS], 0, tl.float64)
    histogram = tl.full([256], 0, tl.int64)
    if CODES != "":
        scale = tl.load(scale_inv)
        largest = scale * LARGEST

    tile: tl.constexpr = ROWS * run
    seen = tl.full([], 0, tl.int64)
    for first in range(program.to(tl.int64) * tile, numel, programs.to(tl.int64) * tile):
        seen += tl.minimum(numel - first, tile)
        index = first + row + lane
        mask = index < numel
        # Divisions are the cost of more than one dimension: a run within one row of the tensor needs one for all.
        divided = first + row if WHOLE_RUNS else index
        if SMALL:
            divided = divided.to(tl.int32)
        offset = _offset(divided, size0, size1, size2, size3, stride0, stride1, stride2, stride3, stride4)
        if WHOLE_RUNS:
            offset += lane.to(tl.int64) * stride0

        # Elements beyond the end are loaded as not finite, so whatever excludes inf and NaN excludes them too.
        x = _decode(tl.load(values + offset, mask=mask, other=NOT_FINITE), FORMAT)
        float_sum = _sum(x)
        highest, negated_lowest = _max(x), _max(-x)
        here = tl.where(_is_finite(float_sum), tl.maximum(highest, negated_lowest), float("inf"))
        top = tl.max(here, 0)
        is_plain = (top == 0.0) | ((top >= SMALLEST_PLAIN) & (top <= LARGEST_PLAIN))
        if is_plain:
            high, low = highest, negated_lowest
            count, nonzero, sum_, squares, magnitudes, above = _plain_moments(x, float_sum, PER_THREAD)
        else:
            count, nonzero, sum_, squares, magnitudes, above, high, low = _careful_moments(x)
        finite_count += count
        nonzero_count += nonzero
        total += sum_
        square_sum += squares
        abs_sum += magnitudes
        maximum = tl.maximum(maximum, high)
        negated_min = tl.maximum(negated_min, low)
        from_above = tl.maximum(from_above, above)

        if CODES != "":
            offset = _offset(
                divided,
                size0,
                size1,
                size2,
                size3,
                code_stride0,
                code_stride1,
                code_stride2,
                code_stride3,
                code_stride4,
            )
            if WHOLE_RUNS:
                offset += lane.to(tl.int64) * code_stride0
            y = _decode(tl.load(codes + offset, mask=mask, other=0), CODES) * scale
            finite = _is_finite(x)
            kept = tl.where(finite, x, 0.0)
            underflow_count += _sum(((kept != 0.0) & (y == 0.0)).to(tl.int32))
            overflow_count += _sum((tl.abs(kept) > largest).to(tl.int32))
            error = tl.where(finite, x - y, 0.0)
            down, up = _powers(_max(tl.abs(error)))
            error *= down[None, :, None]
            error_square_sum += _sum(error * error) * (up * up)

        if HISTOGRAM:
            # A mask of tl.histogram is younger than Triton 3.2; no finite number has the exponent 255.
            magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            exponent = tl.where(magnitude == 0, 255, magnitude >> 23)
            histogram += tl.histogram(tl.reshape(exponent, [tile]), 256)

    # The order is that of the module columns.
    sums = partials + tl.program_id(0).to(tl.int64) * (COLUMNS + EXTREMES)
    finite_total = _total(finite_count)
    square_total = _total(square_sum)
    tl.store(sums + 0, finite_total)
    tl.store(sums + 1, seen.to(tl.float64) - finite_total)
    tl.store(sums + 2, finite_total - _total(nonzero_count))
    tl.store(sums + 3, _total(total))
    tl.store(sums + 4, square_total)
    tl.store(sums + 5, _total(abs_sum))
    if CODES != "":
        tl.store(sums + 6, finite_total)
        tl.store(sums + 7, _total(underflow_count))
        tl.store(sums + 8, _total(overflow_count))
        tl.store(sums + 9, _total(error_square_sum))
        tl.store(sums + 10, square_total)
        # All programs of a tensor have the same scale, and the first one counts it.
        wide = scale.to(tl.float64)
        counted = (program == 0) & (scale > 0.0) & (scale < float("inf"))
        tl.store(sums + 11, tl.where(counted, 1.0, 0.0).to(tl.float64))
        tl.store(sums + 12, tl.where(counted, wide, 0.0))
        tl.store(sums + 13, tl.where(counted, wide * wide, 0.0))
        tl.store(sums + COLUMNS + 3, tl.where(counted, wide, float("-inf")))
        tl.store(sums + COLUMNS + 4, tl.where(counted, -wide, float("-inf")))
    maxima = sums + COLUMNS
    if HISTOGRAM:
        bins = tl.arange(0, 256)
        tl.store(maxima - 256 + bins, tl.where(bins == 255, 0, histogram).to(tl.float64))
    tl.store(maxima + 0, tl.max(maximum, 0).to(tl.float64))
    tl.store(maxima + 1, tl.max(negated_min, 0).to(tl.float64))
    smallest = (-tl.max(from_above, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(maxima + 2, tl.where(smallest == 0.0, float("-inf"), -smallest).to(tl.float64))


@_jit_of_places
def _merge(
    partials: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    # Behind the last row of each tensor.
    end0: tl.tensor,
    end1: tl.tensor,
    end2: tl.tensor,
    end3: tl.tensor,
    # The places of each tensor's columns.
    moments0: tl.tensor,
    maxima0: tl.tensor,
    compared0: tl.tensor,
    scales0: tl.tensor,
    scale_maxima0: tl.tensor,
    exponents0: tl.tensor,
    moments1: tl.tensor,
    maxima1: tl.tensor,
    compared1: tl.tensor,
    scales1: tl.tensor,
    scale_maxima1: tl.tensor,
    exponents1: tl.tensor,
    moments2: tl.tensor,
    maxima2: tl.tensor,
    compared2: tl.tensor,
    scales2: tl.tensor,
    scale_maxima2: tl.tensor,
    exponents2: tl.tensor,
    moments3: tl.tensor,
    maxima3: tl.tensor,
    compared3: tl.tensor,
    scales3: tl.tensor,
    scale_maxima3: tl.tensor,
    exponents3: tl.tensor,
    COMPARED: tl.constexpr,  # where these begin in a row; -1 if they are not there
    SCALES: tl.constexpr,
    EXPONENTS: tl.constexpr,
    SCALE_MAXIMA: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTREMES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Merge the rows of tensor ``program_id(0)``, and of these the columns from ``program_id(1) * WIDTH`` on."""
    which = tl.program_id(0)
    first = _chosen(which, 0, end0, end1, end2)
    end = _chosen(which, end0, end1, end2, end3)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_sum = column < COLUMNS
    is_maximum = (column >= COLUMNS) & (column < COLUMNS + EXTREMES)

    total = tl.full([WIDTH], 0, tl.float64)
    largest = tl.full([WIDTH], float("-inf"), tl.float64)
    for above in range(first, end, ROWS):
        row = above + tl.arange(0, ROWS)
        at = partials + row[:, None].to(tl.int64) * (COLUMNS + EXTREMES) + column[None, :]
        is_row = row[:, None] < end
        total += tl.sum(tl.load(at, mask=is_row & is_sum[None, :], other=0.0), 0)
        largest = tl.maximum(largest, tl.max(tl.load(at, mask=is_row & is_maximum[None, :], other=float("-inf")), 0))

    begin = _chosen(which, moments0, moments1, moments2, moments3)
    base = tl.where(column >= 0, begin, 0)
    within = column
    if COMPARED >= 0:
        compared = _chosen(which, compared0, compared1, compared2, compared3)
        scales = _chosen(which, scales0, scales1, scales2, scales3)
        base = tl.where(column >= SCALES, scales, tl.where(column >= COMPARED, compared, base))
        within = column - tl.where(column >= SCALES, SCALES, tl.where(column >= COMPARED, COMPARED, 0))
    if EXPONENTS >= 0:
        exponents = _chosen(which, exponents0, exponents1, exponents2, exponents3)
        base = tl.where(column >= EXPONENTS, exponents, base)
        within = tl.where(column >= EXPONENTS, column - EXPONENTS, within)
    kept = sums + base + within
    is_kept = is_sum & (base >= 0)
    tl.store(kept, tl.load(kept, mask=is_kept, other=0.0) + total, mask=is_kept)

    extreme = column - COLUMNS
    base = tl.where(column >= 0, _chosen(which, maxima0, maxima1, maxima2, maxima3), 0)
    within = extreme
    if COMPARED >= 0:
        scale_maxima = _chosen(which, scale_maxima0, scale_maxima1, scale_maxima2, scale_maxima3)
        base = tl.where(extreme >= SCALE_MAXIMA, scale_maxima, base)
        within = tl.where(extreme >= SCALE_MAXIMA, extreme - SCALE_MAXIMA, extreme)
    kept = maxima + base + within
    is_kept = is_maximum & (base >= 0)
    tl.store(kept, tl.maximum(tl.load(kept, mask=is_kept, other=0.0), largest), mask=is_kept)


@_jit
def _chosen(which: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor) -> tl.tensor:
    return tl.where(which == 0, first, tl.where(which == 1, second, tl.where(which == 2, third, fourth)))


@_jit
def _offset(
    index: tl.tensor,
    size0: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    stride4: tl.tensor,
) -> tl.tensor:
    """Where the element number ``index`` lies. A size of 1 is a constant to Triton, which drops its division."""
    offset = (index % size0).to(tl.int64) * stride0
    index = index // size0
    offset += (index % size1).to(tl.int64) * stride1
    index = index // size1
    offset += (index % size2).to(tl.int64) * stride2
    index = index // size2
    offset += (index % size3).to(tl.int64) * stride3
    return offset + (index // size3).to(tl.int64) * stride4


@_jit
def _decode(loaded: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """The float32 of what was loaded, exactly."""
    if FORMAT == "bfloat16":
        x = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "e5m2":
        # The upper byte of a float16.
        x = (loaded.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3":
        # The bits of a float32 that has 2^-120 of the value: its exponent has a bias of 127, not 7. 2^120 is exact.
        bits = ((loaded.to(tl.int32) << 24) >> 4) & -0x78100000
        small = bits.to(tl.float32, bitcast=True)
        x = tl.where((bits & 0x07F00000) == 0x07F00000, float("nan"), small * 1.329227995784916e36)
    else:
        x = loaded.to(tl.float32)
    return x


@_jit
def _plain_moments(x: tl.tensor, float_sum: tl.tensor, PER_THREAD: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Moments but extremes of a tile without inf and NaN, whose squares float32 can hold: see
    :func:`_careful_moments`."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    mean = float_sum / PER_THREAD
    deviation = x - mean[None, :, None]
    deviation_sum = _sum(deviation).to(tl.float64)
    wide_mean = mean.to(tl.float64)
    sum_here = PER_THREAD * wide_mean + deviation_sum
    return (
        tl.full([x.shape[1]], PER_THREAD, tl.int32),
        _sum(tl.minimum(magnitude, 1)),
        sum_here,
        (sum_here + deviation_sum) * wide_mean + _sum(deviation * deviation),
        _sum(tl.abs(x)).to(tl.float64),
        _max(_from_above(magnitude)),
    )


@_jit
def _careful_moments(x: tl.tensor) -> tuple[tl.tensor, ...]:
    """Moments of any tile, for each thread: the counts of finite elements and of those other than 0, the sum, the sum
    of squares, that of magnitudes, the smallest magnitude :func:`_from_above`; the maximum, and the negated minimum."""
    finite = _is_finite(x)
    magnitude = tl.where(finite, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    count = _sum(finite.to(tl.int32))
    maximum = _max(tl.where(finite, x, float("-inf")))
    negated_min = _max(tl.where(finite, -x, float("-inf")))
    down, up = _powers(tl.maximum(maximum, negated_min))
    scaled = tl.where(finite, x, 0.0) * down[None, :, None]
    mean = _sum(scaled) / tl.maximum(count, 1).to(tl.float32)
    deviation = tl.where(finite, scaled - mean[None, :, None], 0.0)
    deviation_sum = _sum(deviation).to(tl.float64)
    wide_mean = mean.to(tl.float64)
    sum_here = count * wide_mean + deviation_sum
    return (
        count,
        _sum(tl.minimum(magnitude, 1)),
        sum_here * up,
        ((sum_here + deviation_sum) * wide_mean + _sum(deviation * deviation)) * (up * up),
        _sum(tl.abs(scaled)) * up,
        _max(_from_above(magnitude)),
        maximum,
        negated_min,
    )


@_jit
def _from_above(magnitude: tl.tensor) -> tl.tensor:
    """2^32 minus the bits of a magnitude, the larger the smaller it is; 0 for 0."""
    return (-magnitude).to(tl.uint32, bitcast=True)


@_jit
def _is_finite(x: tl.tensor) -> tl.tensor:
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@_jit
def _powers(largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A power of two that brings this magnitude to between 1 and 4, in float32, and its inverse, in float64.

    A subnormal magnitude is brought to 2^-22 or more. One that is not finite, or is below 0, gets some power.
    """
    exponent = tl.minimum(tl.maximum(254 - (largest.to(tl.int32, bitcast=True) >> 23), 1), 254)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    up = ((1150 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return down, up


@_jit
def _sum(tile: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(tile, 2), 0)


@_jit
def _max(tile: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(tile, 2), 0)


@_jit
def _total(column: tl.tensor) -> tl.tensor:
    return tl.sum(column.to(tl.float64), 0)
