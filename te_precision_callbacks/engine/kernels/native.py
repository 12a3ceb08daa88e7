"""The pass on a CPU, in C++ (``one_pass.cpp``): each element is read once, in the processor's vectors.

See :mod:`te_precision_callbacks.engine.kernels.cpp` for when it is compiled. A call takes some microseconds where plain
torch calls thirty operations, so small tensors gain most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import ColumnPlaces, Pending
from te_precision_callbacks.engine.kernels.cpp import DTYPES, CppPass

ONE_PASS = CppPass(
    "one_pass.cpp",
    "te_precision_one_pass",
    (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *[ctypes.c_int64] * len(ColumnPlaces._fields),
    ),
    pays_from=2**29,
    what="Statistics on the CPU are computed by plain torch operations",
    times="fifty",
)

takes = ONE_PASS.takes
leaves = ONE_PASS.leaves


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
            DTYPES[values.dtype],
            values.numel(),
            at_codes,
            codes_format,
            at_factor,
            torch.get_num_threads(),
            sums.data_ptr(),
            maxima.data_ptr(),
            *places,
        )
