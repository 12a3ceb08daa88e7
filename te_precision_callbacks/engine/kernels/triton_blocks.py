"""Columns of a tensor and its block-scaled form, from one pass in Triton.

    triton_blocks.add(pending, sums, maxima)    # a Pending with in_blocks

Codes and scales are read as stored: two FP4 codes per byte, scales padded or swizzled for a GEMM, codes of the
transpose. Counts and extremes are exact; sums have the error bounds of
:mod:`~te_precision_callbacks.engine.kernels.triton_parts`. Scales and dynamic ranges of blocks are computed and added
in float64.

A program reads tiles of 16 x 128 elements of the codes' matrix, or several stacked tiles if a block is higher. Each
thread has 16 elements of a tile. A block is reduced in each thread, then among its threads. All of them get the result,
and totals use only the first thread's. (Triton up to 3.6 sums a result shared by several threads from the wrong
threads.)
"""

# Triton has no types, so its functions are annotated only where it reads this: constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from te_precision_callbacks.base.devices import raw_stream_of
from te_precision_callbacks.base.numerics.layouts import SWIZZLE_ROWS
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    LIMIT_SUMS,
    LOSS_MAXIMA,
    LOSS_SUMS,
    MAXIMA,
    MOMENT_SUMS,
    RANGE_MAXIMA,
    RANGE_SUMS,
    ROUNDING,
    SCALE_MAXIMA,
    SCALE_SUMS,
    ColumnPlaces,
    Pending,
)
from te_precision_callbacks.engine.kernels.triton_parts import (
    BYTES_PER_LOAD,
    PROGRAM_THREADS,
    THREADS,
    WARPS,
    Jit,
    Launcher,
    add_exponents,
    comparison,
    decode,
    exponent_counts,
    from_above,
    is_finite,
    is_last,
    jit,
    launcher_of,
    loadable,
    magnitude_of,
    merge_at,
    merge_rows,
    nowhere,
    placed,
    program_count,
    report_binder,
    scratch,
    store_comparison,
    store_extremes,
    store_maximum,
    store_moments,
    store_sum,
    thread_sum,
    tile_moments,
    total_of,
)

_COLUMNS = len((*MOMENT_SUMS, *COMPARISON_SUMS, *SCALE_SUMS, *LIMIT_SUMS, *LOSS_SUMS, *RANGE_SUMS))
_EXTREMES = len((*MAXIMA, *SCALE_MAXIMA, *LOSS_MAXIMA, *RANGE_MAXIMA))
"""Columns of a program's row of results, in this order."""

_TILE_ROWS = 16
_TILE_COLUMNS = 128
_COLUMN_VECTOR = 4
_PER_THREAD = _TILE_ROWS * _TILE_COLUMNS // PROGRAM_THREADS

_GENERAL = [
    *("tiles", "tiles_across", "tile_stride"),
    *(f"{name}_at" for name in ColumnPlaces._fields),
]
_jit: Jit = triton.jit(do_not_specialize=_GENERAL)

_known: dict[tuple[object, ...], tuple[Launcher, Sequence[Any]]] = {}
"""All arguments of a launch but addresses -> how to repeat it, and the arguments after the addresses."""


def add(pending: Pending, sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """Measure a tensor and its block-scaled form, and merge the results, in one launch.

    The result is bit-identical for the same tensors, strides and device. Quantized values and overflows are defined as
    in :func:`te_precision_callbacks.engine.kernels.eager_blocks.columns`.

    Args:
        pending: the values are float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; copied if their strides are
            not a matrix's.
        sums, maxima: float64, 1-D, on the device of the tensor.
    """
    values = pending.values.detach()
    quantized = pending.in_blocks
    if quantized is None:
        raise ValueError("in_blocks: must be given.")
    matrix = quantized.matrix(values)
    if not matrix.numel():
        return
    # Follow the memory order of the tensor, which is larger than its codes. A transposed tensor has them in columns.
    turned = matrix.stride(0) == 1 != matrix.stride(1)
    matrix = matrix.t() if turned else matrix
    height, width = _turned(quantized.block, turned)
    tile_rows = max(_TILE_ROWS, height)
    rows, columns = matrix.shape
    across = -(-columns // _TILE_COLUMNS)
    tiles = -(-rows // tile_rows) * across
    programs = min(program_count(values.device), tiles)
    offsets = pending.places
    matrix, decoding = loadable(matrix)
    part = quantized.part
    memory = part.scale_memory
    compares = offsets.compared >= 0 or offsets.losses >= 0
    scales = memory.matrix.contiguous() if memory.swizzled else memory.matrix
    tensors = matrix, part.codes if compares else None, scales, part.amax
    numbers = [
        *offsets,
        rows,
        columns,
        *matrix.stride(),
        *_turned(part.codes.stride(), turned),
        *_turned(memory.matrix.stride(), turned),
        memory.matrix.shape[1] * SWIZZLE_ROWS,
        0 if part.amax is None or part.amax.numel() == 1 else 1,
        tiles,
        across,
    ]
    low, high = quantized.limits
    down, along = _turned(quantized.stored_again, turned)
    constants = {
        "CODES": part.element_format.name.lower() if compares else "",
        "LARGEST": part.element_format.max * ROUNDING,
        "SCALES": "float32" if part.scale_format is None else part.scale_format.name.lower(),
        "SWIZZLED": memory.swizzled,
        "SWIZZLED_TURNED": memory.transposed != turned,
        "AMAX_FACTOR": 0.0 if part.largest_scale is None else 1.0 / (part.element_format.max * part.largest_scale),
        "LOW": low,
        "HIGH": high,
        "DOWN": down,
        "ALONG": along,
        **decoding,
        "num_warps": WARPS,
        **_threads(width, height, matrix.element_size()),
        "MOMENTS": max(offsets.moments, offsets.maxima) >= 0,
        "LOSSES": max(offsets.losses, offsets.loss_maxima) >= 0,
        "LIMITS": offsets.limits >= 0,
        "SCALE_SOURCES": offsets.scales >= 0,
        "RANGES": offsets.ranges >= 0,
        "EXPONENTS": offsets.exponents >= 0,
        "STEPS": tile_rows // _TILE_ROWS,
        "TURNED": turned,
        "HEIGHT": height,
        "WIDTH": width,
        "COLUMNS": _COLUMNS,
        "EXTREMES": _EXTREMES,
        # An FMA would not round the product of code and scale before subtracting it.
        "enable_fp_fusion": False,
    }
    with torch.cuda.device(values.get_device()):
        results = *scratch(values.device, programs * (_COLUMNS + _EXTREMES)), sums, maxima
        _launch(programs, values.device, [*tensors, *results], numbers, constants)


def _threads(width: int, height: int, element_size: int) -> dict[str, int]:
    """Divide a tile among the threads of a program, for blocks of a width and a height."""
    vector = BYTES_PER_LOAD // element_size
    if width == 1:  # each column of a thread is in another block
        vector = min(vector, _COLUMN_VECTOR)
    parts = 1
    if height == 1:
        parts = _PER_THREAD // vector
    elif width == 1:
        parts = vector
    return {
        "ROWS": _PER_THREAD // vector,
        "VECTOR": vector,
        "LANE_ROWS": _TILE_ROWS * vector // _PER_THREAD,
        "GROUP": max(1, width // vector),  # threads of a tile's row that share a block
        "PARTS": PROGRAM_THREADS * parts,
    }


def _launch(
    programs: int,
    device: torch.device,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[int],
    constants: Mapping[str, Any],
) -> None:
    """Launch the kernel, without Triton's binder if it has been launched with such arguments before."""
    addresses: list[int | None] = []
    specialized: list[object] = []
    for tensor in tensors:
        address = None if tensor is None else tensor.data_ptr()
        addresses.append(address)
        specialized += [None] if tensor is None or address is None else [tensor.dtype, address % 16 == 0]
    key = (device, *specialized, *numbers, *constants.values())
    prepared = _known.get(key)
    if prepared is not None:
        (launch, settings), rest = prepared
        try:
            launch(programs, 1, 1, raw_stream_of(device)(), *settings, (*addresses, *rest))
            return
        except Exception as error:
            _known.clear()
            report_binder(error)
    launcher = launcher_of(_measure[(programs,)](*tensors, *numbers, **constants))
    if launcher is not None:
        _known[key] = launcher, [*numbers, *[constants[name] for name in _measure.arg_names if name in constants]]


def _turned(pair: Sequence[int], turned: bool) -> Sequence[int]:
    return pair[::-1] if turned else pair


@_jit
def _measure(
    values,
    codes,
    scales,
    amax,
    partials,
    counters,  # the first one is 0
    merged_sums,
    merged_maxima,
    moments_at,
    maxima_at,
    compared_at,
    scales_at,
    scale_maxima_at,
    exponents_at,
    limits_at,
    losses_at,
    ranges_at,
    loss_maxima_at,
    range_maxima_at,
    row_count,
    column_count,
    row_stride,
    column_stride,
    code_row_stride,
    code_column_stride,
    scale_row_stride,
    scale_column_stride,
    tile_stride,  # stride between rows of swizzled tiles
    amax_stride,
    tiles,
    tiles_across,
    CODES: constexpr,  # "" if unread
    LARGEST: constexpr,
    SCALES: constexpr,
    SWIZZLED: constexpr,
    SWIZZLED_TURNED: constexpr,  # of the transpose
    AMAX_FACTOR: constexpr,  # 0 without amax
    LOW: constexpr,  # the limits of stored scales
    HIGH: constexpr,
    HEIGHT: constexpr,  # rows and columns of a block
    WIDTH: constexpr,
    DOWN: constexpr,  # stored scales per block, in rows and columns
    ALONG: constexpr,
    FORMAT: constexpr,
    NOT_FINITE: constexpr,
    MOMENTS: constexpr,  # wanted kinds
    LOSSES: constexpr,
    LIMITS: constexpr,
    SCALE_SOURCES: constexpr,
    RANGES: constexpr,
    EXPONENTS: constexpr,
    STEPS: constexpr,
    TURNED: constexpr,  # rows here are columns of the codes in memory
    ROWS: constexpr,
    VECTOR: constexpr,
    LANE_ROWS: constexpr,
    GROUP: constexpr,
    PARTS: constexpr,  # results per thread and block
    COLUMNS: constexpr,
    EXTREMES: constexpr,
):
    """Measure a matrix, and merge its columns into ``merged_sums`` and ``merged_maxima``.

    A program writes row ``program_id`` of ``partials``: ``COLUMNS`` sums and counts, then ``EXTREMES`` maxima. The last
    one merges the rows.

    A step has [ROWS, THREADS, VECTOR] elements: a thread has VECTOR columns of ROWS rows, which are LANE_ROWS apart.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tile_rows: constexpr = ROWS * LANE_ROWS
    lane_columns: constexpr = THREADS // LANE_ROWS
    tile_columns: constexpr = lane_columns * VECTOR
    elements: constexpr = ROWS * THREADS * VECTOR

    thread = tl.arange(0, THREADS)
    row_in_tile = (tl.arange(0, ROWS) * LANE_ROWS)[:, None, None] + (thread // lane_columns)[None, :, None]
    first_column = (thread % lane_columns * VECTOR)[None, :, None]

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
    seen = tl.full([], 0, tl.int64)

    zero = tl.full([PARTS], 0, tl.int32)
    zero_sum = tl.full([PARTS], 0, tl.float64)
    no_maximum = tl.full([PARTS], float("-inf"), tl.float32)
    block_count = zero
    zero_count = zero
    saturated_count = zero
    flushed_count = zero
    scale_count = zero
    scale_sum = zero_sum
    scale_square_sum = zero_sum
    scale_max = no_maximum
    negated_scale_min = no_maximum
    underflow_blocks = zero
    overflow_blocks = zero
    worst = zero
    worst_of = tl.full([PARTS], 1, tl.int32)
    range_count = zero
    range_sum = zero_sum
    range_max = no_maximum.to(tl.float64)
    negated_range_min = no_maximum.to(tl.float64)
    leads = _is_first_of_block(PARTS, HEIGHT, LANE_ROWS, GROUP)
    exponents = tl.full([256], 0, tl.int32)

    for tile in range(program, tiles, programs):
        top = tile // tiles_across * (tile_rows * STEPS)
        first_tile_column = tile % tiles_across * tile_columns
        column = first_tile_column + first_column + tl.arange(0, VECTOR)[None, None, :]

        # The scale of each element's block, equal for the elements of a thread's row.
        block_row = (top + row_in_tile) if HEIGHT == 1 else (top + first_column * 0)
        block_column = column if WIDTH == 1 else (first_tile_column + first_column)
        has_scale = (block_row < row_count) & (block_column < column_count)
        scale_row = block_row // HEIGHT * DOWN
        scale_column = block_column // WIDTH * ALONG
        if SWIZZLED:
            if SWIZZLED_TURNED:
                scale_at = _swizzled(scale_column, scale_row, tile_stride)
            else:
                scale_at = _swizzled(scale_row, scale_column, tile_stride)
        else:
            scale_at = _offset(scale_row, scale_column, scale_row_stride, scale_column_stride)
        stored = decode(tl.load(scales + scale_at, mask=has_scale, other=0), SCALES)
        factor = stored
        if AMAX_FACTOR > 0:
            amax_row = scale_column if TURNED else scale_row
            row_amax = tl.load(amax + amax_row.to(tl.int64) * amax_stride, mask=has_scale, other=0.0)
            factor = stored * row_amax * AMAX_FACTOR
        largest = tl.where(factor == 0.0, float("inf"), factor * LARGEST)

        # Per block and thread, the inputs of the columns.
        nothing = _nothing(HEIGHT, WIDTH, ROWS, VECTOR)
        inside = nothing
        finite_here = nothing
        underflows_here = nothing
        overflows_here = nothing
        largest_here = nothing
        above_here = nothing.to(tl.uint32)
        for first_row in range(top, tl.minimum(top + tile_rows * STEPS, row_count), tile_rows):
            seen += tl.minimum(row_count - first_row, tile_rows) * tl.minimum(
                column_count - first_tile_column, tile_columns
            )
            row = first_row + row_in_tile
            mask = (row < row_count) & (column < column_count)
            offset = _offset(row, column, row_stride, column_stride)
            # Elements beyond the end load as non-finite, so that they are excluded like inf and NaN.
            x = decode(tl.load(values + offset, mask=mask, other=NOT_FINITE), FORMAT)
            count, nonzero, sum_, squares, magnitudes, above, high, low = tile_moments(x, ROWS * VECTOR)
            finite_count += count
            nonzero_count += nonzero
            total += sum_
            square_sum += squares
            abs_sum += magnitudes
            maximum = tl.maximum(maximum, high)
            negated_min = tl.maximum(negated_min, low)
            above_zero = tl.maximum(above_zero, above)
            if EXPONENTS:
                exponents += exponent_counts(x, elements)

            if CODES != "":
                if CODES == "e2m1" and TURNED:
                    code_at = _offset(row // 2, column, code_row_stride, code_column_stride)
                    code = tl.load(codes + code_at, mask=mask, other=0).to(tl.int32) >> (row % 2 * 4)
                elif CODES == "e2m1":
                    byte = (first_tile_column + first_column) // 2 + tl.arange(0, VECTOR // 2)[None, None, :]
                    code_at = _offset(row, byte, code_row_stride, code_column_stride)
                    pair = tl.load(codes + code_at, mask=(row < row_count) & (byte * 2 < column_count), other=0)
                    code = tl.reshape(tl.join(pair & 0xF, pair >> 4), [ROWS, THREADS, VECTOR])
                else:
                    code_at = _offset(row, column, code_row_stride, code_column_stride)
                    code = tl.load(codes + code_at, mask=mask, other=0)
                y = decode(code, CODES) * factor
                underflows, overflows, squared_error, squared_loss = comparison(x, y, largest)
                underflow_count += thread_sum(underflows)
                overflow_count += thread_sum(overflows)
                error_square_sum += squared_error
                underflow_square_sum += squared_loss
                if LOSSES:
                    finite_here += _in_thread(is_finite(x).to(tl.int32), False, HEIGHT, WIDTH)
                    underflows_here += _in_thread(underflows, False, HEIGHT, WIDTH)
                    overflows_here += _in_thread(overflows, False, HEIGHT, WIDTH)

            if LOSSES or LIMITS:
                inside = tl.maximum(inside, _in_thread(mask.to(tl.int32), True, HEIGHT, WIDTH))
            if SCALE_SOURCES or LIMITS or RANGES:
                magnitude = tl.where(is_finite(x), magnitude_of(x), 0)
                largest_here = tl.maximum(largest_here, _in_thread(magnitude, True, HEIGHT, WIDTH))
                if RANGES:
                    above_here = tl.maximum(above_here, _in_thread(from_above(magnitude), True, HEIGHT, WIDTH))

        if LOSSES or LIMITS:
            is_block = _in_block(inside, True, HEIGHT, WIDTH, LANE_ROWS, GROUP) > 0
            block_count += is_block.to(tl.int32)
        if LOSSES:
            compared = _in_block(finite_here, False, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            lost = _in_block(underflows_here, False, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            beyond = _in_block(overflows_here, False, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            underflow_blocks += (lost > 0).to(tl.int32)
            overflow_blocks += (beyond > 0).to(tl.int32)
            # The larger of two shares, without a division: neither product exceeds 2^28.
            is_worse = lost * worst_of > worst * compared
            worst, worst_of = tl.where(is_worse, lost, worst), tl.where(is_worse, compared, worst_of)
        if SCALE_SOURCES or LIMITS or RANGES:
            upper = _in_block(largest_here, True, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            occupied = upper > 0
        if LIMITS:
            in_memory = _of_block(stored, has_scale, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            is_flushed = occupied & (in_memory <= LOW)
            # Negated, so that a scale of nan counts too.
            is_saturated = is_flushed | (occupied & ((in_memory < HIGH) == 0))
            zero_count += (is_block & (occupied == 0)).to(tl.int32)
            flushed_count += is_flushed.to(tl.int32)
            saturated_count += is_saturated.to(tl.int32)
        if SCALE_SOURCES:
            scale = _of_block(factor, has_scale, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            counted = occupied & (scale >= 0.0) & (scale < float("inf"))
            wide = tl.where(counted, scale, 0.0).to(tl.float64)
            scale_count += counted.to(tl.int32)
            scale_sum += wide
            scale_square_sum += wide * wide
            scale_max = _raised(scale_max, scale, counted)
            negated_scale_min = _raised(negated_scale_min, -scale, counted)
        if RANGES:
            above = _in_block(above_here, True, HEIGHT, WIDTH, LANE_ROWS, GROUP)
            span = _log2_of_ratio(upper, -above.to(tl.int32))
            range_count += occupied.to(tl.int32)
            range_sum += tl.where(occupied, span, 0.0)
            range_max = _raised(range_max, span, occupied)
            negated_range_min = _raised(negated_range_min, -span, occupied)

    # In the order of _COLUMNS and _EXTREMES. Unwanted columns are undefined and never read.
    sums = partials + program.to(tl.int64) * (COLUMNS + EXTREMES)
    maxima = sums + COLUMNS
    finite_total = total_of(finite_count)
    square_total = total_of(square_sum)
    if MOMENTS:
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
    if SCALE_SOURCES:
        _store_block_sum(sums + 12, scale_count, leads)
        _store_block_sum(sums + 13, scale_sum, leads)
        _store_block_sum(sums + 14, scale_square_sum, leads)
        store_maximum(maxima + 3, scale_max)
        store_maximum(maxima + 4, negated_scale_min)
    if LIMITS:
        _store_block_sum(sums + 15, block_count, leads)
        _store_block_sum(sums + 16, saturated_count, leads)
        _store_block_sum(sums + 17, flushed_count, leads)
        _store_block_sum(sums + 18, zero_count, leads)
    if LOSSES:
        _store_block_sum(sums + 19, block_count, leads)
        _store_block_sum(sums + 20, underflow_blocks, leads)
        _store_block_sum(sums + 21, overflow_blocks, leads)
        store_maximum(maxima + 5, worst.to(tl.float64) / worst_of.to(tl.float64))
    if RANGES:
        _store_block_sum(sums + 22, range_count, leads)
        _store_block_sum(sums + 23, range_sum, leads)
        store_maximum(maxima + 6, range_max)
        store_maximum(maxima + 7, negated_range_min)
    if EXPONENTS:
        add_exponents(merged_sums, exponents_at, exponents)

    if is_last(counters, programs):
        summed, highest = merge_rows(partials, 0, programs, COLUMNS, EXTREMES)
        sums_at = placed(nowhere(), moments_at, 0, 6)
        sums_at = placed(sums_at, compared_at, 6, 6)
        sums_at = placed(sums_at, scales_at, 12, 3)
        sums_at = placed(sums_at, limits_at, 15, 4)
        sums_at = placed(sums_at, losses_at, 19, 3)
        sums_at = placed(sums_at, ranges_at, 22, 2)
        extremes_at = placed(nowhere(), maxima_at, COLUMNS, 3)
        extremes_at = placed(extremes_at, scale_maxima_at, COLUMNS + 3, 2)
        extremes_at = placed(extremes_at, loss_maxima_at, COLUMNS + 5, 1)
        extremes_at = placed(extremes_at, range_maxima_at, COLUMNS + 6, 2)
        merge_at(merged_sums, sums_at, summed, merged_maxima, extremes_at, highest)


@jit
def _store_block_sum(pointer, column, leads):
    store_sum(pointer, tl.where(leads, column, 0))


@jit
def _raised(maximum, column, counted):
    return tl.maximum(maximum, tl.where(counted, column, float("-inf")))


@jit
def _offset(row, column, row_stride, column_stride):
    return row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride


@jit
def _swizzled(row, column, tile_stride):
    """Return a scale's index in swizzled memory (:mod:`te_precision_callbacks.base.numerics.layouts`)."""
    tile_begin = (row // 128).to(tl.int64) * tile_stride + (column // 4) * 512
    return tile_begin + ((row % 32) * 16 + row % 128 // 32 * 4 + column % 4)


@jit
def _log2_of_ratio(largest, smallest):
    """log2 of the ratio of two magnitudes, given as bits: float64, exact for powers of two."""
    there = smallest > 0
    upper = tl.where(there, largest, 1).to(tl.float32, bitcast=True).to(tl.float64)
    lower = tl.where(there, smallest, 1).to(tl.float32, bitcast=True).to(tl.float64)
    bits = (upper / lower).to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return tl.log2(mantissa) + ((bits >> 52) - 1023).to(tl.float64)


@jit
def _nothing(
    HEIGHT: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
    VECTOR: constexpr,
):
    """Return 0 for each block of each thread, in the shape of :func:`_in_thread`."""
    if HEIGHT == 1:
        nothing = tl.full([ROWS, THREADS], 0, tl.int32)
    elif WIDTH == 1:
        nothing = tl.full([THREADS, VECTOR], 0, tl.int32)
    else:
        nothing = tl.full([THREADS], 0, tl.int32)
    return nothing


@jit
def _reduce(tile, AXIS: constexpr, IS_MAX: constexpr):
    return tl.max(tile, AXIS) if IS_MAX else tl.sum(tile, AXIS)


@jit
def _in_thread(tile, IS_MAX: constexpr, HEIGHT: constexpr, WIDTH: constexpr):
    """Reduce each thread's elements of a block, by sum or maximum."""
    if HEIGHT == 1:
        reduced = _reduce(tile, 2, IS_MAX)
    elif WIDTH == 1:
        reduced = _reduce(tile, 0, IS_MAX)
    else:
        reduced = _reduce(_reduce(tile, 2, IS_MAX), 0, IS_MAX)
    return reduced


@jit
def _in_block(
    tensor,
    IS_MAX: constexpr,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    LANE_ROWS: constexpr,
    GROUP: constexpr,
):
    """Reduce over the threads of a block, by sum or maximum; each thread gets the result: [PARTS]."""
    if HEIGHT == 1:
        rows: constexpr = tensor.shape[0]
        groups: constexpr = tensor.shape[1] // GROUP
        reshaped = tl.reshape(tensor, [rows, groups, GROUP])
        blocks = _reduce(reshaped, 2, IS_MAX)[:, :, None]
    elif WIDTH == 1:
        vector: constexpr = tensor.shape[1]
        lanes: constexpr = tensor.shape[0] // LANE_ROWS
        reshaped = tl.reshape(tensor, [LANE_ROWS, lanes, vector])
        blocks = _reduce(reshaped, 0, IS_MAX)[None, :, :]
    else:
        across: constexpr = tensor.shape[0] // (LANE_ROWS * GROUP)
        reshaped = tl.reshape(tensor, [LANE_ROWS, across, GROUP])
        blocks = _reduce(_reduce(reshaped, 2, IS_MAX), 0, IS_MAX)[None, :, None]
    return tl.reshape(tl.broadcast_to(blocks, reshaped.shape), [tensor.numel])


@jit
def _is_first_of_block(PARTS: constexpr, HEIGHT: constexpr, LANE_ROWS: constexpr, GROUP: constexpr):
    part = tl.arange(0, PARTS)
    return part % GROUP == 0 if HEIGHT == 1 else (part < PARTS // LANE_ROWS) & (part % GROUP == 0)


@jit
def _of_block(
    scale,
    there,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    LANE_ROWS: constexpr,
    GROUP: constexpr,
):
    """Reduce float32 scales, equal within a block, to one per block: [PARTS]. Compares bits, so that nan survives."""
    bits = tl.where(there, scale.to(tl.int32, bitcast=True), -0x80000000)
    reduced = _in_thread(bits, True, HEIGHT, WIDTH)
    return _in_block(reduced, True, HEIGHT, WIDTH, LANE_ROWS, GROUP).to(tl.float32, bitcast=True)
