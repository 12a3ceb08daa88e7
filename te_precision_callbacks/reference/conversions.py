"""Conversion of large matrices on a CPU to FP8 and FP4 and back, in C++ (``conversions.cpp``).

C++ reads the matrix once, plain torch five times or more. Plain torch, with bit-identical results, is used for small
matrices, on other devices, and without a C++ compiler.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from te_precision_callbacks.base.compiling import CppFile
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.blocks import Block
from te_precision_callbacks.base.numerics.formats import E2M1, FloatFormat, table
from te_precision_callbacks.base.numerics.layouts import pack_fp4, unpack

SMALLEST = 1 << 15
"""Matrices with fewer elements use plain torch."""

_SIZES = (ctypes.c_int64,) * 4
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_AMAXES = "te_precision_block_amaxes"
_ENCODE = "te_precision_encode"
_DECODE = "te_precision_decode"
_TRANSFORM = "te_precision_transform_groups"

FILE = CppFile(
    Path(__file__).with_name("conversions.cpp"),
    {
        _AMAXES: (_POINTER, _INT, *_SIZES, _INT, _POINTER, _INT),
        _ENCODE: (_POINTER, _INT, *_SIZES, _POINTER, _POINTER, _INT, _POINTER, _INT),
        _DECODE: (_POINTER, *_SIZES, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT),
        _TRANSFORM: (_POINTER, ctypes.c_int64, _POINTER, _POINTER, _INT),
    },
    what="The reference backend converts to FP8 and FP4 and back by plain torch operations",
    times="twenty",
)


def block_amaxes(matrix: torch.Tensor, block: Block, *, nan_spreads: bool = False) -> torch.Tensor:
    """Return the largest magnitude per block, also of partial blocks: float32, [rows of blocks, columns of blocks].

    Unless ``nan_spreads``, plain torch synchronizes with the device.

    Args:
        nan_spreads: whether a block with NaN returns NaN. If not, NaN is skipped, and a block of only NaN returns 0.
    """
    if _uses_cpp(matrix):
        source = _as_cpp_input(matrix)
        out = torch.empty(blocks.block_counts(matrix.shape, block), dtype=torch.float32, device=matrix.device)
        FILE.functions[_AMAXES](
            *_matrix_arguments(source), *block, nan_spreads, out.data_ptr(), torch.get_num_threads()
        )
        return out
    tiles = blocks.as_tiles(matrix.abs(), block)
    amaxes = tiles.amax((1, 3))
    if not nan_spreads and bool(amaxes.isnan().any()):
        amaxes = tiles.masked_fill(tiles.isnan(), 0.0).amax((1, 3))
    return amaxes.float()


def encode_blocks(
    matrix: torch.Tensor,
    factors: torch.Tensor,
    block: Block,
    fmt: FloatFormat,
    random: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply elements by the factors of their blocks and encode them, rounded to nearest or stochastically.

    Args:
        matrix: any float type, [rows, columns].
        factors: float32, [rows of blocks, columns of blocks].
        fmt: E4M3, E5M2, or E2M1, which requires an even number of columns.
        random: float32, [rows, columns], in [0, 1), for stochastic rounding to E2M1. A magnitude is rounded up if its
            distance from the next smaller one in E2M1, relative to the gap, exceeds this. None rounds to nearest, as
            :meth:`FloatFormat.encode`.

    Returns:
        uint8, [rows, columns]; for E2M1 two codes per byte, [rows, columns / 2].
    """
    if _uses_cpp(matrix):
        source = _as_cpp_input(matrix)
        block_factors = factors.contiguous()
        drawn = None if random is None else random.contiguous()
        columns = matrix.shape[1] * fmt.bits // 8
        out = torch.empty(matrix.shape[0], columns, dtype=torch.uint8, device=matrix.device)
        FILE.functions[_ENCODE](
            *_matrix_arguments(source),
            *block,
            block_factors.data_ptr(),
            None if drawn is None else drawn.data_ptr(),
            fmt.mantissa_bits,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
    values = blocks.multiply_by_blocks(matrix.float(), factors, block)
    codes = fmt.encode(values) if random is None else _stochastic_codes(values, random)
    if fmt.bits == 4:
        return pack_fp4(codes)
    return codes


def decode_blocks(
    codes: torch.Tensor,
    fmt: FloatFormat,
    factors: torch.Tensor | None,
    block: Block,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode codes of :func:`encode_blocks`, and multiply them by the factors of their blocks: [rows, columns].

    Args:
        factors: float32, [rows of blocks, columns of blocks]; None for 1.
        dtype: float32, or bfloat16 if it represents the products exactly.
    """
    if _uses_cpp(codes):
        source = codes.contiguous()
        numbers = table(fmt, codes.device)
        block_factors = None if factors is None else factors.contiguous()
        out = torch.empty(codes.shape[0], codes.shape[1] * 8 // fmt.bits, dtype=dtype, device=codes.device)
        FILE.functions[_DECODE](
            source.data_ptr(),
            *out.shape,
            *block,
            fmt.bits,
            numbers.data_ptr(),
            None if block_factors is None else block_factors.data_ptr(),
            out.data_ptr(),
            dtype == torch.float32,
            torch.get_num_threads(),
        )
        return out
    values = fmt.decode(unpack(codes, fmt))
    return (values if factors is None else blocks.multiply_by_blocks(values, factors, block)).to(dtype)


def transform_groups(matrix: torch.Tensor, transform: torch.Tensor) -> torch.Tensor:
    """Multiply each group of 16 along the last dimension by a matrix, in float64; round to float32, then to bfloat16.

    Args:
        matrix: bfloat16, [rows, columns], columns a multiple of 16.
        transform: float64, [16, 16].
    """
    source = matrix.contiguous()
    if not _uses_cpp(source):
        groups = source.view(-1, len(transform)).double()
        return torch.matmul(groups, transform).float().view(matrix.shape).to(matrix.dtype)
    result = torch.empty_like(source)
    numbers = transform.contiguous()
    count = source.numel() // len(transform)
    FILE.functions[_TRANSFORM](source.data_ptr(), count, numbers.data_ptr(), result.data_ptr(), torch.get_num_threads())
    return result


def _stochastic_codes(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs().clamp(max=E2M1.max)
    # The spacing of E2M1 is 0.5 below 2, 1 below 4, and 2 above: half of the power of two at or below the magnitude.
    binade = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    spacing = binade.clamp_(min=1.0).mul_(0.5)
    below = (magnitude / spacing).floor_().mul_(spacing)
    up = random < magnitude.sub_(below).div_(spacing)
    return E2M1.encode(below.add_(spacing.mul_(up)).copysign_(values))


def _uses_cpp(matrix: torch.Tensor) -> bool:
    return matrix.device.type == "cpu" and matrix.numel() >= SMALLEST and FILE.is_compiled()


def _as_cpp_input(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix if matrix.dtype in (torch.float32, torch.bfloat16) else matrix.float()).contiguous()


def _matrix_arguments(matrix: torch.Tensor) -> tuple[int, ...]:
    return matrix.data_ptr(), matrix.dtype == torch.float32, *matrix.shape
