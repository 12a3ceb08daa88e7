"""Reading tensors, quantized or not, as matrices of float32.

Usage::

    matrix = operand(tensor, rowwise=True, name="A")
    matrix.values  # float32, [rows, columns], without the scale
    matrix.scale_inv  # float32, [1], or None
    dequantized(tensor)  # float32, the logical shape

A block-scaled tensor holds different numbers rowwise and columnwise, so a reader always says which ones it takes. Per-
tensor FP8 holds the same ones, in one layout or in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.reference.errors import ReferenceBackendError, UnsupportedRecipeError
from te_precision_callbacks.reference.extension.dtypes import fp8_format
from te_precision_callbacks.reference.extension.float8 import has_any_layout_gemm, is_float8

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Operand:
    """A matrix to multiply.

    Attributes:
        values: float32, [rows, columns], all leading dimensions in one; not yet multiplied by ``scale_inv``.
        scale_inv: float32, shape [1]; None where the values are already the numbers.
        shape: logical shape.
        dtype: type of the numbers: of the tensor itself, or uint8 for FP8 codes.
    """

    values: torch.Tensor
    scale_inv: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether the matrix comes from FP8 codes."""
        return self.dtype == torch.uint8


def operand(tensor: Any, *, rowwise: bool, name: str) -> Operand:
    """Read a GEMM operand.

    Args:
        tensor: plain or quantized.
        rowwise: whether the rowwise or the columnwise data is multiplied.
        name: "A" or "B", for errors.

    Raises:
        ReferenceBackendError: the data that the GPU would need is not there.
        UnsupportedRecipeError: a format that the reference backend does not have.
    """
    if is_float8(tensor):
        return _float8_operand(tensor, rowwise, name)
    values = _plain(tensor)
    if values.dtype not in HIGH_PRECISION:
        raise ReferenceBackendError(f"GEMM operand {name} has type {values.dtype}; float32, float16 or bfloat16 works.")
    return Operand(_matrix(values).float(), None, tuple(values.shape), values.dtype)


def dequantized(tensor: Any) -> torch.Tensor:
    """The numbers of a tensor, float32, in its logical shape."""
    if is_float8(tensor):
        codes, rowwise = tensor._data, True
        if codes is None:
            codes, rowwise = _valid_transpose(tensor), False
        if codes is None:
            raise ReferenceBackendError(f"The {type(tensor).__name__} has neither rowwise nor columnwise data.")
        values = fp8_format(tensor._fp8_dtype).decode(codes)
        values *= tensor._scale_inv.view(())
        return values if rowwise or values.dim() < 2 else values.movedim(0, -1).contiguous()
    return _plain(tensor).float()


def logical_shape(tensor: Any) -> tuple[int, ...]:
    """The shape that a tensor stands for."""
    if is_float8(tensor):
        if tensor._data is not None:
            return tuple(tensor._data.shape)
        return (*tensor._transpose.shape[1:], *tensor._transpose.shape[:1])
    return tuple(_plain(tensor).shape)


def _float8_operand(tensor: Any, rowwise: bool, name: str) -> Operand:
    fmt = fp8_format(tensor._fp8_dtype)
    data, transpose = tensor._data, _valid_transpose(tensor)
    # One-layout GPUs read the stored transpose for columnwise usage; the others read whichever layout is there.
    any_layout = has_any_layout_gemm()
    if data is not None and (rowwise or any_layout):
        values = fmt.decode(_matrix(data))
    elif transpose is not None and (any_layout or not rowwise):
        values = fmt.decode(transpose.reshape(transpose.shape[0], -1)).t()
    else:
        usage = "row-wise" if rowwise else "column-wise"
        raise ReferenceBackendError(f"GEMM operand {name} is missing {usage} usage.")
    return Operand(values, tensor._scale_inv, logical_shape(tensor), torch.uint8)


def _valid_transpose(tensor: Any) -> torch.Tensor | None:
    transpose: torch.Tensor | None = None if tensor._transpose_invalid else tensor._transpose
    return transpose


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    # Also for a tensor without elements, whose leading dimensions view(-1, ...) could not tell.
    rows = tensor.numel() // tensor.shape[-1] if tensor.numel() else int(torch.Size(tensor.shape[:-1]).numel())
    return tensor.reshape(rows, tensor.shape[-1])


def _plain(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "_rowwise_data") or not isinstance(tensor, torch.Tensor):
        raise UnsupportedRecipeError(
            f"{type(tensor).__name__}: the reference backend does not have this format. So far it has per-tensor FP8 "
            "(delayed scaling and current scaling)."
        )
    return tensor.detach()
