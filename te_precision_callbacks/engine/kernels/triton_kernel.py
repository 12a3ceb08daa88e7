"""Columns of :mod:`~te_precision_callbacks.engine.kernels.columns` from one pass over a tensor, in Triton.

Usage::

    from te_precision_callbacks.engine.kernels import triton_kernel

    pending = [Pending(gradient, codes, scale_inv, True, places)]
    for group in triton_kernel.group_by_launch(pending):
        triton_kernel.add_group(pending, group, sums, maxima)

Runs on a GPU, and on CPU tensors if ``TRITON_INTERPRET=1`` was set before triton was imported. The host never waits for
the device.

See :mod:`~te_precision_callbacks.engine.kernels.triton_parts` for error bounds.
"""

# Triton has no types, so its functions are annotated only where it reads this: constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    MAXIMA,
    MOMENT_SUMS,
    ROUNDING,
    SCALE_MAXIMA,
    SCALE_SUMS,
    UNBLOCKED,
    ColumnPlaces,
    Pending,
)
from te_precision_callbacks.engine.kernels.triton_parts import (
    BYTES_PER_LOAD,
    CODE_FORMATS,
    FORMATS,
    MOST_TOGETHER,
    PROGRAM_THREADS,
    THREADS,
    WARPS,
    Jit,
    Launcher,
    add_exponents,
    are_plain,
    careful_moments,
    comparison,
    converts_fp8,
    decode,
    decode_codes,
    exponent_counts,
    grid_of,
    is_exact,
    is_last,
    kept_scratch,
    launcher_of,
    loadable,
    merge_at,
    merge_rows,
    nowhere,
    placed,
    plain_comparison,
    plain_moments,
    program_count,
    report_binder,
    scratch,
    select,
    store_comparison,
    store_extremes,
    store_moments,
    thread_sum,
    total_of,
)

# Of a tile, per thread: enough loads in flight to hide the memory latency, but few enough elements for _REGISTERS.
_MOST_LOADS = 2
_MOST_ELEMENTS = 16
_REGISTERS = 64
"""Maximum per thread; more are needed only outside of the loop over whole tiles."""

# Arguments that differ between tensors. If specialized, Triton would compile separate kernels.
_GENERAL = [
    *(f"scale_inv{tensor or ''}" for tensor in range(MOST_TOGETHER)),
    *("merged_sums", "merged_maxima"),
    *("begin1", "begin2", "begin3"),
    *(f"{name}{tensor}" for tensor, name in itertools.product(range(MOST_TOGETHER), ColumnPlaces._fields[:UNBLOCKED])),
]

_jit: Jit = triton.jit(do_not_specialize=_GENERAL)

_Key = tuple[torch.device, torch.dtype, bool]
"""Device and dtype of tensors that can share a launch, and whether they have a histogram."""


class GroupLaunch(NamedTuple):
    """A launch without Triton's binder.

    Attributes:
        launcher: see :func:`launcher_of`.
        tensors: selects :data:`MOST_TOGETHER` tensors; unused ones repeat the first.
        quantized: selects the tensors whose codes and scales are passed; without codes, that of another.
        used: number of tensors.
        tile: elements.
        most: maximum number of programs of a tensor.
        size: of the partial results, at most.
        arguments: the arguments after the first programs: columns, geometry and constants.
    """

    launcher: Launcher
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    quantized: Callable[[Sequence[Any]], tuple[Any, ...]]
    used: int
    tile: int
    most: int
    size: int
    arguments: Sequence[Any]


def group_by_launch(pending: Sequence[Pending]) -> list[list[int]]:
    """Group tensors, by their indices: up to :data:`MOST_TOGETHER` similar dense tensors share a launch.

    Args:
        pending: the values are float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; copied if they are not dense.
            A quantized value is the decoded code times ``scale_inv``, in float32. An element overflows above the
            format's largest number (E4M3 448, E5M2 57344) times ``scale_inv`` and ROUNDING.
    """
    groups: list[tuple[_Key | None, list[int]]] = []
    for index, tensor in enumerate(pending):
        key = _shared_launch(tensor)
        for other, group in groups:
            can_share = key is not None and key == other and len(group) < MOST_TOGETHER
            if can_share and not any(_conflict(tensor, pending[shared]) for shared in group):
                group.append(index)
                break
        else:
            groups.append((key, [index]))
    return [group for _, group in groups]


def _conflict(tensor: Pending, other: Pending) -> bool:
    if tensor.codes is not None and other.codes is not None and tensor.e5m2 != other.e5m2:
        return True
    return any(offset == other_offset >= 0 for offset, other_offset in zip(tensor.places, other.places, strict=True))


def _flat(tensor: Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values and codes in one dimension, in the same order; copied if that needs it."""
    values = tensor.values.detach()
    codes = tensor.codes
    if codes is None:
        return eager.flatten(values).contiguous(), None  # in the order of the memory
    if codes.stride() == values.stride():
        return eager.flatten(values).contiguous(), eager.flatten(codes).contiguous()
    return values.contiguous().view(-1), codes.contiguous().view(-1)


def _shared_launch(tensor: Pending) -> _Key | None:
    """Return a key that is equal for tensors that can share a launch; None for a tensor that cannot.

    The key and the format of their codes determine the compiled kernel: all that Triton specializes on depends on
    nothing else.
    """
    values, codes = _flat(tensor)
    if values.numel() % 16 or not 0 < values.numel() < 2**31 or values.data_ptr() % 16:
        return None
    if codes is not None and codes.data_ptr() % 16:
        return None
    return values.device, values.dtype, tensor.places.exponents >= 0


def _constants(example: Pending, is_aligned: bool) -> dict[str, Any]:
    """Return the constants of the kernel for a group: for a tensor with codes, if there is one."""
    has_codes = example.codes is not None
    name, _, not_finite = FORMATS[example.values.dtype]
    code_name, largest = CODE_FORMATS[example.e5m2]
    vector = BYTES_PER_LOAD // example.values.element_size()
    rows = min(_MOST_LOADS, _MOST_ELEMENTS // vector)
    columns = len(MOMENT_SUMS)
    extremes = len(MAXIMA)
    if has_codes:
        columns += len((*COMPARISON_SUMS, *SCALE_SUMS))
        extremes += len(SCALE_MAXIMA)
    return {
        "FORMAT": name,
        "NOT_FINITE": not_finite,
        "CODES": code_name if has_codes else "",
        "LARGEST": largest * ROUNDING,
        "HISTOGRAM": example.places.exponents >= 0,
        "CONVERTS": has_codes and converts_fp8(example.values.device),
        "ALIGNED": is_aligned,
        "ROWS": rows,
        "PER_THREAD": rows * vector,
        "VECTOR": vector,
        "COLUMNS": columns,
        "EXTREMES": extremes,
        "num_warps": WARPS,
        "maxnreg": _REGISTERS,
        # An FMA would not round the product of code and scale before subtracting it, and a tensor has the same bits in
        # a launch with codes and without.
        "enable_fp_fusion": False,
    }


def add_group(
    pending: Sequence[Pending], group: list[int], sums: torch.Tensor, maxima: torch.Tensor
) -> GroupLaunch | None:
    """Measure a group of :func:`group_by_launch` in one launch, with quantized values if any, and merge the results.

    The result is bit-identical for the same tensors, strides and device, in any grouping. A quantized value of inf or
    NaN makes ``error_square_sum`` inf or NaN, unless the element before quantization is not finite either.

    Args:
        sums, maxima: float64, 1-D, on the device of the tensors.

    Returns:
        How the launch is repeated for other tensors; None if it needs Triton's binder.
    """
    first = pending[group[0]]
    if first.values.numel() == 0:
        return None
    device = first.values.device
    is_aligned = _shared_launch(first) is not None
    most = program_count(device)
    padded = [*group, *group[:1] * (MOST_TOGETHER - len(group))]
    example_index = next((index for index in group if pending[index].codes is not None), group[0])
    # The kernel does not read these codes for a tensor without codes.
    quantized = [example_index if pending[index].codes is None else index for index in padded]
    constants = _constants(pending[example_index], is_aligned)
    tile = constants["PER_THREAD"] * PROGRAM_THREADS
    row = constants["COLUMNS"] + constants["EXTREMES"]
    sizes = tuple(pending[index].values.numel() for index in padded)
    programs, begins = grid_of(sizes[: len(group)], tile, most, MOST_TOGETHER)
    columns = [column for index in padded for column in pending[index].places[:UNBLOCKED]]
    with torch.cuda.device(first.values.get_device()):
        memory = *scratch(device, programs * row), sums, maxima
        elements = [loadable(_flat(pending[index])[0])[0] for index in padded]
        codes = [_flat(pending[index])[1] for index in quantized]
        scales = [pending[index].scale_inv for index in quantized]
        compiled = _measure[(programs,)](*elements, *codes, *scales, *memory, *sizes, *begins, *columns, **constants)
    launcher = launcher_of(compiled)
    if launcher is None or not is_aligned:
        return None
    arguments = [*columns, *[constants[name] for name in _measure.arg_names if name in constants]]
    select_tensors = operator.itemgetter(*padded)
    select_quantized = operator.itemgetter(*quantized)
    size = most * MOST_TOGETHER * row
    return GroupLaunch(launcher, select_tensors, select_quantized, len(group), tile, most, size, arguments)


def repeat(
    launches: Sequence[GroupLaunch], pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor, stream: int
) -> Sequence[Pending]:
    """Repeat launches for tensors that may differ in their sizes; return the tensors that are left.

    Args:
        stream: the handle of the current stream.
    """
    sizes: list[int] = []
    values_at: list[int] = []
    codes_at: list[int | None] = []
    scales_at: list[int | None] = []
    for tensor in pending:
        values = tensor.values
        codes = tensor.codes
        scale_inv = tensor.scale_inv
        size = values.numel()
        address = values.data_ptr()
        if size % 16 or not 0 < size < 2**31 or address % 16 or not values.is_contiguous():
            return pending
        sizes.append(size)
        values_at.append(address)
        if codes is None or scale_inv is None:
            codes_at.append(None)
            scales_at.append(None)
            continue
        address = codes.data_ptr()
        if address % 16 or codes.numel() != size or not codes.is_contiguous():
            return pending
        codes_at.append(address)
        scales_at.append(scale_inv.data_ptr())
    device = sums.get_device()
    if device >= 0 and (torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing()):
        return pending
    for done, launch in enumerate(launches):
        (run, settings), select_tensors, select_quantized, used, tile, most, size, arguments = launch
        memory = kept_scratch.get((max(device, 0), stream))
        if memory is None or memory[0].numel() < size:
            memory = scratch(sums.device, size)
        memory_at = memory[0].data_ptr(), memory[1].data_ptr(), sums.data_ptr(), maxima.data_ptr()
        launch_sizes = select_tensors(sizes)
        programs, begins = grid_of(launch_sizes[:used], tile, most, MOST_TOGETHER)
        quantized_at = *select_quantized(codes_at), *select_quantized(scales_at)
        kernel_arguments = *select_tensors(values_at), *quantized_at, *memory_at, *launch_sizes, *begins, *arguments
        try:
            run(programs, 1, 1, stream, *settings, kernel_arguments)
        except Exception as error:
            report_binder(error)
            unmeasured = set[int]().union(*(missed.tensors(range(len(pending))) for missed in launches[done:]))
            return [tensor for index, tensor in enumerate(pending) if index in unmeasured]
    return ()


@_jit
def _measure(
    # Up to four tensors. Unused arguments repeat the first tensor, and no program reads them. All pointers come first.
    values,
    values1,
    values2,
    values3,
    codes,
    codes1,
    codes2,
    codes3,
    scale_inv,
    scale_inv1,
    scale_inv2,
    scale_inv3,
    partials,
    counters,  # one per tensor, 0
    merged_sums,
    merged_maxima,
    numel,
    numel1,
    numel2,
    numel3,
    # First programs of the second, third and fourth tensor.
    begin1,
    begin2,
    begin3,
    # Offsets of each tensor's columns.
    moments0,
    maxima0,
    compared0,
    scales0,
    scale_maxima0,
    exponents0,
    moments1,
    maxima1,
    compared1,
    scales1,
    scale_maxima1,
    exponents1,
    moments2,
    maxima2,
    compared2,
    scales2,
    scale_maxima2,
    exponents2,
    moments3,
    maxima3,
    compared3,
    scales3,
    scale_maxima3,
    exponents3,
    FORMAT: constexpr,
    NOT_FINITE: constexpr,
    CODES: constexpr,  # format of the tensors that are compared with their codes; "" if none is
    LARGEST: constexpr,
    HISTOGRAM: constexpr,
    CONVERTS: constexpr,  # the GPU converts FP8
    ALIGNED: constexpr,  # sizes and addresses are multiples of 16, as of all tensors that share a launch
    ROWS: constexpr,
    PER_THREAD: constexpr,  # ROWS * VECTOR
    VECTOR: constexpr,
    COLUMNS: constexpr,
    EXTREMES: constexpr,
):
    """Measure tensors, and merge their columns into ``merged_sums`` and ``merged_maxima``.

    A program reads tiles of [ROWS, THREADS, VECTOR] elements and reduces each to [THREADS] in registers; threads are
    combined only at its end, into row ``program_id`` of ``partials``: ``COLUMNS`` sums and counts, then ``EXTREMES``
    maxima. Whole tiles are read as if their elements were usual; a program where this does not hold reads them again.
    The last program of a tensor merges its rows.
    """
    program = tl.program_id(0)
    which = (program >= begin1).to(tl.int32) + (program >= begin2).to(tl.int32) + (program >= begin3).to(tl.int32)
    begin = select(which, 0, begin1, begin2, begin3)
    programs = select(which, begin1, begin2, begin3, tl.num_programs(0)) - begin
    program -= begin
    values = select(which, values, values1, values2, values3)
    numel = select(which, numel, numel1, numel2, numel3)
    if CODES != "":
        codes = select(which, codes, codes1, codes2, codes3)
        scale_inv = select(which, scale_inv, scale_inv1, scale_inv2, scale_inv3)
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        numel = tl.multiple_of(numel, 16)
        if CODES != "":
            codes = tl.multiple_of(codes, 16)

    run: constexpr = THREADS * VECTOR
    tile: constexpr = ROWS * run
    lane = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    first_tile = program.to(tl.int64) * tile
    stride = programs.to(tl.int64) * tile

    # int32 suffices for a thread's counts: 2^31 elements per thread would be 2^38 per program.
    zero = tl.full([THREADS], 0, tl.int32)
    zero_sum = tl.full([THREADS], 0, tl.float64)
    no_maximum = tl.full([THREADS], float("-inf"), tl.float32)
    finite_count = zero
    nonzero_count = zero
    total = zero_sum
    square_sum = zero_sum
    abs_sum = zero_sum
    maximum = no_maximum
    negated_min = no_maximum
    above_zero = zero.to(tl.uint32)
    underflow_count = zero
    overflow_count = zero
    error_square_sum = zero_sum
    underflow_square_sum = zero_sum
    no_exponents = tl.full([256], 0, tl.int64)
    histogram = no_exponents
    compares = select(which, compared0, compared1, compared2, compared3) >= 0
    if CODES != "":
        scale = tl.load(scale_inv)
        largest = scale * LARGEST

    # Whole tiles, as if all their elements were finite, and their squares in float32's range.
    no_tile = tl.full([], 0, tl.int32)
    whole = no_tile
    element = (tl.arange(0, ROWS) * run)[:, None, None] + lane[None, :, :]
    # A scalar would do, but for the interpreter of Triton 3.9.
    has_codes = tl.full(element.shape, 1, tl.int1) & compares
    for first in range(first_tile, numel.to(tl.int64) - (tile - 1), stride):
        loaded = tl.load(values + first + element)
        if CODES != "":
            loaded_codes = tl.load(codes + first + element, mask=has_codes, other=0)
        x = decode(loaded, FORMAT)
        nonzero, sum_, squares, magnitudes, above, high, low = plain_moments(x, PER_THREAD)
        nonzero_count += nonzero
        total += sum_
        square_sum += squares
        abs_sum += magnitudes
        maximum = tl.maximum(maximum, high)
        negated_min = tl.maximum(negated_min, low)
        above_zero = tl.maximum(above_zero, above)
        if CODES != "":  # noqa: SIM102 - decided when Triton compiles
            if compares:
                y = decode_codes(loaded_codes, CODES, CONVERTS) * scale
                underflows, overflows, squared_error, squared_loss = plain_comparison(x, y, largest)
                underflow_count += underflows
                overflow_count += overflows
                error_square_sum += squared_error
                underflow_square_sum += squared_loss
        if HISTOGRAM:
            histogram += exponent_counts(x, tile)
        whole += 1
    holds = are_plain(maximum, negated_min, abs_sum)
    if CODES != "":
        has_errors = compares & (tl.max(tl.maximum(maximum, negated_min), 0) != 0.0)
        holds &= is_exact(error_square_sum, has_errors)
        holds &= is_exact(underflow_square_sum, tl.max(underflow_count, 0) > 0)
    with_care = ~holds
    if with_care:  # all tiles are read again
        whole = no_tile
        nonzero_count = zero
        total = zero_sum
        square_sum = zero_sum
        abs_sum = zero_sum
        maximum = no_maximum
        negated_min = no_maximum
        above_zero = zero.to(tl.uint32)
        underflow_count = zero
        overflow_count = zero
        error_square_sum = zero_sum
        underflow_square_sum = zero_sum
        histogram = no_exponents
    finite_count += whole * PER_THREAD
    seen = whole.to(tl.int64) * tile

    # One row at a time needs few registers, which decide how many programs a processor runs at once.
    # The bounds of a loop must not depend on what was measured, or Triton loads single elements.
    for tile_begin in range(first_tile, numel, stride):
        if with_care | (numel - tile_begin < tile):
            for part in range(ROWS):
                first = tile_begin + part * run
                seen += tl.maximum(tl.minimum(numel - first, run), 0)
                # Elements beyond the end load as non-finite, so that they are excluded like inf and NaN.
                offset = first + lane  # with a third dimension, the loads are of single elements
                x = decode(tl.load(values + offset, mask=offset < numel, other=NOT_FINITE), FORMAT)[None, :, :]
                count, nonzero, sum_, squares, magnitudes, above, high, low = careful_moments(x)
                finite_count += count
                nonzero_count += nonzero
                total += sum_
                square_sum += squares
                abs_sum += magnitudes
                maximum = tl.maximum(maximum, high)
                negated_min = tl.maximum(negated_min, low)
                above_zero = tl.maximum(above_zero, above)

                if CODES != "":
                    loaded = tl.load(codes + offset, mask=offset < tl.where(compares, numel, 0), other=0)[None, :, :]
                    y = decode_codes(loaded, CODES, CONVERTS) * scale
                    underflows, overflows, squared_error, squared_loss = comparison(x, y, largest)
                    underflow_count += thread_sum(underflows)
                    overflow_count += thread_sum(overflows)
                    error_square_sum += squared_error
                    underflow_square_sum += squared_loss

                if HISTOGRAM:
                    histogram += exponent_counts(x, run)

    # In the order of the module columns.
    sums = partials + tl.program_id(0).to(tl.int64) * (COLUMNS + EXTREMES)
    maxima = sums + COLUMNS
    finite_total = total_of(finite_count)
    square_total = total_of(square_sum)
    store_moments(sums, finite_total, seen, nonzero_count, total, square_total, abs_sum)
    store_extremes(maxima, maximum, negated_min, above_zero)
    if CODES != "":
        store_comparison(
            sums + 6,
            finite_total,
            underflow_count,
            overflow_count,
            error_square_sum,
            square_total,
            underflow_square_sum,
        )
        # All programs of a tensor have the same scale; only the first counts it.
        counted = (program == 0) & (scale >= 0.0) & (scale < float("inf"))
        wide = tl.where(counted, scale, 0.0).to(tl.float64)
        tl.store(sums + 12, counted.to(tl.float64))
        tl.store(sums + 13, wide)
        tl.store(sums + 14, wide * wide)
        tl.store(maxima + 3, tl.where(counted, wide, float("-inf")))
        tl.store(maxima + 4, tl.where(counted, -wide, float("-inf")))
    if HISTOGRAM:
        add_exponents(merged_sums, select(which, exponents0, exponents1, exponents2, exponents3), histogram)

    if is_last(counters + which, programs):
        summed, highest = merge_rows(partials, begin, begin + programs, COLUMNS, EXTREMES)
        sums_at = placed(nowhere(), select(which, moments0, moments1, moments2, moments3), 0, 6)
        maxima_at = placed(nowhere(), select(which, maxima0, maxima1, maxima2, maxima3), COLUMNS, 3)
        if CODES != "":
            sums_at = placed(sums_at, select(which, compared0, compared1, compared2, compared3), 6, 6)
            sums_at = placed(sums_at, select(which, scales0, scales1, scales2, scales3), 12, 3)
            scales_at = select(which, scale_maxima0, scale_maxima1, scale_maxima2, scale_maxima3)
            maxima_at = placed(maxima_at, scales_at, COLUMNS + 3, 2)
        merge_at(merged_sums, sums_at, summed, merged_maxima, maxima_at, highest)
