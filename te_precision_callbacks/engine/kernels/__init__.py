"""One pass over a tensor: a Triton kernel on a GPU, C++ or plain torch on a CPU.

    add([Pending(tensor, codes, scale_inv, False, places)], sums, maxima)           # merged into these vectors

The columns (:mod:`te_precision_callbacks.engine.kernels.columns`) are on the tensor's device; nothing waits for it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from te_precision_callbacks.engine.kernels import eager, eager_blocks, native
from te_precision_callbacks.engine.kernels.columns import ColumnPlaces, Pending, Repeat

_OF_TRITON = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

Pass = Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], Repeat | None]


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> Repeat | None:
    """Measure tensors and their quantized forms, each in one pass, and merge the results.

    Args:
        pending: tensors on one device: float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        sums: float64, 1-D, on the device of the tensors; sums and counts are added to it.
        maxima: float64, 1-D, on the same device; merged by maximum.

    Returns:
        A function that measures such tensors with less work of the host, if there is one.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return add(pending, sums, maxima)
    repeat = None
    for measure, group in itertools.groupby(pending, _pass_of):
        tensors = list(group)
        repeat = measure(tensors, sums, maxima)
        repeat = repeat if len(tensors) == len(pending) else None
    return repeat


def _pass_of(tensor: Pending) -> Pass:
    measure = _pass_for(tensor.values)
    if tensor.in_blocks is not None and measure in (eager.add, native.add):
        return _blocks_in_torch
    return measure


def _blocks_in_torch(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    for tensor in pending:
        whole = ColumnPlaces(tensor.places.moments, tensor.places.maxima, exponents=tensor.places.exponents)
        if max(whole) >= 0:
            add([Pending(tensor.values, None, None, False, whole)], sums, maxima)
        eager_blocks.add(tensor, sums, maxima)


def _pass_for(values: torch.Tensor) -> Pass:
    if values.device.type == "cuda" and values.dtype in _OF_TRITON:
        return _on_gpu
    if native.accepts(values):
        return native.add
    return eager.add


def _with_triton(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> Repeat | None:
    """Measure with Triton, or in plain torch once Triton is missing or the kernel has failed to compile."""
    global _on_gpu
    unmeasured = list(pending)
    try:
        from te_precision_callbacks.engine.kernels import triton_blocks, triton_kernel

        launches = []
        dense = [tensor for tensor in pending if tensor.in_blocks is None]
        groups = triton_kernel.group_by_launch(dense)
        for group in groups:
            launch = triton_kernel.add_group(dense, group, sums, maxima)
            if launch is not None:
                launches.append(launch)
            for index in group:
                unmeasured.remove(dense[index])
        if not unmeasured and len(launches) == len(groups):
            return functools.partial(triton_kernel.repeat, launches)
        while unmeasured:
            triton_blocks.add(unmeasured[0], sums, maxima)
            del unmeasured[0]
    except (TypeError, ValueError):
        raise  # not caused by the kernel
    except Exception as error:
        eager.replace_triton("Statistics", error)
        _on_gpu = eager.add
        add(unmeasured, sums, maxima)
    return None


_on_gpu: Pass = _with_triton
