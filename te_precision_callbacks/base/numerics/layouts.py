"""The memory layouts of Transformer Engine's quantized tensors, and their conversion to a plain layout.

Usage::

    part = read_stored(quantized, columnwise=False)  # None without rowwise data
    part.codes  # uint8, as stored
    part.scales  # one per block, neither padded nor swizzled
    part.dequantized()  # float32, the tensor's logical shape

Transformer Engine is not imported: tensors and storage classes are recognized by their attributes, so a subclass is
read like its parent. Read from Transformer Engine 2.20.2: ``pytorch/tensor/storage/*.py`` (layouts, and the
arithmetic of their ``dequantize``), ``common/cast/mxfp8/swizzle.cuh`` and cuBLAS's "1D block scaling factors layout"
(the order of swizzled scales), ``common/cast/nvfp4/dequantize_nvfp4.cuh``.

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
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.blocks import Block
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from te_precision_callbacks.base.numerics.scaling import nvfp4_factors
from te_precision_callbacks.base.numerics.scaling_modes import BLOCK_1D as BLOCK_1D
from te_precision_callbacks.base.numerics.scaling_modes import BLOCK_2D as BLOCK_2D
from te_precision_callbacks.base.numerics.scaling_modes import MXFP8 as MXFP8
from te_precision_callbacks.base.numerics.scaling_modes import NVFP4 as NVFP4
from te_precision_callbacks.base.numerics.scaling_modes import PER_TENSOR as PER_TENSOR
from te_precision_callbacks.base.vocabulary import direction_name

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

    def in_rows(self) -> torch.Tensor:
        """Return the scales as [rows of blocks, columns of blocks], with padding."""
        if not self.swizzled:
            return self.matrix
        compact = unswizzle(self.matrix)
        if self.transposed:
            return compact.t()
        return compact


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
        if self.mode == PER_TENSOR:  # even an empty tensor has a scale
            return self.scale_memory.matrix
        rows, columns = blocks.block_counts(self.matrix_shape, self.block)
        return self.scale_memory.in_rows()[:rows, :columns]

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


def is_quantized(tensor: Any) -> bool:
    return scaling_mode(tensor) is not None


def scaling_mode(tensor: Any) -> str | None:
    """Return the scaling mode of a quantized tensor or its storage; None for an unknown format."""
    if type(tensor) is torch.Tensor:  # the most frequent case, for which hasattr is slow
        return None
    if hasattr(tensor, "_fp8_dtype"):
        if hasattr(tensor, "_transpose_invalid"):
            return PER_TENSOR
        if hasattr(tensor, "_is_2D_scaled"):
            if tensor._is_2D_scaled:
                return BLOCK_2D
            return BLOCK_1D
        if hasattr(tensor, "_with_gemm_swizzled_scales"):
            return MXFP8
    elif hasattr(tensor, "_fp4_dtype") and hasattr(tensor, "_with_gemm_swizzled_scales"):
        return NVFP4
    return None


def fp8_format(obj: Any) -> FloatFormat:
    return fp8_format_of(fp8_dtype(obj))


def fp8_dtype(obj: Any) -> Any:
    dtype = getattr(obj, "_fp8_dtype", None)
    if dtype is None:
        return getattr(obj, "dtype", None)
    return dtype


@functools.cache
def fp8_format_of(dtype: Any) -> FloatFormat:
    if getattr(dtype, "name", str(dtype)) == "kFloat8E5M2":
        return E5M2
    return E4M3


def has_scale(tensor: Any) -> bool:
    """Return whether this is a quantized tensor of Transformer Engine, even of an unknown format."""
    if tensor is None or type(tensor) is torch.Tensor:  # the most frequent case, for which hasattr is slow
        return False
    return hasattr(tensor, "_scale_inv") or hasattr(tensor, "_rowwise_scale_inv")


def gemm_operand(tensor: Any, *, columnwise: bool) -> Any:
    """Return the object that a GEMM reads: a part of a hybrid or debug tensor, or an identity quantizer's plain tensor.

    Equals ``pytorch/cpp_extensions/gemm.py: _unwrap_tensor``, and ``DebugQuantizedTensor.get_tensor``.
    """
    if tensor is None or type(tensor) is torch.Tensor:
        return tensor
    if hasattr(tensor, "rowwise_gemm_tensor"):
        part = tensor.columnwise_gemm_tensor if columnwise else tensor.rowwise_gemm_tensor
        return gemm_operand(part, columnwise=columnwise)
    if hasattr(tensor, "_rowwise_storage"):
        part = tensor._columnwise_storage if columnwise else tensor._rowwise_storage
        return gemm_operand(part, columnwise=columnwise)
    if hasattr(tensor, "_hp_data"):
        return tensor._hp_data
    return tensor


def read_stored(tensor: Any, *, columnwise: bool) -> Stored | None:
    """Return the rowwise or the columnwise data of a quantized tensor, if any.

    Both directions of per-tensor FP8 have the same data, which are read from the layout that exists.

    Raises:
        LayoutError: the tensor's format is unknown, or its buffers do not match.
    """
    mode = scaling_mode(tensor)
    if mode is None:
        raise LayoutError(f"{type(tensor).__name__}: not a quantized tensor of a known format.")
    if mode == PER_TENSOR:
        return _per_tensor(tensor, columnwise)
    direction = direction_name(columnwise)
    data = getattr(tensor, f"_{direction}_data")
    scales = getattr(tensor, f"_{direction}_scale_inv")
    if data is None:
        return None
    if scales is None:
        raise LayoutError(f"The {type(tensor).__name__} has {direction} data but no scales for them.")
    if mode == NVFP4:
        return _nvfp4(tensor, data, scales, columnwise)
    if mode == MXFP8:
        return _mxfp8(tensor, data, scales, columnwise)
    return _block_fp8(tensor, mode, data, scales, columnwise)


def per_tensor_codes(tensor: Any) -> torch.Tensor | None:
    """Return the codes of per-tensor FP8 in the tensor's shape; None if it has no data."""
    data, transposed = _per_tensor_data(tensor, columnwise=False)
    if data is not None and transposed:
        return data.movedim(0, -1)
    return data


def logical_shape(tensor: Any) -> tuple[int, ...]:
    part = read_stored(tensor, columnwise=False) or read_stored(tensor, columnwise=True)
    if part is None:
        raise LayoutError(f"The {type(tensor).__name__} has neither rowwise nor columnwise data.")
    return part.shape


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Reorder scales, [a multiple of 128, a multiple of 4], for a GEMM; transposed for columnwise MXFP8 data.

    Tiles of 128 x 4 are stored in row-major order. Within a tile, the scale of row i and column j is at ``(i % 32) * 16
    + (i // 32) * 4 + j``.
    """
    rows, columns = _tiles(scales)
    tiled = scales.reshape(rows, 4, 32, columns, SWIZZLE_COLUMNS)
    return tiled.permute(0, 3, 2, 1, 4).reshape(scales.shape)


def unswizzle(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = _tiles(scales)
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


def _per_tensor_data(tensor: Any, *, columnwise: bool) -> tuple[torch.Tensor | None, bool]:
    transpose = None if tensor._transpose_invalid else tensor._transpose
    transposed = tensor._data is None or (columnwise and transpose is not None)
    return (transpose if transposed else tensor._data), transposed


def _per_tensor(tensor: Any, columnwise: bool) -> Stored | None:
    data, transposed = _per_tensor_data(tensor, columnwise=columnwise)
    if data is None:
        return None
    codes = _matrix(data, transposed)
    return Stored(
        mode=PER_TENSOR,
        columnwise=columnwise,
        codes=codes,
        transposed=transposed,
        element_format=fp8_format(tensor),
        scale_memory=ScaleMemory(tensor._scale_inv.detach().reshape(1, 1)),
        scale_format=None,
        block=(max(1, codes.shape[0]), max(1, codes.shape[1])),
        shape=_shape(data, transposed),
        stored_scale_shape=tuple(tensor._scale_inv.shape),
    )


def _mxfp8(tensor: Any, data: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Stored:
    codes = _matrix(data, False)
    block = (32, 1) if columnwise else (1, 32)
    # A row of swizzled scales has the blocks of a row, or of a column for columnwise data.
    along = scales.detach().reshape(-1, scales.shape[-1])
    is_swizzled = bool(tensor._with_gemm_swizzled_scales)
    turned = is_swizzled and columnwise
    along = along.reshape(along.shape[::-1]) if turned else along
    return Stored(
        mode=MXFP8,
        columnwise=columnwise,
        codes=codes,
        transposed=False,
        element_format=fp8_format(tensor),
        scale_memory=_scale_memory(
            tensor, along.view(torch.uint8), codes.shape, block, swizzled=is_swizzled, transposed=turned
        ),
        scale_format=E8M0,
        block=block,
        shape=tuple(data.shape),
        stored_scale_shape=tuple(scales.shape),
        swizzled=is_swizzled,
    )


def _block_fp8(tensor: Any, mode: str, data: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Stored:
    codes = _matrix(data, columnwise)
    block = (128, 128) if mode == BLOCK_2D else (1, 128)
    return Stored(
        mode=mode,
        columnwise=columnwise,
        codes=codes,
        transposed=columnwise,
        element_format=fp8_format(tensor),
        scale_memory=_scale_memory(
            tensor, scales.detach() if mode == BLOCK_2D else scales.detach().t(), codes.shape, block
        ),
        scale_format=None,
        block=block,
        shape=_shape(data, columnwise),
        stored_scale_shape=tuple(scales.shape),
    )


def _nvfp4(tensor: Any, data: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Stored:
    codes = _matrix(data, False)
    rows = codes.shape[0]
    columns = codes.shape[1] * 2
    is_swizzled = bool(tensor._with_gemm_swizzled_scales)
    amax = tensor._amax_columnwise if columnwise else tensor._amax_rowwise
    if amax is None:
        raise LayoutError(f"The {type(tensor).__name__} has FP4 data without their amax.")
    block = (1, 16)
    return Stored(
        mode=NVFP4,
        columnwise=columnwise,
        codes=codes,
        transposed=columnwise,
        element_format=E2M1,
        scale_memory=_scale_memory(
            tensor, scales.detach().view(torch.uint8), (rows, columns), block, swizzled=is_swizzled
        ),
        scale_format=E4M3,
        block=block,
        shape=(columns, rows) if columnwise else (*data.shape[:-1], columns),
        stored_scale_shape=tuple(scales.shape),
        amax=amax.detach().float().reshape(-1),
        largest_scale=float(getattr(tensor, "_nvfp4_e4m3_max", E4M3.max)),
        swizzled=is_swizzled,
        hadamard=columnwise and bool(getattr(tensor._quantizer, "with_rht", False)),
    )


def _matrix(data: torch.Tensor, transposed: bool) -> torch.Tensor:
    data = data.detach()
    if data.dim() < 2:
        if transposed:
            return data.reshape(-1, 1)
        return data.reshape(1, -1)
    if transposed:
        return data.reshape(data.shape[0], math.prod(data.shape[1:]))
    return data.reshape(math.prod(data.shape[:-1]), data.shape[-1])


def _shape(data: torch.Tensor, transposed: bool) -> tuple[int, ...]:
    if transposed:
        return (*data.shape[1:], *data.shape[:1])
    return tuple(data.shape)


def _scale_memory(
    tensor: Any,
    scales: torch.Tensor,
    shape: tuple[int, ...] | torch.Size,
    block: Block,
    *,
    swizzled: bool = False,
    transposed: bool = False,
) -> ScaleMemory:
    if swizzled:
        _tiles(scales)
    needed = blocks.block_counts(shape, block)
    has = tuple(scales.shape[::-1] if transposed else scales.shape)
    if len(has) != 2 or any(there < needs for there, needs in zip(has, needed, strict=True)):
        raise LayoutError(
            f"The {type(tensor).__name__} has scales of shape {has}; its data of shape {tuple(shape)} need {needed}."
        )
    return ScaleMemory(scales, swizzled, transposed)


def _tiles(scales: torch.Tensor) -> tuple[int, int]:
    if scales.dim() != 2 or scales.shape[0] % SWIZZLE_ROWS or scales.shape[1] % SWIZZLE_COLUMNS:
        raise LayoutError(
            f"Scales for a GEMM come in tiles of {SWIZZLE_ROWS} x {SWIZZLE_COLUMNS}; the shape {tuple(scales.shape)} is"
            " not a multiple."
        )
    return scales.shape[0] // SWIZZLE_ROWS, scales.shape[1] // SWIZZLE_COLUMNS
