"""The pass on a CPU, in C++ (``one_pass.cpp``): each element is read once, in the processor's vectors.

The file is compiled by torch's own cache of C++ code, in about two seconds, and kept on disk. Nothing is compiled
before plain torch has measured as much as that takes: a short run would wait longer for the compiler than for its
numbers. Without a C++ compiler everything is done in plain torch, which is logged once. A call takes some microseconds,
so that small tensors gain most: plain torch calls thirty operations for each.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import Pending, Places
from te_precision_callbacks.engine.kernels.fallback import say_not_compiled

logger = logging.getLogger(__name__)

PAYS_FROM = 2**29
"""Elements that plain torch measures before the pass is compiled: about as long as that takes."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time that a call takes it for the smallest tensor."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_SOURCE = Path(__file__).with_name("one_pass.cpp")

_one_pass: Any = None
_failed = False
_in_plain_torch = 0
"""Elements that plain torch has measured although the pass could have measured them."""


def takes(values: torch.Tensor) -> bool:
    """Whether the pass is taken for a tensor: it is a plain one on the CPU, of a dtype that the pass reads, and
    compiling pays by now and has not failed."""
    return _could_take(values) and not _failed and _in_plain_torch >= PAYS_FROM and _is_loaded()


def leaves(values: torch.Tensor) -> None:
    """Count a tensor that plain torch measures."""
    global _in_plain_torch
    if _could_take(values):
        _in_plain_torch += values.numel() + _A_CALL


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """As :func:`te_precision_callbacks.engine.kernels.add`, of tensors that :func:`takes` accepts.

    Not one operation of torch is called for a tensor without gaps.
    """
    for values, codes, scale_inv, e5m2, places, *_ in pending:
        # Asking whether a tensor has gaps costs less than an operation of torch that has nothing to do.
        if not values.is_contiguous():
            values = (eager.flattened(values) if codes is None else values).contiguous()
        codes_format, at_codes, at_factor = 0, None, None
        if codes is not None and scale_inv is not None:
            codes, factor = codes.contiguous(), scale_inv.to(torch.float32)
            codes_format = 2 if e5m2 else 1
            at_codes, at_factor = codes.data_ptr(), factor.data_ptr()
        _one_pass(
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


def _could_take(values: torch.Tensor) -> bool:
    return type(values) is torch.Tensor and values.dtype in _DTYPES and values.device.type == "cpu"


def _is_loaded() -> bool:
    global _one_pass, _failed
    if _one_pass is None:
        try:
            _one_pass = _loaded()
        except Exception as error:
            _failed = True
            say_not_compiled(logger, "fifty", error)
    return _one_pass is not None


def _loaded(flags: Sequence[str] = ()) -> Any:
    """The function of ``one_pass.cpp``, compiled unless torch has it in its cache (2.13, ``_inductor/codecache.py``).

    Args:
        flags: of the compiler, after torch's own, which are for the processor at hand.

    For code that is written with torch's own vectors, torch would first try which ones the processor has.
    """
    from torch._inductor.codecache import CppCodeCache

    known = inspect.signature(CppCodeCache.load_async).parameters
    library = CppCodeCache.load(
        _SOURCE.read_text(encoding="utf-8"),
        extra_flags=flags,
        **({"needs_vec_isa": False} if "needs_vec_isa" in known else {}),
    )
    function = library.te_precision_one_pass
    function.restype = None
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *[ctypes.c_int64] * len(Places._fields),
    ]
    return function
