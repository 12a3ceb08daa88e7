"""MXFP8: a power of two as the scale of each 32 elements.

Usage::

    casting = BlockScaling()
    out = casting.create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    casting.write(quantizer, tensor, out)
    out._rowwise_data  # uint8, the shape of tensor
    out._rowwise_scale_inv  # uint8, E8M0, [rows, columns / 32], padded to multiples of 128 and 4
    out._columnwise_data  # uint8, the shape of tensor: not transposed, and other codes than rowwise
    out._columnwise_scale_inv  # uint8, E8M0, [rows / 32, columns], padded to multiples of 4 and 128

``pytorch/csrc/quantizer.cpp`` and ``common/cast/mxfp8/quantize_mxfp8.cuh`` (TE 2.20). Each direction is quantized from
the high-precision tensor. A GPU older than Blackwell has no MXFP8; here MXFP8 works for every capability, so that its
numbers can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.conversions import block_amaxes, encoded
from te_precision_callbacks.base.numerics.layouts import MXFP8, SWIZZLE_COLUMNS, SWIZZLE_ROWS
from te_precision_callbacks.base.numerics.scaling import e8m0_codes, mxfp8_scale_inv
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import (
    Shapes,
    build,
    directions,
    fit_directions,
    is_noop,
    matrix_shape,
    overwrite,
    round_up,
    written,
)
from te_precision_callbacks.reference.extension.casting import Casting
from te_precision_callbacks.reference.extension.dtypes import fp8_format
from te_precision_callbacks.reference.extension.swizzling import as_stored

BLOCK = 32
"""Elements that share a scale."""

_ELEMENTS_AT_ONCE = 1 << 20
"""Elements that are quantized at once: all intermediate results fit into a cache."""


class Mxfp8Casting(Casting):
    """Quantizing to MXFP8."""

    modes = (MXFP8,)
    sums_unrounded = True

    def create(
        self,
        quantizer: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> Any:
        """An MXFP8Tensor, or its storage class for an internal quantizer, its data not written, its scales 0.

        Raises:
            ReferenceBackendError: the rows, or the columns, are not a multiple of 32.
        """
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
        from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

        _check(shape)
        return build(
            MXFP8Tensor,
            MXFP8TensorStorage,
            quantizer,
            shape,
            dtype,
            device,
            **directions(quantizer, device, _shapes(shape), torch.uint8, pin_memory),
            fp8_dtype=quantizer.dtype,
            with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm),
        )

    def _fit(self, quantizer: Any, out: Any) -> None:
        data = out._columnwise_data if out._columnwise_data is not None else out._rowwise_data
        if data is None:
            raise ReferenceBackendError(f"The {type(out).__name__} to quantize into has no data.")
        fit_directions(quantizer, out, data.device, _shapes(data.shape), torch.uint8)
        out._fp8_dtype = quantizer.dtype
        out._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        noop: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize each direction that ``out`` has."""
        if source.numel() == 0 or is_noop(noop):
            return
        fmt = fp8_format(out._fp8_dtype)
        matrix = source.reshape(matrix_shape(source.shape))
        for columnwise, data, scales in written(out):
            block = (BLOCK, 1) if columnwise else (1, BLOCK)
            square = quantizer.with_2d_quantization
            scales_inv = []
            step = max(1, _ELEMENTS_AT_ONCE // (BLOCK * matrix.shape[1])) * BLOCK
            for part, into in zip(torch.split(matrix, step), torch.split(data.view(matrix.shape), step), strict=True):
                scale_inv = mxfp8_scale_inv(block_amaxes(part, (BLOCK, BLOCK) if square else block), fmt)
                if square:
                    # Repeated for each row, or for each column, of a block.
                    scale_inv = scale_inv.repeat_interleave(BLOCK, 1 if columnwise else 0)
                overwrite(into, encoded(part, torch.reciprocal(scale_inv), block, fmt))
                scales_inv.append(scale_inv)
            scale_inv = torch.cat(scales_inv)
            swizzled = bool(out._with_gemm_swizzled_scales)
            overwrite(
                scales, as_stored(e8m0_codes(scale_inv), scales.shape, along_columns=columnwise, swizzled=swizzled)
            )


def scale_shape(shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """The shape of the scales of a tensor of ``shape``, padding included."""
    rows, columns = matrix_shape(shape)
    if columnwise:
        return round_up(rows // BLOCK, SWIZZLE_COLUMNS), round_up(columns, SWIZZLE_ROWS)
    return round_up(rows, SWIZZLE_ROWS), round_up(columns // BLOCK, SWIZZLE_COLUMNS)


def _shapes(shape: Sequence[int]) -> Shapes:
    return {"rowwise": (shape, scale_shape(shape, False)), "columnwise": (shape, scale_shape(shape, True))}


def _check(shape: Sequence[int]) -> None:
    rows, columns = matrix_shape(shape)
    if rows % BLOCK or columns % BLOCK:
        raise ReferenceBackendError(
            f"MXFP8 requires tensor dims that are divisible by {BLOCK} (got shape={tuple(shape)}, which is {rows} rows"
            f" of {columns}): pad them."
        )
