"""Reading tensors, quantized or not, as matrices of float32.

The rowwise and columnwise values of a block-scaled tensor differ, so readers always specify the direction. Per-tensor
FP8 has the same values in both directions, in one or two layouts. The memory layouts are in
:mod:`te_precision_callbacks.base.numerics.layouts`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.base.numerics import layouts
from te_precision_callbacks.reference.conversions import decode_blocks
from te_precision_callbacks.reference.errors import ReferenceBackendError, UnsupportedRecipeError
from te_precision_callbacks.reference.extension.buffers import matrix_shape
from te_precision_callbacks.reference.extension.float8 import has_any_layout_gemm
from te_precision_callbacks.te.tensors import is_quantized, read_either, read_stored, stored_shape

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
FP8_BLOCKS = (layouts.BLOCK_1D, layouts.BLOCK_2D)


@dataclass(frozen=True)
class Operand:
    """A matrix to multiply.

    Attributes:
        shape: the logical shape.
        source: a plain tensor with its leading dimensions merged, or the codes of a quantized tensor.
        rowwise: whether the product sums over the last dimension; otherwise over the leading ones.
        part: the multiplied direction of a quantized tensor, a :class:`~.layouts.Stored`; None for a plain tensor.
    """

    shape: tuple[int, ...]
    source: torch.Tensor
    rowwise: bool
    part: Any = None

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """float32, [rows, columns]: multiplied by the scales of blocks, but not by the scale of the tensor."""
        return self._decoded(torch.float32)

    def matrix(self, *, in_bfloat16: bool) -> torch.Tensor:
        """:attr:`values`, with the summed dimension last; bfloat16 only if :attr:`is_exact_in_bfloat16`."""
        values = self._decoded(torch.bfloat16) if in_bfloat16 else self.values
        return values if self.rowwise else values.t()

    def _decoded(self, dtype: torch.dtype) -> torch.Tensor:
        if self.part is None:
            return self.source.to(dtype)
        factors = None if self.kind == layouts.PER_TENSOR else self.part.block_scales()
        values = decode_blocks(self.part.codes, self.part.element_format, factors, self.part.block, dtype)
        return values.t() if self.part.transposed else values

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return matrix_shape(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Size of the dimension that the result has, and of the summed one."""
        rows, columns = self.matrix_shape
        return (rows, columns) if self.rowwise else (columns, rows)

    @property
    def leading_dimension(self) -> int:
        transposed = self.part is not None and self.part.transposed
        return self.matrix_shape[0 if transposed else 1]

    @property
    def kind(self) -> str:
        """Scaling mode, of :mod:`te_precision_callbacks.base.numerics.layouts`, or the dtype of a plain tensor."""
        return str(self.source.dtype if self.part is None else self.part.mode)

    @property
    def scale_inv(self) -> torch.Tensor | None:
        """The inverse scale of per-tensor FP8: float32, shape [1]."""
        return self.part.scales.view(1) if self.kind == layouts.PER_TENSOR else None

    @property
    def is_exact_in_bfloat16(self) -> bool:
        """Return whether bfloat16 represents :attr:`values` exactly: not with FP8's float32 scales of blocks."""
        return self.kind not in (*FP8_BLOCKS, "torch.float32", "torch.float16")


def operand(tensor: Any, *, rowwise: bool, name: str) -> Operand:
    """Read a GEMM operand.

    Args:
        tensor: plain or quantized.
        rowwise: whether the rowwise or the columnwise data is multiplied.
        name: "A" or "B", for errors.

    Raises:
        ReferenceBackendError: the data that a GPU would read is missing.
        UnsupportedRecipeError: the reference backend does not support the format.
    """
    if not is_quantized(tensor):
        values = _plain(tensor)
        if values.dtype not in HIGH_PRECISION:
            raise ReferenceBackendError(
                f"GEMM operand {name} has type {values.dtype}; float32, float16 or bfloat16 works."
            )
        # reshape(-1, ...) could not infer the rows of an empty tensor.
        return Operand(tuple(values.shape), values.reshape(matrix_shape(values.shape)), rowwise)
    part = read_stored(tensor, columnwise=not rowwise)
    # With per-tensor FP8, one-layout GPUs read the stored transpose for columnwise usage, and the data for rowwise
    # usage; others read whichever exists.
    is_fixed = part is not None and part.mode == layouts.PER_TENSOR and not has_any_layout_gemm()
    if part is None or (is_fixed and part.transposed == rowwise):
        usage = "row-wise" if rowwise else "column-wise"
        raise ReferenceBackendError(f"GEMM operand {name} is missing {usage} usage.")
    if getattr(tensor, "_row_scaled_nvfp4", False):
        raise ReferenceBackendError(
            f"GEMM operand {name}: cuBLAS does not support row-scaled NVFP4 inputs. general_gemm() of "
            "transformer_engine.pytorch.cpp_extensions does it in two steps."
        )
    return Operand(part.shape, part.codes, rowwise, part)


def dequantized(tensor: Any) -> torch.Tensor:
    """Dequantize a tensor to float32 in its logical shape, from the rowwise data if present."""
    if not is_quantized(tensor):
        return _plain(tensor).float()
    part = read_either(tensor)
    if part is None:
        raise ReferenceBackendError(f"The {type(tensor).__name__} has neither rowwise nor columnwise data.")
    return part.dequantized().contiguous()


def logical_shape(tensor: Any) -> tuple[int, ...]:
    if is_quantized(tensor):
        return stored_shape(tensor)
    return tuple(_plain(tensor).shape)


def _plain(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "_rowwise_data") or not isinstance(tensor, torch.Tensor):
        raise UnsupportedRecipeError(f"{type(tensor).__name__}: the reference backend does not have this format.")
    return tensor.detach()
