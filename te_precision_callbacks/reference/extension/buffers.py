"""Makes the tensors that a family of quantizers writes to.

Usage::

    scales = padded(compact, (128, 4))  # zeros around them
    out = build(MXFP8Tensor, MXFP8TensorStorage, quantizer, shape, dtype, device, rowwise_data=data, ...)

``pytorch/csrc/quantizer.cpp`` (TE 2.20): the storage class for an internal quantizer, else the tensor class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Shapes = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Of the data and of the scales of each direction, ``rowwise`` and ``columnwise``."""


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
        device: the device of the buffers.
        buffers: arguments of both classes, by name.
    """
    if quantizer.internal:
        return storage_class(**buffers, quantizer=quantizer, fake_dtype=dtype)
    shape = list(shape)
    return tensor_class(
        **buffers, quantizer=quantizer, shape=shape, stride=contiguous_stride(shape), dtype=dtype, device=device
    )


def empty(shape: Sequence[int], element: torch.dtype, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """An unwritten buffer. Without an accelerator there is no pinned memory, and none is requested."""
    return torch.empty(list(shape), dtype=element, device=device, pin_memory=pin_memory and torch.cuda.is_available())


def zeros(shape: Sequence[int], element: torch.dtype, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """A buffer of scales: its padding is 0, which upstream mostly leaves unwritten."""
    return empty(shape, element, device, pin_memory).zero_()


def usages(quantizer: Any) -> dict[str, bool]:
    """Return the directions requested of a quantizer."""
    return {"rowwise": bool(quantizer.rowwise_usage), "columnwise": bool(quantizer.columnwise_usage)}


def directions(
    quantizer: Any,
    device: torch.device,
    shapes: Shapes,
    scale_type: torch.dtype,
    pin_memory: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Return data and scales by the argument names of Transformer Engine's classes; None for other directions.

    Args:
        quantizer: gives the usages.
        device, shapes, pin_memory: of the buffers.
        scale_type: the type of the scales, which are 0; data is uint8 and not written.
    """
    buffers: dict[str, torch.Tensor | None] = {}
    for direction, usage in usages(quantizer).items():
        data, scales = shapes[direction]
        buffers[f"{direction}_data"] = empty(data, torch.uint8, device, pin_memory) if usage else None
        buffers[f"{direction}_scale_inv"] = zeros(scales, scale_type, device, pin_memory) if usage else None
    return buffers


def fit_directions(quantizer: Any, out: Any, device: torch.device, shapes: Shapes, scale_type: torch.dtype) -> None:
    """Give ``out`` data and scales for exactly the requested directions.

    Args:
        quantizer: gives the usages.
        out: a tensor with ``_rowwise_data``, ``_rowwise_scale_inv`` and the same columnwise.
        device, shapes: of new buffers.
        scale_type: the type of the scales; data is uint8.
    """
    for direction, usage in usages(quantizer).items():
        data_name, scales_name = f"_{direction}_data", f"_{direction}_scale_inv"
        if not usage:
            setattr(out, data_name, None)
            setattr(out, scales_name, None)
            continue
        if getattr(out, data_name) is None:
            setattr(out, data_name, empty(shapes[direction][0], torch.uint8, device))
        if getattr(out, scales_name) is None:
            setattr(out, scales_name, zeros(shapes[direction][1], scale_type, device))


def written(out: Any) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """Of each direction that ``out`` has: whether it is columnwise, its data, and its scales."""
    for columnwise, direction in enumerate(("rowwise", "columnwise")):
        data = getattr(out, f"_{direction}_data")
        if data is not None:
            yield bool(columnwise), data, getattr(out, f"_{direction}_scale_inv")


def padded(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A matrix with zeros after its rows and columns.

    Args:
        scales: [rows, columns].
        shape: at least as many rows and columns.
    """
    rows, columns = scales.shape
    out = scales.new_zeros(tuple(shape))
    out[:rows, :columns] = scales
    return out


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """All dimensions but the last one merged, and the last one; a scalar is [1, 1]."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) else (1, 1)


def transposed_shape(shape: Sequence[int]) -> list[int]:
    """The shape with the last dimension moved to the front."""
    return [*shape[-1:], *shape[:-1]]


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def is_noop(noop: torch.Tensor | None) -> bool:
    """Return whether a no-op flag forbids writing."""
    return noop is not None and bool(noop.view(-1)[0] == 1.0)


def contiguous_stride(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * shape[index + 1]
    return strides


def overwrite(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write to the memory of ``target`` as a kernel does, even if it was made under ``torch.inference_mode``."""
    if not target.is_inference():
        return target.copy_(value)
    with torch.inference_mode():
        return target.copy_(value)
