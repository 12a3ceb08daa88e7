"""Simulated recipes and block statistics on a CPU by ``torch.compile``, which reads each input once.

Tensors of at least :data:`SMALLEST` elements are measured by compiled kernels, once plain torch has measured
:data:`PAYS_FROM` elements. Each function and combination of dtypes is compiled once, in some seconds; Inductor caches
the kernel on disk. Without a C++ compiler, plain torch measures everything, which is logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from te_precision_callbacks.base.compiling import warn_not_compiled
from te_precision_callbacks.engine.kernels import eager

logger = logging.getLogger(__name__)

SMALLEST = 16_384
"""Minimum number of elements for the compiled pass."""

PAYS_FROM = 2**31
"""Number of elements measured in plain torch before kernels are compiled, which takes about as long."""

_PIECE = 2**22
"""Elements per call of a compiled kernel. If torch runs it as plain operations, for example under
``torch.compiler.set_stance("force_eager")``, temporaries stay within 200 MiB.
"""

_Function = Callable[..., Any]

_kernels: dict[tuple[_Function, tuple[torch.dtype, ...]], _Function] = {}
_failed = False
_in_plain_torch = 0
"""Elements measured in plain torch that the compiled pass could have measured."""


def accepts(values: torch.Tensor) -> bool:
    """Return whether the compiled pass applies: a large CPU tensor, and no earlier failure.

    Excludes tensor subclasses, which dynamo may not support, and calls under a dispatch mode: torch does not compile
    there, and never compiles a function later that it called there.
    """
    if _failed or _in_plain_torch < PAYS_FROM or not _could_take(values):
        return False
    return _get_current_dispatch_mode() is None and _has_compiler()


def count_uncompiled(values: torch.Tensor) -> None:
    global _in_plain_torch
    if _could_take(values):
        _in_plain_torch += values.numel()


def _could_take(values: torch.Tensor) -> bool:
    return type(values) is torch.Tensor and values.device.type == "cpu" and values.numel() >= SMALLEST


@functools.cache
def _has_compiler() -> bool:
    try:
        from torch._inductor import cpp_builder  # which creates the folder of compiled code

        cpp_builder.get_cpp_compiler()
    except Exception as error:
        warn_not_compiled(logger, "Statistics on the CPU are computed by plain torch operations", "thirty", error)
        return False
    return True


def pieces(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a matrix into pieces of rows that suit :func:`run`."""
    size = _PIECE if accepts(rows) else eager.piece_size(rows)
    return torch.split(rows, max(1, size // rows.shape[1]))


def run(function: _Function, rows: torch.Tensor, *others: torch.Tensor) -> Any:
    """Call ``function(rows, *others)``, compiled if :func:`accepts` accepts ``rows``.

    It runs uncompiled if compilation fails, and for a single row, since torch would recompile.

    Args:
        function: a function without branches on values; the same object in all calls, since it is compiled once per
            combination of dtypes.
        rows: a matrix; its shape may differ between calls.
    """
    if accepts(rows) and rows.shape[0] > 1:
        dtypes = tuple(tensor.dtype for tensor in (rows, *others))
        kernel = _kernels.get((function, dtypes))
        try:
            if kernel is None:
                kernel = _compile(function)
                _kernels[function, dtypes] = kernel
            if not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")) and torch.is_autocast_cache_enabled():
                return kernel(rows, *others)
            # torch recompiles if a guarded mode differs, so the modes are fixed here.
            with torch.no_grad(), torch.autocast("cpu", enabled=False, cache_enabled=True):
                return kernel(rows, *others)
        except Exception as error:
            _give_up(error)
    count_uncompiled(rows)
    return function(rows, *others)


def _compile(function: Any) -> _Function:
    """Compile a copy of the function with its own code object, since torch compiles a code object at most 8 times.

    These 8 are left for modes of the caller: inference mode, number of threads, default dtype.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{len(_kernels)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(own, dynamic=True)


def _give_up(error: Exception) -> None:
    global _failed
    if not _failed:
        _failed = True
        warn_not_compiled(logger, "Statistics on the CPU are computed by plain torch operations", "thirty", error)
