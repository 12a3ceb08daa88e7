"""The pass on a CPU in C++, vectorized, which reads each element once. Without a compiler, plain torch is used.

A call takes some microseconds, where plain torch calls thirty operations, so small tensors gain most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from te_precision_callbacks.base.compiling import CppFile
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import FORMATS, UNBLOCKED, Pending

ONE_PASS = CppFile(
    Path(__file__).with_name("one_pass.cpp"),
    {
        "te_precision_one_pass": (
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
            *[ctypes.c_int64] * UNBLOCKED,
        ),
        "te_precision_largest": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
    },
    what="Statistics on the CPU are computed by plain torch operations",
    times="a hundred",
)


def accepts(values: torch.Tensor) -> bool:
    """Return whether C++ can read the tensor: plain, on the CPU, of a supported dtype."""
    could = type(values) in PLAIN and values.dtype in FORMATS and values.device.type == "cpu"
    return could and (bool(ONE_PASS.functions) or ONE_PASS.is_compiled())


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """As :func:`te_precision_callbacks.engine.kernels.add`, for tensors that :func:`accepts` accepts.

    For a dense tensor it calls no torch operation.
    """
    for tensor in pending:
        values = tensor.values
        codes = tensor.codes
        factor = tensor.scale_inv
        # The check is cheaper than a torch operation that does nothing.
        if not values.is_contiguous():
            values = (eager.flatten(values) if codes is None else values).contiguous()
        codes_format = 0
        at_codes = None
        at_factor = None
        if codes is not None and factor is not None:
            codes = codes.contiguous()
            # A call of torch takes as long as the pass over a small tensor.
            factor = factor if factor.dtype is torch.float32 else factor.to(torch.float32)
            codes_format = 2 if tensor.e5m2 else 1
            at_codes = codes.data_ptr()
            at_factor = factor.data_ptr()
        ONE_PASS.functions["te_precision_one_pass"](
            values.data_ptr(),
            FORMATS[values.dtype],
            values.numel(),
            at_codes,
            codes_format,
            at_factor,
            torch.get_num_threads(),
            sums.data_ptr(),
            maxima.data_ptr(),
            *tensor.places[:UNBLOCKED],
        )
