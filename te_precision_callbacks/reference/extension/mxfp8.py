"""MXFP8: a power-of-two scale for each 32 elements.

Rowwise and columnwise data are uint8 in the shape of the tensor, quantized separately from the high-precision tensor,
so their codes differ. Scales are E8M0 as uint8: rowwise [rows, columns / 32], padded to multiples of 128 and 4;
columnwise [rows / 32, columns], padded to multiples of 4 and 128 (``pytorch/csrc/quantizer.cpp`` and
``common/cast/mxfp8/quantize_mxfp8.cuh``, TE 2.20). GPUs before Blackwell do not support MXFP8; here it works for every
capability, so that statistics can simulate it.

For distributed optimizers, a flat shard of a master weight (consecutive elements of a weight [rows, columns], from
``start_offset`` on) is cast into the model weight. Each rank computes the amaxes of its shard, which are reduced over
the ranks and converted to scales for the cast. ``common/recipe/mxfp8_scaling.cu`` and
``common/multi_tensor/compute_scale.cu`` (TE 2.20); called by ``pytorch/tensor/utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.formats import E4M3, E8M0
from te_precision_callbacks.base.numerics.layouts import MXFP8, SWIZZLE_COLUMNS, SWIZZLE_ROWS
from te_precision_callbacks.base.numerics.scaling import e8m0_codes, mxfp8_scale_inv
from te_precision_callbacks.reference.conversions import block_amaxes, encode_blocks
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import (
    as_stored,
    matrix_shape,
    overwrite,
    pad,
    round_up,
    written,
)
from te_precision_callbacks.reference.extension.casting import Buffer, Buffers, Casting, by_usage
from te_precision_callbacks.reference.extension.enums import fp8_format
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.extension.multi_tensor import TensorLists

BLOCK = 32
"""Elements that share a scale."""


class Mxfp8Casting(Casting):
    """Casting to MXFP8: an E8M0 scale for 32 elements of a row or a column."""

    modes = (MXFP8,)
    classes = "mxfp8_tensor:MXFP8Tensor", "storage.mxfp8_tensor_storage:MXFP8TensorStorage"
    transposes = False
    updated = "fp8_dtype", "with_gemm_swizzled_scales"
    sums_unrounded = True

    def buffers(self, quantizer: Any, shape: Sequence[int]) -> Buffers:
        """Rows and columns have to be multiples of 32."""
        rows, columns = matrix_shape(shape)
        if rows % BLOCK or columns % BLOCK:
            raise ReferenceBackendError(
                f"MXFP8 requires tensor dims that are divisible by {BLOCK} (got shape={tuple(shape)}, which is {rows}"
                f" rows of {columns}): pad them."
            )
        along_rows = [round_up(rows, SWIZZLE_ROWS), round_up(columns // BLOCK, SWIZZLE_COLUMNS)]
        along_columns = [round_up(rows // BLOCK, SWIZZLE_COLUMNS), round_up(columns, SWIZZLE_ROWS)]
        return by_usage(
            quantizer,
            {
                "rowwise_data": Buffer(shape),
                "rowwise_scale_inv": Buffer(along_rows, zero=True),
                "columnwise_data": Buffer(shape),
                "columnwise_scale_inv": Buffer(along_columns, zero=True),
            },
        )

    def settings(self, quantizer: Any, shape: Sequence[int]) -> dict[str, Any]:
        return {"fp8_dtype": quantizer.dtype, "with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm)}

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        if source.numel() == 0 or skip:
            return
        fmt = fp8_format(out._fp8_dtype)
        matrix = source.reshape(matrix_shape(source.shape))
        for columnwise, data, scales in written(out):
            block = (BLOCK, 1) if columnwise else (1, BLOCK)
            square = quantizer.with_2d_quantization
            scale_inv = mxfp8_scale_inv(block_amaxes(matrix, (BLOCK, BLOCK) if square else block), fmt)
            if square:
                # Repeated for each row, or for each column, of a block.
                scale_inv = scale_inv.repeat_interleave(BLOCK, 1 if columnwise else 0)
            overwrite(data, encode_blocks(matrix, torch.reciprocal(scale_inv), block, fmt).view(data.shape))
            swizzled = bool(out._with_gemm_swizzled_scales)
            overwrite(
                scales, as_stored(e8m0_codes(scale_inv), scales.shape, along_columns=columnwise, swizzled=swizzled)
            )


@export
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Compute the amax of each block of 32 of a weight, in both directions, over the elements of a shard.

    ``amax_rowwise``, [at least rows, at least cols / 32], and ``amax_colwise``, [at least rows / 32, at least cols], in
    the dtype of ``input``, are written; padding becomes 0.
    """
    weight = torch.zeros(rows, cols, device=input.device)
    weight[_indices(input, cols, start_offset)] = input.reshape(-1).float()
    for amax, block in ((amax_rowwise, (1, BLOCK)), (amax_colwise, (BLOCK, 1))):
        amax.copy_(pad(block_amaxes(weight, block), amax.shape))


@export
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists
) -> None:
    """Compute the E4M3 MXFP8 scale from each amax; lists [amaxes (bfloat16), scales (uint8)]."""
    for amax, scale_inv in zip(*tensor_lists, strict=True):
        scale_inv.copy_(e8m0_codes(mxfp8_scale_inv(amax.float(), E4M3)).view(scale_inv.shape))


@export
def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Quantize a shard to E4M3 with the scales of its blocks of 32, in both directions.

    The outputs are uint8 with the shard's number of elements; the scales are E8M0 as uint8, [at least rows, at least
    cols / 32] and [at least rows / 32, at least cols].
    """
    row, column = _indices(input, cols, start_offset)
    values = input.reshape(-1).float()
    for output, exponents in (
        (output_rowwise, scale_inv_rowwise[row, column // BLOCK]),
        (output_colwise, scale_inv_colwise[row // BLOCK, column]),
    ):
        output.copy_(E4M3.encode(values * torch.reciprocal(E8M0.decode(exponents))).view(output.shape))


def _indices(shard: torch.Tensor, columns: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(start, start + shard.numel(), device=shard.device)
    return positions // columns, positions % columns
