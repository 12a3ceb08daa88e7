"""One pass over a tensor: a Triton kernel on a GPU, C++ or plain torch on a CPU.

    add([Pending(tensor, codes, scale_inv, False, places)], sums, maxima)           # merged into these vectors

The columns (:mod:`te_precision_callbacks.engine.kernels.columns`) are on the tensor's device; nothing waits for it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_lost
from te_precision_callbacks.engine.kernels import eager, eager_blocks, native
from te_precision_callbacks.engine.kernels.columns import Again, ColumnPlaces, Pending

logger = logging.getLogger(__name__)

Pass = Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None]


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """Measure tensors and their quantized forms, each in one pass, and merge the results.

    Args:
        pending: tensors on one device: float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        sums: float64, 1-D, on the device of the tensors; sums and counts are added to it.
        maxima: float64, 1-D, on the same device; merged by maximum.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            add(pending, sums, maxima)
        return
    if _triton is not None:
        pending = _triton.repeat(pending, sums, maxima)
    for taken, together in itertools.groupby(pending, _pass_of):
        taken(list(together), sums, maxima)


def again(pending: Sequence[Pending]) -> Again | None:
    """Return a function for tensors like these, which were measured with Triton; None without one."""
    if _triton is None:
        return None
    found: Again | None = _triton.again(pending)
    return found


def _pass_of(tensor: Pending) -> Pass:
    taken = _pass_for(tensor.values)
    if tensor.in_blocks is not None and taken in (eager.add, native.add):
        return _blocks_in_torch
    return taken


def _blocks_in_torch(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    for tensor in pending:
        whole = ColumnPlaces(tensor.places.moments, tensor.places.maxima, exponents=tensor.places.exponents)
        if max(whole) >= 0:
            add([Pending(tensor.values, None, None, False, whole)], sums, maxima)
        eager_blocks.add(tensor, sums, maxima)


def _pass_for(values: torch.Tensor) -> Pass:
    if values.device.type == "cuda" and values.element_size() <= 4:
        return _on_gpu
    if native.accepts(values):
        return native.add
    return eager.add


def _with_triton(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """Measure with Triton, or in plain torch once Triton is missing or the kernel has failed to compile."""
    global _on_gpu, _triton
    left = list(pending)
    try:
        from te_precision_callbacks.engine.kernels import triton_blocks, triton_kernel

        groups = triton_kernel.group_by_launch([tensor for tensor in pending if tensor.in_blocks is None])
        for together in groups:
            triton_kernel.add_group(together, sums, maxima)
            done = set(map(id, together))
            left = [tensor for tensor in left if id(tensor) not in done]
        triton_kernel.remember(pending, groups)
        _triton = triton_kernel
        while left:
            triton_blocks.add(left[0], sums, maxima)
            del left[0]
    except (TypeError, ValueError, torch.OutOfMemoryError):
        raise  # not caused by the kernel
    except Exception as error:
        if is_lost(error):
            raise  # nothing can run on this GPU any more
        _on_gpu = eager.add
        _triton = None
        logger.warning(
            "Statistics on the GPU use plain torch operations, which are slower but give the same results: the"
            " Triton kernel failed (%s: %s).",
            type(error).__name__,
            error,
        )
        add(left, sums, maxima)


_on_gpu: Pass = _with_triton

_triton: Any = None
"""The module of Triton's kernel, after a launch."""
