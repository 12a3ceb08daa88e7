"""FP8 block scaling: a float32 scale for each 128 elements (1D blocks) or for each 128 x 128 (2D blocks).

Rowwise data is uint8 in the shape of the tensor, columnwise data its transpose. With R rows and C columns of data, the
scales are float32: 1D [C / 128, R], 2D [R / 128, C / 128], rounded up, the second dimension to a multiple of 4.
``pytorch/csrc/quantizer.cpp``, ``common/transpose/quantize_transpose_vector_blockwise.cu``,
``..._square_blockwise.cu`` and ``common/recipe/recipe_common.cuh`` (TE 2.20).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import BLOCK_1D, BLOCK_2D
from te_precision_callbacks.base.numerics.scaling import fp8_scale
from te_precision_callbacks.reference.conversions import block_amaxes, encode_blocks
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import (
    matrix_shape,
    overwrite,
    pad,
    round_up,
    transposed_shape,
    written,
)
from te_precision_callbacks.reference.extension.casting import Buffer, Buffers, Casting, by_usage
from te_precision_callbacks.reference.extension.enums import fp8_format
from te_precision_callbacks.reference.target import capability

BLOCK = 128
"""Elements, and with 2D blocks rows too, that share a scale."""


class Float8BlockCasting(Casting):
    """Casting to FP8 with a float32 scale for each block of 1 x 128 or 128 x 128 elements."""

    modes = (BLOCK_1D, BLOCK_2D)
    classes = (
        "float8_blockwise_tensor:Float8BlockwiseQTensor",
        "storage.float8_blockwise_tensor_storage:Float8BlockwiseQTensorStorage",
    )

    def buffers(self, quantizer: Any, shape: Sequence[int]) -> Buffers:
        rows, columns = matrix_shape(shape)
        is_2d = _is_2d(quantizer)
        return by_usage(
            quantizer,
            {
                "rowwise_data": Buffer(shape),
                "rowwise_scale_inv": _scales(rows, columns, is_2d),
                "columnwise_data": Buffer(transposed_shape(shape)),
                "columnwise_scale_inv": _scales(columns, rows, is_2d),
            },
        )

    def settings(self, quantizer: Any, shape: Sequence[int]) -> dict[str, Any]:
        return {"fp8_dtype": quantizer.dtype, "is_2D_scaled": _is_2d(quantizer)}

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize each direction of ``out``, in blocks of its shape.

        Raises:
            ReferenceBackendError: float32 scales on Blackwell, which runs this recipe only as MXFP8; or no usage.
        """
        if source.numel() == 0:
            return
        if capability() >= (10, 0) and not quantizer.force_pow_2_scales:
            raise ReferenceBackendError(
                "On Blackwell and newer, the FP8 block scaling recipe is emulated with MXFP8, which requires using "
                "power of two scaling factors: force_pow_2_scales=True (in the recipe, fp8_quant_*.power_2_scale)."
            )
        if out._rowwise_data is None and out._columnwise_data is None:
            raise ReferenceBackendError(f"The {type(quantizer).__name__} has neither rowwise nor columnwise usage.")
        if skip:
            return
        matrix = source.reshape(matrix_shape(source.shape))
        for columnwise, data, scales in written(out):
            is_2d = out._is_2D_scaled
            block = (BLOCK, BLOCK) if is_2d else (BLOCK, 1) if columnwise else (1, BLOCK)
            fmt = fp8_format(out._fp8_dtype)
            scale = fp8_scale(
                block_amaxes(matrix, block),
                fmt.max,
                power_of_two=quantizer.force_pow_2_scales,
                epsilon=quantizer.amax_epsilon,
                largest_scale=torch.finfo(source.dtype).max,
            )
            codes = encode_blocks(matrix, scale, block, fmt)
            scale_inv = torch.reciprocal(scale)
            if columnwise:
                overwrite(data.view(matrix.shape[::-1]), codes.t())
            else:
                overwrite(data, codes.view(data.shape))
            overwrite(scales, pad(scale_inv if is_2d != columnwise else scale_inv.t(), scales.shape))


def _scales(rows: int, columns: int, is_2d: bool) -> Buffer:
    along = -(-columns // BLOCK)
    shape = (-(-rows // BLOCK), round_up(along, 4)) if is_2d else (along, round_up(rows, 4))
    return Buffer(shape, torch.float32, zero=True)


def _is_2d(quantizer: Any) -> bool:
    return int(quantizer.block_scaling_dim) == 2
