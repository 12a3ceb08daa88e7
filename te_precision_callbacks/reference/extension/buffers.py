"""Making the tensors that a family of quantizers writes to.

Usage::

    scales = padded(compact, (128, 4))  # zeros around them
    out = build(MXFP8Tensor, MXFP8TensorStorage, quantizer, shape, dtype, device, rowwise_data=data, ...)

``pytorch/csrc/quantizer.cpp`` (TE 2.20): the storage class for an internal quantizer, else the tensor class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def build(
    tensor_class: type,
    storage_class: type,
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    **buffers: Any,
) -> Any:
    """A tensor of Transformer Engine's around buffers.

    Args:
        tensor_class: for a quantizer that is not internal.
        storage_class: for an internal quantizer.
        quantizer: the tensor's own.
        shape: logical shape.
        dtype: nominal type.
        device: of the buffers.
        buffers: what both classes take by these names.
    """
    if quantizer.internal:
        return storage_class(**buffers, quantizer=quantizer, fake_dtype=dtype)
    shape = list(shape)
    return tensor_class(
        **buffers, quantizer=quantizer, shape=shape, stride=contiguous_stride(shape), dtype=dtype, device=device
    )


def empty(shape: Sequence[int], element: torch.dtype, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """A buffer that is not written. Where there is no accelerator there is no pinned memory, and none is asked for."""
    return torch.empty(list(shape), dtype=element, device=device, pin_memory=pin_memory and torch.cuda.is_available())


def zeros(shape: Sequence[int], element: torch.dtype, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """A buffer of scales: its padding is 0, where upstream mostly leaves what was in the memory."""
    return empty(shape, element, device, pin_memory).zero_()


def padded(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A matrix with zeros after its rows and columns.

    Args:
        scales: [rows, columns].
        shape: at least as many of both.
    """
    rows, columns = scales.shape
    out = scales.new_zeros(tuple(shape))
    out[:rows, :columns] = scales
    return out


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """All dimensions but the last one in one, and the last one; a number alone is [1, 1]."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) else (1, 1)


def transposed_shape(shape: Sequence[int]) -> list[int]:
    """The last dimension in front."""
    return [*shape[-1:], *shape[:-1]]


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def is_noop(noop: torch.Tensor | None) -> bool:
    """Whether a no-op flag says that nothing is to be written."""
    return noop is not None and bool(noop.view(-1)[0] == 1.0)


def contiguous_stride(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next in each dimension."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * shape[index + 1]
    return strides
