"""Shapes of buffers, and writing to them as a kernel does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def written(out: Any) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    for columnwise, direction in enumerate(("rowwise", "columnwise")):
        data = getattr(out, f"_{direction}_data")
        if data is not None:
            yield bool(columnwise), data, getattr(out, f"_{direction}_scale_inv")


def padded(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A matrix with zeros after its rows and columns, up to ``shape``."""
    rows, columns = scales.shape
    out = scales.new_zeros(tuple(shape))
    out[:rows, :columns] = scales
    return out


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """All dimensions but the last one merged, and the last one; a scalar is [1, 1]."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) else (1, 1)


def transposed_shape(shape: Sequence[int]) -> list[int]:
    return [*shape[-1:], *shape[:-1]]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def is_noop(noop: torch.Tensor | None) -> bool:
    return noop is not None and bool(noop.view(-1)[0] == 1.0)


def contiguous_stride(shape: Sequence[int]) -> list[int]:
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
