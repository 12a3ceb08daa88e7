"""Transformer Engine's quantized tensors, read by their attributes: Transformer Engine is not imported.

Usage::

    part = read_stored(quantized, columnwise=False)  # None without rowwise data
    part.codes  # uint8, as stored
    part.scales  # one per block, neither padded nor swizzled
    part.dequantized()  # float32, the tensor's logical shape

A subclass is read like its parent. Read from Transformer Engine 2.20.2: ``pytorch/tensor/storage/*.py`` (attributes,
and the arithmetic of their ``dequantize``). :mod:`te_precision_callbacks.base.numerics.layouts` has the layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.blocks import Block
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from te_precision_callbacks.base.numerics.layouts import PLAIN, LayoutError, ScaleMemory, Stored, tiles
from te_precision_callbacks.base.vocabulary import BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, PER_TENSOR, direction_name

FP8_FORM = operator.attrgetter("__class__", "_fp8_dtype.real")
"""FP8 tensor -> its class and the number of its dtype, without a Python function."""

PER_TENSOR_PARTS = operator.attrgetter("_data", "_transpose", "_scale_inv", "_quantizer")
"""FP8 tensor with one scale -> its codes, their transpose, the scale and the quantizer."""

FORM_READERS: dict[type, Callable[[Any], object]] = dict.fromkeys(PLAIN, operator.attrgetter("dtype"))
"""Class of tensors -> the function that reads what :func:`form_of` returns."""


def form_of(tensor: Any) -> object:
    """Return the dtype of a plain tensor; of a quantized one the class, the dtype and the class of its quantizer."""
    kind = type(tensor)
    if kind not in FORM_READERS:
        paths = [path for path in ("_fp8_dtype.real", "_quantizer.__class__") if hasattr(tensor, path.split(".")[0])]
        FORM_READERS[kind] = operator.attrgetter("__class__", *paths)
    return FORM_READERS[kind](tensor)


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


def quantizer_of(tensor: Any) -> Any:
    return getattr(tensor, "_quantizer", None)


def has_quantizer(tensor: Any) -> bool:
    """Return whether this is a tensor of Transformer Engine, of any format."""
    return hasattr(tensor, "_quantizer")


def is_hybrid(tensor: Any) -> bool:
    """Return whether the tensor has another format in each direction."""
    return hasattr(tensor, "_rowwise_storage")


def part_of(tensor: Any, *, columnwise: bool) -> Any:
    """Return the part of a hybrid tensor for a direction; other tensors have both."""
    if not is_hybrid(tensor):
        return tensor
    return tensor._columnwise_storage if columnwise else tensor._rowwise_storage


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
    if is_hybrid(tensor):
        return gemm_operand(part_of(tensor, columnwise=columnwise), columnwise=columnwise)
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
    return _in_blocks(tensor, mode, data, scales, columnwise)


def per_tensor_codes(tensor: Any) -> torch.Tensor | None:
    """Return the codes of per-tensor FP8 in the tensor's shape; None if it has no data."""
    data, transposed = _per_tensor_data(tensor, columnwise=False)
    if data is not None and transposed:
        return data.movedim(0, -1)
    return data


def read_either(tensor: Any) -> Stored | None:
    """Return the rowwise data of a quantized tensor, or the columnwise ones if it has only those."""
    return read_stored(tensor, columnwise=False) or read_stored(tensor, columnwise=True)


def any_codes(tensor: Any) -> torch.Tensor:
    """Return the codes of a quantized tensor, rowwise or else columnwise, in the shape in memory."""
    names = ("_data", "_rowwise_data", "_transpose", "_columnwise_data")
    stored: torch.Tensor = next(codes for name in names if (codes := getattr(tensor, name, None)) is not None)
    return stored


def nvfp4_amax(tensor: Any) -> torch.Tensor:
    amax: torch.Tensor | None = tensor._amax_rowwise
    return tensor._amax_columnwise if amax is None else amax


def is_scaled_in_2d(tensor: Any) -> bool:
    """Return whether the blocks of MXFP8 or NVFP4 were quantized in squares, with equal scales in a square."""
    return bool(getattr(tensor._quantizer, "with_2d_quantization", False))


def stored_shape(tensor: Any) -> tuple[int, ...]:
    part = read_either(tensor)
    if part is None:
        raise LayoutError(f"The {type(tensor).__name__} has neither rowwise nor columnwise data.")
    return part.shape


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
        shape=_shape(data.shape, transposed),
        stored_scale_shape=tuple(tensor._scale_inv.shape),
    )


_BLOCKS: dict[str, Block] = {BLOCK_1D: (1, 128), BLOCK_2D: (128, 128), MXFP8: (1, 32), NVFP4: (1, 16)}

_SCALE_FORMATS = {MXFP8: E8M0, NVFP4: E4M3}
"""Scaling mode -> the format of its scales, if they are stored as codes."""


def _in_blocks(tensor: Any, mode: str, data: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Stored:
    transposed = columnwise and mode != MXFP8
    codes = _matrix(data, transposed)
    block = _BLOCKS[mode]
    element_format = E2M1 if mode == NVFP4 else fp8_format(tensor)
    in_byte = 8 // element_format.bits
    scale_format = _SCALE_FORMATS.get(mode)
    swizzled = scale_format is not None and bool(tensor._with_gemm_swizzled_scales)
    turned = False
    along = scales.detach()
    if scale_format is not None:
        along = along.view(torch.uint8)
    if mode == BLOCK_1D:
        along = along.t()
    elif mode == MXFP8:
        along = along.reshape(-1, scales.shape[-1])
        if columnwise:
            block = (32, 1)
            # A row of swizzled scales has the blocks of a row, or of a column for columnwise data.
            turned = swizzled
            along = along.reshape(along.shape[::-1]) if turned else along
    if swizzled:
        tiles(along)  # which raises
    matrix_shape = (codes.shape[0], codes.shape[1] * in_byte)
    needed = blocks.block_counts(matrix_shape, block)
    has = tuple(along.shape[::-1] if turned else along.shape)
    if len(has) != 2 or any(there < needs for there, needs in zip(has, needed, strict=True)):
        raise LayoutError(
            f"The {type(tensor).__name__} has scales of shape {has}; its data of shape {matrix_shape} need {needed}."
        )
    part = Stored(
        mode=mode,
        columnwise=columnwise,
        codes=codes,
        transposed=transposed,
        element_format=element_format,
        scale_memory=ScaleMemory(along, swizzled, turned),
        scale_format=scale_format,
        block=block,
        shape=_shape((*data.shape[:-1], data.shape[-1] * in_byte), transposed),
        stored_scale_shape=tuple(scales.shape),
        swizzled=swizzled,
    )
    if mode != NVFP4:
        return part
    amax = tensor._amax_columnwise if columnwise else tensor._amax_rowwise
    if amax is None:
        raise LayoutError(f"The {type(tensor).__name__} has FP4 data without their amax.")
    return dataclasses.replace(
        part,
        amax=amax.detach().float().reshape(-1),
        largest_scale=float(getattr(tensor, "_nvfp4_e4m3_max", E4M3.max)),
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


def _shape(memory: Sequence[int], transposed: bool) -> tuple[int, ...]:
    if transposed:
        return (*memory[1:], memory[0])
    return tuple(memory)
