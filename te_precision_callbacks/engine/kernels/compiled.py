"""Simulated recipes and block statistics on a CPU by ``torch.compile``: each input is read once.

A kernel for each function and combination of dtypes is compiled when a tensor of at least :data:`SMALLEST` elements
comes (some seconds each, kept on disk by Inductor); smaller tensors are cheaper in plain torch. Nothing is compiled
before plain torch has measured :data:`PAYS_FROM` elements in this process: a short run would wait longer for the
compiler than for its numbers. Without a C++ compiler everything is done in plain torch, which is logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from te_precision_callbacks.base.compiling import say_not_compiled
from te_precision_callbacks.engine.kernels import eager

logger = logging.getLogger(__name__)

SMALLEST = 16_384
"""Elements from which the compiled pass is taken."""

PAYS_FROM = 2**31
"""Elements of such tensors that plain torch measures before a kernel is compiled: about as long as that takes."""

_PIECE = 2**22
"""Elements per call of a compiled kernel: where torch runs the kernel as plain operations after all, for example under
``torch.compiler.set_stance("force_eager")``, their temporaries stay within 200 MiB."""

_Function = Callable[..., Any]

_kernels: dict[tuple[_Function, tuple[torch.dtype, ...]], _Function] = {}
_failed = False
_in_plain_torch = 0
"""Elements that plain torch has measured although the compiled pass could have measured them."""


def takes(values: torch.Tensor) -> bool:
    """Return whether the compiled pass applies: a large CPU tensor, and no earlier failure.

    The tensor must also be plain (dynamo may not support a subclass), and no dispatch mode may be active: under one
    torch compiles nothing, and never again the functions called meanwhile.
    """
    if _failed or _in_plain_torch < PAYS_FROM or not _could_take(values):
        return False
    return _get_current_dispatch_mode() is None and _has_compiler()


def leaves(values: torch.Tensor) -> None:
    """Count a tensor that plain torch measures."""
    global _in_plain_torch
    if _could_take(values):
        _in_plain_torch += values.numel()


def _could_take(values: torch.Tensor) -> bool:
    return type(values) is torch.Tensor and values.device.type == "cpu" and values.numel() >= SMALLEST


@functools.cache
def _has_compiler() -> bool:
    try:
        from torch._inductor import cpp_builder  # which makes the folder of compiled code

        cpp_builder.get_cpp_compiler()
    except Exception as error:
        say_not_compiled(logger, "Statistics on the CPU are computed by plain torch operations", "thirty", error)
        return False
    return True


def pieces(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix in pieces of rows, each of a size that suits :func:`run`."""
    size = _PIECE if takes(rows) else eager.piece_size(rows)
    return _split(rows, max(1, size // rows.shape[1]))


def _split(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = torch.split(tensor, size)
    return found


def run(function: _Function, rows: torch.Tensor, *others: torch.Tensor) -> Any:
    """``function(rows, *others)``, compiled if :func:`takes` accepts ``rows``; uncompiled if that fails, and for a
    single row, since torch would compile again for it.

    Args:
        function: of whole tensors, without branches on their values. One object for all calls, since it is compiled
            once for each combination of dtypes.
        rows: a matrix; its shape may differ between calls.
        others: further tensors.
    """
    if takes(rows) and rows.shape[0] > 1:
        dtypes = tuple(tensor.dtype for tensor in (rows, *others))
        kernel = _kernels.get((function, dtypes))
        try:
            if kernel is None:
                kernel = _kernels[function, dtypes] = _compiled(function)
            if not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")) and torch.is_autocast_cache_enabled():
                return kernel(rows, *others)
            # torch compiles again if a mode that it guards on differs, so the modes are fixed here.
            with torch.no_grad(), torch.autocast("cpu", enabled=False, cache_enabled=True):
                return kernel(rows, *others)
        except Exception as error:
            _give_up(error)
    leaves(rows)
    return function(rows, *others)


def _compiled(function: Any) -> _Function:
    """The function, compiled, with its own code object: torch gives up after 8 compilations of one code object.

    The 8 serve the caller's remaining modes: inference mode, number of threads, default dtype.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{len(_kernels)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(own, dynamic=True)


def _give_up(error: Exception) -> None:
    global _failed
    if not _failed:
        _failed = True
        say_not_compiled(logger, "Statistics on the CPU are computed by plain torch operations", "thirty", error)
