"""The pass on a CPU, in C++ (``one_pass.cpp``): each element is read once, in the processor's vectors.

It is compiled once plain torch has spent about as long as compiling takes. Without a C++ compiler, plain torch does
everything, which is logged once. A call takes some microseconds where plain
torch calls thirty operations, so small tensors gain most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from te_precision_callbacks.base.compiling import CppFile
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import ColumnPlaces, Pending

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype -> its number in the C++ code."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time of its call for the smallest tensor."""

_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    *[ctypes.c_int64] * len(ColumnPlaces._fields),
)

ONE_PASS = CppFile(
    Path(__file__).with_name("one_pass.cpp"),
    {"te_precision_one_pass": _ARGUMENTS},
    pays_from=2**29,
    what="Statistics on the CPU are computed by plain torch operations",
    times="fifty",
)


def _could_take(values: torch.Tensor) -> bool:
    """Return whether the tensor is plain, on the CPU, and of a supported dtype."""
    return type(values) is torch.Tensor and values.dtype in _DTYPES and values.device.type == "cpu"


def takes(values: torch.Tensor) -> bool:
    return _could_take(values) and ONE_PASS.is_taken()


def leaves(values: torch.Tensor) -> None:
    if _could_take(values):
        ONE_PASS.leaves_to_torch(values.numel() + _A_CALL)


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """As :func:`te_precision_callbacks.engine.kernels.add`, for tensors that ``takes`` accepts.

    Calls no operation of torch for a tensor without gaps.
    """
    for values, codes, scale_inv, e5m2, places, *_ in pending:
        # Checking for gaps costs less than a torch operation that does nothing.
        if not values.is_contiguous():
            values = (eager.flattened(values) if codes is None else values).contiguous()
        codes_format, at_codes, at_factor = 0, None, None
        if codes is not None and scale_inv is not None:
            codes, factor = codes.contiguous(), scale_inv.to(torch.float32)
            codes_format = 2 if e5m2 else 1
            at_codes, at_factor = codes.data_ptr(), factor.data_ptr()
        ONE_PASS.function(
            values.data_ptr(),
            _DTYPES[values.dtype],
            values.numel(),
            at_codes,
            codes_format,
            at_factor,
            torch.get_num_threads(),
            sums.data_ptr(),
            maxima.data_ptr(),
            *places,
        )
