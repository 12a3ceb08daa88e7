"""The memory layouts of quantized tensors, and their conversion to a plain layout.

Read from Transformer Engine 2.20.2: ``pytorch/tensor/storage/*.py``, ``common/cast/mxfp8/swizzle.cuh`` and cuBLAS's "1D
block scaling factors layout" (the order of swizzled scales), ``common/cast/nvfp4/dequantize_nvfp4.cuh``.

For a tensor with M rows (its leading dimensions flattened) and K columns:

============== =============================== ====================== ==============================================
format         data                            block of the data      scales, as stored
============== =============================== ====================== ==============================================
per-tensor FP8 M x K, or its transpose         all                    float32, [1]
MXFP8          M x K, columnwise too           1 x 32; columnwise 32  E8M0, padded to multiples of 128 x 4; columnwise
                                               x 1                    of 4 x 128
FP8, 1D blocks M x K; columnwise the transpose 1 x 128                float32, transposed, padded to a multiple of 4
                                                                      along the data's rows
FP8, 2D blocks M x K; columnwise the transpose 128 x 128              float32, padded to a multiple of 4 columns
NVFP4          M x K; columnwise the           1 x 16                 E4M3, padded to multiples of 128 x 4; and amax,
               transpose; two codes per byte                          float32, [1] or one per row
============== =============================== ====================== ==============================================
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.blocks import Block
from te_precision_callbacks.base.numerics.formats import FloatFormat
from te_precision_callbacks.base.numerics.scaling import nvfp4_factors
from te_precision_callbacks.base.vocabulary import BLOCK_1D as BLOCK_1D
from te_precision_callbacks.base.vocabulary import BLOCK_2D as BLOCK_2D
from te_precision_callbacks.base.vocabulary import MXFP8 as MXFP8
from te_precision_callbacks.base.vocabulary import NVFP4 as NVFP4
from te_precision_callbacks.base.vocabulary import PER_TENSOR as PER_TENSOR

SWIZZLE_ROWS = 128
SWIZZLE_COLUMNS = 4
"""Size of the tile of scales that a GEMM of MXFP8 or NVFP4 reads at once."""


class LayoutError(PrecisionDebugError, ValueError):
    """A quantized tensor has an unknown layout, or data that do not match its shape."""


class ScaleMemory(NamedTuple):
    """The scales of blocks in memory order.

    Attributes:
        matrix: float32, or codes as uint8; [rows of blocks, columns of blocks] or larger, as :func:`unswizzle`
            accepts it.
        swizzled: whether the scales are in GEMM order.
        transposed: whether swizzled scales are [columns of blocks, rows of blocks].
    """

    matrix: torch.Tensor
    swizzled: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Stored:
    """One direction of a quantized tensor, rowwise or columnwise.

    Attributes:
        codes: uint8, [rows, columns], as in memory; FP4 has two codes per byte, the even one in the low half.
        transposed: whether the rows of the codes are the last dimension of the tensor.
        scale_memory: float32, or codes of ``scale_format`` as uint8.
        scale_format: E8M0 or E4M3; None if the scales are float32.
        block: numbers of rows and columns of a block of the codes.
        amax: NVFP4 only: float32, [1], or [rows] with an amax per row.
        largest_scale: NVFP4 only: the largest scale in E4M3, 448 or 256.
        shape: the tensor's shape; [M, K] for columnwise NVFP4 data.
        swizzled: whether the scales in memory are in GEMM order.
        hadamard: whether a random Hadamard transform was applied before quantization.
    """

    mode: str
    columnwise: bool
    codes: torch.Tensor
    transposed: bool
    element_format: FloatFormat
    scale_memory: ScaleMemory
    scale_format: FloatFormat | None
    block: Block
    shape: tuple[int, ...]
    stored_scale_shape: tuple[int, ...]
    amax: torch.Tensor | None = None
    largest_scale: float | None = None
    swizzled: bool = False
    hadamard: bool = False

    @functools.cached_property
    def scales(self) -> torch.Tensor:
        """Stored scale per block: [rows of blocks, columns of blocks]."""
        memory = self.scale_memory
        if self.mode == PER_TENSOR:  # even an empty tensor has a scale
            return memory.matrix
        padded = unswizzle(memory.matrix) if memory.swizzled else memory.matrix
        rows, columns = blocks.block_counts(self.matrix_shape, self.block)
        return (padded.t() if memory.transposed else padded)[:rows, :columns]

    def elements(self, rows: slice = slice(None)) -> torch.Tensor:
        codes = unpack(self.codes[rows], self.element_format)
        return self.element_format.decode(codes)

    def block_scales(self) -> torch.Tensor:
        if self.scale_format is None:
            return self.scales
        return self.scale_format.decode(self.scales)

    def factors(self) -> torch.Tensor:
        """Return each block's factor from decoded code to value: float32, in the shape of :attr:`scales`."""
        scales = self.block_scales()
        if self.amax is None or self.largest_scale is None:
            return scales
        return nvfp4_factors(scales, self.amax.reshape(-1, 1), self.largest_scale)

    def matrix(self) -> torch.Tensor:
        """Dequantize in memory order: float32, [rows, columns]."""
        return blocks.multiply_by_blocks(self.elements(), self.factors(), self.block)

    def dequantized(self) -> torch.Tensor:
        """Dequantize: float32, in the tensor's shape; still transformed if :attr:`hadamard`."""
        return self.as_tensor(self.matrix())

    def as_tensor(self, matrix: torch.Tensor) -> torch.Tensor:
        return (matrix.t() if self.transposed else matrix).reshape(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns * 2 if self.element_format.bits == 4 else columns


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are not quantized, for a check without a call."""


class _Unquantized(threading.local):
    """The last result of a quantizing kernel before its quantization, if this thread wants it.

    The reference backend sets it; kernels of a GPU have this result in registers only.
    """

    wanted: bool = False
    result: torch.Tensor | None = None


unquantized = _Unquantized()


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Reorder scales, [a multiple of 128, a multiple of 4], for a GEMM; transposed for columnwise MXFP8 data.

    Tiles of 128 x 4 are stored in row-major order. Within a tile, the scale of row i and column j is at ``(i % 32) * 16
    + (i // 32) * 4 + j``.
    """
    rows, columns = tiles(scales)
    tiled = scales.reshape(rows, 4, 32, columns, SWIZZLE_COLUMNS)
    return tiled.permute(0, 3, 2, 1, 4).reshape(scales.shape)


def unswizzle(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = tiles(scales)
    tiled = scales.reshape(rows, columns, 32, 4, SWIZZLE_COLUMNS)
    return tiled.permute(0, 3, 2, 1, 4).reshape(scales.shape)


def unpack(codes: torch.Tensor, element_format: FloatFormat) -> torch.Tensor:
    """Return one code a byte."""
    if element_format.bits == 4:
        return unpack_fp4(codes)
    return codes


def unpack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Unpack FP4 codes to one per byte: uint8, the last dimension twice as long."""
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def tiles(scales: torch.Tensor) -> tuple[int, int]:
    if scales.dim() != 2 or scales.shape[0] % SWIZZLE_ROWS or scales.shape[1] % SWIZZLE_COLUMNS:
        raise LayoutError(
            f"Scales for a GEMM come in tiles of {SWIZZLE_ROWS} x {SWIZZLE_COLUMNS}; the shape {tuple(scales.shape)} is"
            " not a multiple."
        )
    return scales.shape[0] // SWIZZLE_ROWS, scales.shape[1] // SWIZZLE_COLUMNS
