"""Large products on a CPU that multiplies bfloat16, in C++ (``product.cpp``).

FP8 and FP4 values, even times the scales of their blocks, are exact in bfloat16, so their products are exact and only
the sums are rounded, to float32. torch has no such product on a CPU: ``torch.mm(out_dtype=torch.float32)`` raises an
error (2.13), and multiplying in float32 takes twice as long. Other CPUs, or machines without a C++ compiler, use
float32.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from te_precision_callbacks.base.compiling import CppFile

SMALLEST = 2**26
"""Multiply-adds from which a product takes this way. Only its sizes decide: the order of sums, and so their rounding,
is the same whenever a product of these sizes is computed. A smaller one takes a millisecond or two in float32."""

BLOCK = 256
"""Numbers that are summed from zero; the error of one long sum would be larger."""

PRODUCT = CppFile(
    Path(__file__).with_name("product.cpp"),
    {
        "te_precision_product": (
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64) * 2,
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
        )
    },
    what="The reference backend multiplies FP8 and FP4 on this CPU in float32",
    times="two",
)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 with float32 sums (torch 2.13, ``cpu/__init__.py``)."""
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask is not None and ask() for ask in checks)


def takes(rows: int, columns: int, depth: int, device: torch.device) -> bool:
    """Return whether :func:`product` supports these sizes; it needs operands in bfloat16."""
    large = device.type == "cpu" and rows * columns * depth >= SMALLEST
    return large and multiplies_bfloat16() and PRODUCT.is_compiled()


def product(
    left_matrix: torch.Tensor,
    right: torch.Tensor,
    *,
    block: int = BLOCK,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    rows_first: bool = True,
) -> torch.Tensor | None:
    """Compute ``left @ right.t()``; with ``factors``, the sum of each block is multiplied by two factors.

    Args:
        left_matrix, right: bfloat16, [rows, depth] and [columns, depth]; values of the left below 2^-126 are 0.
        block: the number of products in a block's sum; even.
        factors: float32, [blocks, rows] and [blocks, columns].
        rows_first: the sum of a block is multiplied by the row's factor and rounded; a fused multiply-add with the
            column's factor adds it to the total. If False, the column's factor comes first.

    Returns:
        float32, [rows, columns]; None if the compiler lacks the processor's instructions.
    """
    (rows, depth), columns = left_matrix.shape, right.shape[0]
    out = torch.empty(rows, columns, dtype=torch.float32, device=left_matrix.device)
    done = ctypes.c_int(0)
    row_factors, column_factors = (None, None) if factors is None else (factor.contiguous() for factor in factors)
    PRODUCT.function(
        *(left_matrix.data_ptr(), *left_matrix.stride(), right.data_ptr(), *right.stride()),
        *(out.data_ptr(), rows, columns, depth, block),
        None if row_factors is None else row_factors.data_ptr(),
        None if column_factors is None else column_factors.data_ptr(),
        *(rows_first, torch.get_num_threads(), ctypes.addressof(done)),
    )
    if done.value:
        return out
    return None
