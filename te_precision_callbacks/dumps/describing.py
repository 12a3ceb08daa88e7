"""Describes a dump in numbers: each tensor, and the blocks and scales of the quantized data.

Usage::

    for tensor in tensors(dump):
        tensor.name, tensor.minimum, tensor.maximum, tensor.mean, tensor.nan, tensor.inf, tensor.zeros
    for direction in directions(dump):
        direction.smallest_factor, direction.largest_factor, direction.largest_block
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.numerics.blocks import tiled
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.header import dtype_name
from te_precision_callbacks.dumps.pieces import PIECE, wide


@dataclass(frozen=True)
class TensorNumbers:
    """A tensor of a dump, with the name that it has there.

    Attributes:
        nbytes: the bytes of its data.
        minimum, maximum, mean: over the finite elements, for complex tensors over their magnitudes; nan if there are
            none.
        nan, inf, zeros: number of such elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    minimum: float
    maximum: float
    mean: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True)
class BlockAmax:
    """A block, by its row and column among the blocks, and the largest magnitude in it."""

    index: tuple[int, int]
    amax: float
    factor: float


@dataclass(frozen=True)
class DirectionNumbers:
    """The blocks of a quantized tensor's rowwise or columnwise data.

    A block's codes are multiplied by its factor.

    Attributes:
        name: "rowwise" or "columnwise".
        blocks: number of all blocks.
        zero_blocks: number of blocks that hold only zeros.
        smallest_factor, largest_factor: over the finite factors above 0; nan if there are none.
        at_largest_code: number of blocks with an element at the format's largest number or beyond.
        smallest_block, largest_block: the blocks with the smallest amax above 0, and with the largest amax, of the
            dequantized numbers; None if there are none.
    """

    name: str
    blocks: int
    zero_blocks: int
    smallest_factor: float
    largest_factor: float
    at_largest_code: int
    smallest_block: BlockAmax | None
    largest_block: BlockAmax | None


def tensors(dump: Dump) -> list[TensorNumbers]:
    """Each tensor of the dump. Packed FP4 codes and bytes of E8M0 count as whole numbers from 0 to 255."""
    return [_tensor(name, tensor) for name, tensor in sorted(dump.tensors.items())]


def directions(dump: Dump) -> list[DirectionNumbers]:
    """Each direction of the quantized tensor that the dump has."""
    parts = ((name, dump.part(columnwise=name == "columnwise")) for name in ("rowwise", "columnwise"))
    return [_direction(name, part) for name, part in parts if part is not None]


def _tensor(name: str, tensor: torch.Tensor) -> TensorNumbers:
    flat = tensor.reshape(-1)
    low, high, total, finite, nan, inf, zeros = math.inf, -math.inf, 0.0, 0, 0, 0, 0
    for start in range(0, flat.numel(), PIECE):
        values = wide(flat[start : start + PIECE])
        values = values.abs() if values.is_complex() else values
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        zeros += int((values == 0).sum())
        values = values[values.isfinite()]
        if values.numel():
            finite, total = finite + values.numel(), total + float(values.sum())
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    return TensorNumbers(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        minimum=low if finite else math.nan,
        maximum=high if finite else math.nan,
        mean=total / finite if finite else math.nan,
        nan=nan,
        inf=inf,
        zeros=zeros,
    )


def _direction(name: str, part: Stored) -> DirectionNumbers:
    factors = part.factors()
    amax = _amaxes(part.matrix(), part.block)
    largest_code = _amaxes(part.elements(), part.block) >= part.element_format.max
    usable = factors[(factors > 0) & factors.isfinite()]
    ranked = amax.reshape(-1)
    above = (ranked > 0) & ranked.isfinite()
    smallest = ranked.where(above, math.inf).argmin() if bool(above.any()) else None
    largest = ranked.where(above, -math.inf).argmax() if bool(above.any()) else None
    return DirectionNumbers(
        name=name,
        blocks=factors.numel(),
        zero_blocks=int((ranked == 0).sum()),
        smallest_factor=float(usable.min()) if usable.numel() else math.nan,
        largest_factor=float(usable.max()) if usable.numel() else math.nan,
        at_largest_code=int(largest_code.sum()),
        smallest_block=_block(smallest, amax, factors),
        largest_block=_block(largest, amax, factors),
    )


def _block(place: torch.Tensor | None, amax: torch.Tensor, factors: torch.Tensor) -> BlockAmax | None:
    if place is None:
        return None
    row, column = divmod(int(place), amax.shape[1])
    return BlockAmax((row, column), float(amax[row, column]), float(factors[row, column]))


def _amaxes(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block; NaN for a block with a NaN."""
    return tiled(matrix.abs(), block).amax((1, 3))
