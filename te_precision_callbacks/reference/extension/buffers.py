"""Shapes of buffers, writing to them as a kernel does, and the order of the scales in them.

A GEMM of MXFP8 or NVFP4 reads swizzled scales (``pytorch/csrc/extensions/swizzle.cpp``, TE 2.20; the order is in
:mod:`te_precision_callbacks.base.numerics.layouts`). Padding of the scales is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics import layouts
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.te.tensors import read_stored


def written(out: Any) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    for columnwise, direction in enumerate(("rowwise", "columnwise")):
        data = getattr(out, f"_{direction}_data")
        if data is not None:
            yield bool(columnwise), data, getattr(out, f"_{direction}_scale_inv")


def pad(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Pad a matrix with zero rows and columns, up to ``shape``."""
    below, right = (size - scale_size for size, scale_size in zip(shape, scales.shape, strict=True))
    return torch.nn.functional.pad(scales, (0, right, 0, below))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Merge all dimensions but the last one; a scalar is [1, 1]."""
    if len(shape):
        return (math.prod(shape[:-1]), shape[-1])
    return (1, 1)


def transposed_shape(shape: Sequence[int]) -> list[int]:
    return [*shape[-1:], *shape[:-1]]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def is_noop(noop: torch.Tensor | None) -> bool:
    return noop is not None and bool(noop.view(-1)[0] == 1.0)


def overwrite(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write to the memory of ``target`` as a kernel does, even if it was created under ``torch.inference_mode``."""
    if not target.is_inference():
        return target.copy_(value)
    with torch.inference_mode():
        return target.copy_(value)


def as_stored(scales: torch.Tensor, shape: Sequence[int], *, along_columns: bool, swizzled: bool) -> torch.Tensor:
    """Return scales, uint8, one for each block, as stored in ``shape``: padded, and optionally swizzled.

    With ``along_columns``, a GEMM sums over the rows of ``scales`` (MXFP8's columnwise data), so their transpose is
    swizzled.
    """
    out = pad(scales, shape)
    if not swizzled or not out.numel():
        return out
    if along_columns:
        return layouts.swizzle(out.t()).reshape(tuple(shape))
    return layouts.swizzle(out)


@export
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Swizzle the scales of an MXFP8 or NVFP4 tensor in both directions, if not swizzled yet; skip other tensors."""
    if not _needs_swizzle(tensor):
        return
    for columnwise in (False, True):
        _swizzle(tensor, columnwise)
    tensor._with_gemm_swizzled_scales = True


@export
def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """Swizzle the scales of exactly one direction of several tensors; skip tensors marked as swizzled.

    The tensors' flags do not change, as in the compiled extension: the caller sets them after both directions.
    """
    for tensor in tensors:
        if _needs_swizzle(tensor):
            _swizzle(tensor, columnwise_usage)


def _needs_swizzle(tensor: Any) -> bool:
    return not getattr(tensor, "_with_gemm_swizzled_scales", True)


def _swizzle(tensor: Any, columnwise: bool) -> None:
    part = read_stored(tensor, columnwise=columnwise)
    if part is None:
        return
    along_columns = columnwise and part.mode == layouts.MXFP8
    name = "_columnwise_scale_inv" if columnwise else "_rowwise_scale_inv"
    setattr(tensor, name, as_stored(part.scales, part.stored_scale_shape, along_columns=along_columns, swizzled=True))
