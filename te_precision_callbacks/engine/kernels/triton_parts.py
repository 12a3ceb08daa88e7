"""Common parts of the Triton kernels, and their error bounds.

Counts and extremes are exact. Sums are float32 over a thread's elements of a tile, and float64 beyond: a GPU does
float64 at half (H100) to a 64th (consumer GPUs) of its float32 rate. A thread subtracts the mean of its elements before
squaring, so that a variance of a millionth of the squared mean keeps its digits. Let u = 2^-24 (float32 rounding), and
k the maximum number of float32 additions per element (10; 16 for values in FP8). Ignoring float64 rounding, the bounds
of the relative errors are (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2):

- ``abs_sum``: k u.
- ``sum``: (k + 1) u, relative to the sum of distances from the threads' means, which is below 2 ``abs_sum``.
- the squared distances from the threads' means: (k + 3) u. ``square_sum``, computed from these, the means, and the
  products of means and distances: (2 k + 4) u.
- the variance: the same, since its error comes from the same two sums; the standard deviation: (k + 2) u, or 7e-7 for
  k = 10.
- ``error_square_sum`` and ``underflow_square_sum``: (k + 3) u.

The programs of a launch write partial results. The last one of a tensor to finish merges them in the order of programs,
so results do not depend on which one is last.

:func:`careful_moments` handles tiles with inf or NaN, or with squares that might leave float32's range: each thread
scales its elements by a power of two. Whole tiles of dense tensors are first read without this care and without a
reduction over threads. The results then show whether that was right (:func:`are_plain`, :func:`is_exact`); otherwise
the program reads its tiles again.
"""

# Triton has no types, so its functions are annotated only where it reads this: constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from te_precision_callbacks.base.devices import is_capturing, is_lost, raw_stream_of

logger = logging.getLogger(__name__)

# dtype -> name in the kernel, integer dtype to load it as, and a non-finite value. The kernel decodes all dtypes except
# float32 and float16 from their bits, which is exact on every GPU.
FORMATS: dict[torch.dtype, tuple[str, torch.dtype | None, float | int]] = {
    torch.float32: ("float32", None, math.inf),
    torch.float16: ("float16", None, math.inf),
    torch.bfloat16: ("bfloat16", torch.int16, 0x7FC0),
    torch.float8_e4m3fn: ("e4m3", torch.uint8, 0x7F),
    torch.float8_e5m2: ("e5m2", torch.uint8, 0x7F),
}
CODE_FORMATS = {False: ("e4m3", 448.0), True: ("e5m2", 57344.0)}  # whether E5M2 -> name in the kernel, largest number

# Range of a tile's largest magnitude for :func:`plain_moments`. Above it, a sum of 32 squares of twice the magnitude
# might overflow. Below it, squared distances under 2^-126, which float32 cannot represent, might matter, since a number
# has digits down to 2^-24 of its magnitude.
SMALLEST_PLAIN = constexpr(2.0**-36)
LARGEST_PLAIN = constexpr(2.0**60)

# A program has fewer than 2^22 elements per thread, and a square below 2^-126 is off by at most 2^-150.
SMALLEST_SQUARES = constexpr(2.0**-96)

PROGRAM_THREADS = 128
THREADS = constexpr(PROGRAM_THREADS)
BYTES_PER_LOAD = 16
_PROGRAMS_PER_PROCESSOR = 4
PROGRAMS_OF_INTERPRETER = 4

WARPS = PROGRAM_THREADS // 32

MOST_TOGETHER = 4
"""Maximum number of tensors per launch; a GEMM has three."""

kept_scratch: dict[
    tuple[int, int], tuple[torch.Tensor, torch.Tensor]
] = {}  # device and stream -> partials and counters

MERGED_COLUMNS = constexpr(32)
MERGED_ROWS = constexpr(64)
"""Tile of the merge; a program's row of results has at most so many columns."""

_needs_binder = False
"""True once a launch without Triton's binder has failed."""

Launcher: TypeAlias = tuple[Callable[..., object], Sequence[Any]]
"""Launches a compiled kernel without Triton's binder, and its settings.

It takes the number of programs, 1, 1, the stream, the settings, and a tuple of the kernel's arguments.
"""

# Decorated functions have any type.
Jit = Callable[[Callable[..., Any]], Any]

jit: Jit = triton.jit


@functools.cache
def program_count(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_OF_INTERPRETER
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * _PROGRAMS_PER_PROCESSOR


@functools.lru_cache(1024)
def grid_of(sizes: tuple[int, ...], tile: int, most: int, capacity: int) -> tuple[int, Sequence[int]]:
    """Return the number of programs of a launch, and the first program of each of its tensors but the first.

    Args:
        sizes: of the tensors.
        tile: elements that a program reads at a time.
        most: maximum number of programs of a tensor.
        capacity: number of tensors that the kernel takes; unused ones have no program.
    """
    programs = [min(most, -(-size // tile)) for size in sizes]
    *begins, count = itertools.accumulate([*programs, *[0] * (capacity - len(sizes))])
    return count, begins


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scratch(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for ``size`` partial results, and a counter of 0 for each tensor of a launch.

    Launches on a stream run one after the other and share the memory; each leaves counters of 0. A captured launch gets
    its own, since its graph may be replayed on another stream.
    """
    if is_capturing():
        return _new_scratch(device, size)
    key = device.index or 0, raw_stream_of(device)()
    memory = kept_scratch.get(key)
    if memory is None or memory[0].numel() < size:
        memory = kept_scratch[key] = _new_scratch(device, size)
    return memory


def launcher_of(kernel: Any) -> Launcher | None:
    """Return how to launch a compiled kernel directly; None in the interpreter, or once this has failed."""
    if kernel is None or _needs_binder:
        return None
    run = kernel.run
    function = kernel.function
    metadata = kernel.packed_metadata
    try:
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            raise AttributeError
        settings = function, run.launch_cooperative_grid, run.launch_pdl, metadata
        # Launch metadata and hooks, and memory of the kernel.
        return run.launch, (*settings, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
    except AttributeError:  # Triton before 3.6, or a kernel that needs memory

        def launch(programs: int, height: int, depth: int, stream: int, arguments: Iterable[Any]) -> None:
            run(programs, height, depth, stream, function, metadata, None, None, None, *arguments)

        return launch, ()


def report_binder(error: Exception) -> None:
    """Log once that a launch without Triton's binder has failed, after which there are no more; raise a lost GPU."""
    global _needs_binder
    if is_lost(error):
        raise error
    if not _needs_binder:
        _needs_binder = True
        logger.warning(
            "Statistics on the GPU take longer than necessary: Triton %s does not launch a compiled kernel as expected"
            " (%s: %s). Results do not change.",
            triton.__version__,
            type(error).__name__,
            error,
        )


def _new_scratch(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    partials = torch.empty(size, dtype=torch.float64, device=device)
    return partials, torch.zeros(MOST_TOGETHER, dtype=torch.int32, device=device)


def loadable(values: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the tensor as the kernels load it, and their arguments for decoding it."""
    name, integers, not_finite = FORMATS[values.dtype]
    return values if integers is None else values.view(integers), {"FORMAT": name, "NOT_FINITE": not_finite}


@jit
def tile_moments(x, PER_THREAD: constexpr):
    """Moments of a tile, [rows, threads, elements], per thread, in the order of :func:`careful_moments`.

    Elements beyond the end must be inf or NaN.
    """
    float_sum = thread_sum(x)
    here = tl.where(is_finite(float_sum), tl.maximum(thread_max(x), thread_max(-x)), float("inf"))
    top = tl.max(here, 0)
    if _is_in_range(top):
        count = tl.full([x.shape[1]], PER_THREAD, tl.int32)
        nonzero, sum_, squares, magnitudes, above, high, low = plain_moments(x, PER_THREAD)
    else:
        count, nonzero, sum_, squares, magnitudes, above, high, low = careful_moments(x)
    return count, nonzero, sum_, squares, magnitudes, above, high, low


@jit
def comparison(x, y, largest):
    """Return underflows and overflows as 0 and 1, and each thread's sums of squared errors and of squared underflows.

    Args:
        x: a tile of [rows, threads, elements].
        largest: the magnitude above which an element overflows.
    """
    finite = is_finite(x)
    zeroed = tl.where(finite, x, 0.0)
    underflows = (zeroed != 0.0) & (y == 0.0)
    overflows = (tl.abs(zeroed) > largest).to(tl.int32)
    lost = tl.where(underflows, zeroed, 0.0)
    return underflows.to(tl.int32), overflows, _squares(tl.where(finite, x - y, 0.0)), _squares(lost)


@jit
def _squares(x):
    """Each thread's sum of squares, which may leave float32's range."""
    down, up = _powers(thread_max(tl.abs(x)))
    x *= down[None, :, None]
    return thread_sum(x * x) * (up * up)


@jit
def exponent_counts(x, ELEMENTS: constexpr):
    """Count elements of a tile per exponent, [256]; the last bin has zeros and non-finite elements."""
    # tl.histogram has a mask only since Triton 3.2; no finite number has the exponent 255.
    magnitude = magnitude_of(x)
    exponent = tl.where(magnitude == 0, 255, magnitude >> 23)
    return tl.histogram(tl.reshape(exponent, [ELEMENTS]), 256)


@jit
def store_sum(pointer, column):
    tl.store(pointer, total_of(column))


@jit
def store_maximum(pointer, column):
    tl.store(pointer, tl.max(column, 0).to(tl.float64))


@jit
def store_moments(
    pointer,
    finite,
    seen,
    nonzero_count,
    total,
    square_total,
    abs_sum,
):
    """Store MOMENT_SUMS of all threads; ``finite`` and ``square_total`` are already summed over the threads."""
    tl.store(pointer + 0, finite)
    tl.store(pointer + 1, seen.to(tl.float64) - finite)
    tl.store(pointer + 2, finite - total_of(nonzero_count))
    store_sum(pointer + 3, total)
    tl.store(pointer + 4, square_total)
    store_sum(pointer + 5, abs_sum)


@jit
def store_comparison(
    pointer,
    finite,
    underflow_count,
    overflow_count,
    error_square_sum,
    square_total,
    underflow_square_sum,
):
    tl.store(pointer + 0, finite)
    store_sum(pointer + 1, underflow_count)
    store_sum(pointer + 2, overflow_count)
    store_sum(pointer + 3, error_square_sum)
    tl.store(pointer + 4, square_total)
    store_sum(pointer + 5, underflow_square_sum)


@jit
def store_extremes(pointer, maximum, negated_min, above_zero):
    """Store MAXIMA; ``above_zero`` is the smallest magnitude in the encoding of :func:`from_above`."""
    store_maximum(pointer + 0, maximum)
    store_maximum(pointer + 1, negated_min)
    smallest = (-tl.max(above_zero, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(pointer + 2, tl.where(smallest == 0.0, float("-inf"), -smallest).to(tl.float64))


@jit
def is_last(counter, programs):
    """Return whether this program is the last of a tensor to finish, and may read the partial results of all.

    It resets the counter for the next launch.
    """
    tl.debug_barrier()  # the stores of all threads come before the counter
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    tl.store(counter, 0, mask=last)
    return last


@jit
def merge_rows(partials, first, end, COLUMNS: constexpr, EXTREMES: constexpr):
    """Sum and maximum of columns, [32], over the rows ``first`` to ``end`` of ``partials``, exclusive.

    The order of the additions depends on the number of rows alone. Loads bypass the L1 cache, which may hold older
    values.
    """
    column = tl.arange(0, MERGED_COLUMNS)
    is_sum = column < COLUMNS
    is_maximum = (column >= COLUMNS) & (column < COLUMNS + EXTREMES)
    total = tl.full([MERGED_COLUMNS], 0, tl.float64)
    largest = tl.full([MERGED_COLUMNS], float("-inf"), tl.float64)
    for above in range(first, end, MERGED_ROWS):
        row = above + tl.arange(0, MERGED_ROWS)
        pointers = partials + row[:, None].to(tl.int64) * (COLUMNS + EXTREMES) + column[None, :]
        is_row = row[:, None] < end
        sums = tl.load(pointers, mask=is_row & is_sum[None, :], other=0.0, cache_modifier=".cg")
        total += tl.sum(sums, 0)
        maxima = tl.load(pointers, mask=is_row & is_maximum[None, :], other=float("-inf"), cache_modifier=".cg")
        largest = tl.maximum(largest, tl.max(maxima, 0))
    return total, largest


@jit
def placed(offsets, offset, BEGIN: constexpr, NUMBER: constexpr):
    """Set the offsets of ``NUMBER`` columns from ``BEGIN`` on to ``offset`` and the following, unless it is -1."""
    column = tl.arange(0, MERGED_COLUMNS)
    is_set = (column >= BEGIN) & (column < BEGIN + NUMBER) & (offset >= 0)
    return tl.where(is_set, offset + column - BEGIN, offsets)


@jit
def select(which, first, second, third, fourth):
    return tl.where(which == 0, first, tl.where(which == 1, second, tl.where(which == 2, third, fourth)))


@jit
def nowhere():
    """Offsets of columns that are not merged: -1."""
    return tl.full([MERGED_COLUMNS], -1, tl.int32)


@jit
def merge_at(
    sums,
    sums_at,
    total,
    maxima,
    maxima_at,
    largest,
):
    """Add ``total`` to ``sums``, and merge ``largest`` into ``maxima``, at the offsets from 0 on."""
    added = tl.load(sums + sums_at, mask=sums_at >= 0, other=0.0) + total
    raised = tl.maximum(tl.load(maxima + maxima_at, mask=maxima_at >= 0, other=0.0), largest)
    tl.store(sums + sums_at, added, mask=sums_at >= 0)
    tl.store(maxima + maxima_at, raised, mask=maxima_at >= 0)


@jit
def add_exponents(sums, offset, counts):
    """Add the counts of :func:`exponent_counts`. Counts are integers, so the order of programs does not matter."""
    bins = tl.arange(0, 256)  # the last one has zeros and non-finite elements
    tl.atomic_add(sums + offset + bins, counts.to(tl.float64), mask=(bins < 255) & (counts > 0), sem="relaxed")


@jit
def decode(loaded, FORMAT: constexpr):
    """Convert loaded elements to float32, exactly."""
    if FORMAT == "bfloat16":
        x = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "e5m2":
        # The upper byte of a float16.
        x = (loaded.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3":
        # As bits of a float32, whose exponent bias is 127, not 7: 2^-120 of the value. Scaling by 2^120 is exact.
        bits = ((loaded.to(tl.int32) << 24) >> 4) & -0x78100000
        small = bits.to(tl.float32, bitcast=True)
        x = tl.where((bits & 0x07F00000) == 0x07F00000, float("nan"), small * 1.329227995784916e36)
    elif FORMAT == "e8m0":
        code = loaded.to(tl.int32)
        bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
        x = bits.to(tl.float32, bitcast=True)
    elif FORMAT == "e2m1":
        # The bits form a float32 that is 2^-126 of the value.
        bits = loaded.to(tl.int32)
        small = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
        x = small * 8.507059173023462e37
    else:
        x = loaded.to(tl.float32)
    return x


@jit
def decode_codes(loaded, FORMAT: constexpr, CONVERTS: constexpr):
    """Convert FP8 codes to float32, exactly. ``CONVERTS``: by the GPU's instruction."""
    if not CONVERTS:
        y = decode(loaded, FORMAT)
    elif FORMAT == "e5m2":
        y = loaded.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        y = loaded.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return y


@jit
def plain_moments(x, PER_THREAD: constexpr):
    """Moments of a tile without inf and NaN, if the squares fit float32, in the order of :func:`careful_moments`,
    without the count.
    """
    magnitude = magnitude_of(x)
    mean = thread_sum(x) / PER_THREAD
    deviation = x - mean[None, :, None]
    deviation_sum = thread_sum(deviation).to(tl.float64)
    wide_mean = mean.to(tl.float64)
    sum_here = PER_THREAD * wide_mean + deviation_sum
    return (
        thread_sum(tl.minimum(magnitude, 1)),
        sum_here,
        (sum_here + deviation_sum) * wide_mean + thread_sum(deviation * deviation),
        thread_sum(tl.abs(x)).to(tl.float64),
        thread_max(from_above(magnitude)),
        thread_max(x),
        thread_max(-x),
    )


@jit
def _is_in_range(top):
    return (top == 0.0) | ((top >= SMALLEST_PLAIN) & (top <= LARGEST_PLAIN))


@jit
def are_plain(
    maximum,
    negated_min,
    abs_sum,
):
    """Return whether :func:`plain_moments` is right for all tiles of a program, from the results of its threads."""
    top = tl.max(tl.maximum(maximum, negated_min), 0)
    return _is_in_range(top) & (total_of(abs_sum) < float("inf"))


@jit
def plain_comparison(x, y, largest):
    """:func:`comparison`, added up, of a tile without inf and NaN, if the squares fit float32."""
    underflows = (x != 0.0) & (y == 0.0)
    overflows = (tl.abs(x) > largest).to(tl.int32)
    error = x - y
    lost = tl.where(underflows, x, 0.0)
    return (
        thread_sum(underflows.to(tl.int32)),
        thread_sum(overflows),
        thread_sum(error * error).to(tl.float64),
        thread_sum(lost * lost).to(tl.float64),
    )


@jit
def is_exact(square_sum, has_some):
    """Return whether a program's sum of float32 squares has lost no digits: it is finite, and so large that squares
    below float32's range do not matter, or there are none.
    """
    total = total_of(square_sum)
    return (total < float("inf")) & ((total >= SMALLEST_SQUARES) | (~has_some & (total == 0.0)))


@jit
def careful_moments(x):
    """Moments of any tile, per thread: counts of finite and of non-zero elements; sums of elements, squares and
    magnitudes; the smallest magnitude (:func:`from_above`), the maximum and the negated minimum.
    """
    finite = is_finite(x)
    magnitude = tl.where(finite, magnitude_of(x), 0)
    count = thread_sum(finite.to(tl.int32))
    maximum = thread_max(tl.where(finite, x, float("-inf")))
    negated_min = thread_max(tl.where(finite, -x, float("-inf")))
    down, up = _powers(tl.maximum(maximum, negated_min))
    scaled = tl.where(finite, x, 0.0) * down[None, :, None]
    mean = thread_sum(scaled) / tl.maximum(count, 1).to(tl.float32)
    deviation = tl.where(finite, scaled - mean[None, :, None], 0.0)
    deviation_sum = thread_sum(deviation).to(tl.float64)
    wide_mean = mean.to(tl.float64)
    sum_here = count * wide_mean + deviation_sum
    return (
        count,
        thread_sum(tl.minimum(magnitude, 1)),
        sum_here * up,
        ((sum_here + deviation_sum) * wide_mean + thread_sum(deviation * deviation)) * (up * up),
        thread_sum(tl.abs(scaled)) * up,
        thread_max(from_above(magnitude)),
        maximum,
        negated_min,
    )


@jit
def from_above(magnitude):
    """Encode a magnitude as 2^32 minus its bits, which reverses the order; 0 stays 0."""
    return (-magnitude).to(tl.uint32, bitcast=True)


@jit
def magnitude_of(x):
    """The magnitude's bits, which are in the order of the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def is_finite(x):
    return magnitude_of(x) < 0x7F800000


@jit
def _powers(largest):
    """Return a power of two that scales a magnitude to between 1 and 4, in float32, and its inverse, in float64.

    A subnormal magnitude is scaled to 2^-22 or more. For a non-finite or negative number the result is arbitrary.
    """
    exponent = tl.minimum(tl.maximum(254 - (largest.to(tl.int32, bitcast=True) >> 23), 1), 254)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    up = ((1150 - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return down, up


@jit
def thread_sum(tile):
    return tl.sum(tl.sum(tile, 2), 0)


@jit
def thread_max(tile):
    return tl.max(tl.max(tile, 2), 0)


@jit
def total_of(column):
    return tl.sum(column.to(tl.float64), 0)
