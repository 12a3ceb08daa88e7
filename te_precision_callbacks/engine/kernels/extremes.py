"""Minimum and maximum of a tensor on a CPU, from one read in C++ (``extremes.cpp``).

torch's ``aminmax`` takes four times as long in bfloat16; in float32, ``amin`` and ``amax`` take half as long again.
"""

from __future__ import annotations

import ctypes

import torch

from te_precision_callbacks.engine.kernels.cpp import DTYPES, CppPass

SMALLEST = 2**13
"""Elements from which a call is faster than torch."""

EXTREMES = CppPass(
    "extremes.cpp",
    "te_precision_extremes",
    (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    pays_from=2**33,
    what="The extremes of tensors on the CPU are read by plain torch operations",
    times="four",
)


def write_extremes(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> bool:
    """Write a tensor's extremes, both nan if it has a nan; return False if plain torch has to.

    Args:
        values: at least one element, without gaps.
        low, high: one-element tensors of the same dtype.
    """
    if values.numel() < SMALLEST:
        return False
    if not EXTREMES.takes(values):
        EXTREMES.leaves(values)
        return False
    EXTREMES.function(
        values.data_ptr(),
        DTYPES[values.dtype],
        values.numel(),
        torch.get_num_threads(),
        low.data_ptr(),
        high.data_ptr(),
    )
    return True
