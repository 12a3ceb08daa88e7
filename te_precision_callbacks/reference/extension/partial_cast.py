"""Casting a shard of a master weight into its place in an MXFP8 model weight, for distributed optimizers.

A shard is flat: some consecutive elements of a weight [rows, columns], from ``start_offset`` on. Each rank computes the
amaxes of its part, which are then reduced over the ranks, turned into scales, and used for the cast.
``common/recipe/mxfp8_scaling.cu`` and ``common/multi_tensor/compute_scale.cu`` (TE 2.20); ``pytorch/tensor/utils.py``
calls them.
"""

from __future__ import annotations

import torch

from te_precision_callbacks.base.numerics.conversions import block_amaxes
from te_precision_callbacks.base.numerics.formats import E4M3, E8M0
from te_precision_callbacks.base.numerics.scaling import e8m0_codes, mxfp8_scale_inv
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension import mxfp8
from te_precision_callbacks.reference.extension.buffers import padded
from te_precision_callbacks.reference.extension.multi_tensor import TensorLists, groups


@torch.no_grad()
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """The amax of each block of 32 of a weight, in both directions, over the elements in a shard of any float type.

    ``amax_rowwise`` is of the type of ``input``, [at least rows, at least cols / 32], written; padding becomes 0.
    ``amax_colwise`` is the same, [at least rows / 32, at least cols].
    """
    _check_mxfp8(rows, cols)
    weight = _in_place(input.float(), rows, cols, start_offset)
    for amax, block in ((amax_rowwise, (1, mxfp8.BLOCK)), (amax_colwise, (mxfp8.BLOCK, 1))):
        amax.copy_(padded(block_amaxes(weight, block), amax.shape))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists
) -> None:
    """The MXFP8 scale for each amax, for E4M3, of lists [amaxes (bfloat16), scales (uint8)]; the rest has no effect.

    Raises:
        ReferenceBackendError: amaxes of another type.
    """
    for amax, scale_inv in groups(tensor_lists, (2,)):
        if amax.dtype != torch.bfloat16:
            raise ReferenceBackendError(f"multi_tensor_compute_scale_inv_e8m0: amax should be bf16, not {amax.dtype}.")
        scale_inv.copy_(e8m0_codes(mxfp8_scale_inv(amax.float(), E4M3)).view(scale_inv.shape))


@torch.no_grad()
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
    """Quantize a shard of any float type to E4M3 with the scales of its blocks of 32, in both directions.

    The outputs are uint8 with as many elements; the scales are E8M0 as uint8, [at least rows, at least cols / 32] and
    [at least rows / 32, at least cols].
    """
    _check_mxfp8(rows, cols)
    row, column = _places(input, rows, cols, start_offset)
    values = input.reshape(-1).float()
    for output, exponents in (
        (output_rowwise, scale_inv_rowwise[row, column // mxfp8.BLOCK]),
        (output_colwise, scale_inv_colwise[row // mxfp8.BLOCK, column]),
    ):
        output.copy_(E4M3.encode(values * torch.reciprocal(E8M0.decode(exponents))).view(output.shape))


def _places(shard: torch.Tensor, rows: int, columns: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    if start < 0 or start + shard.numel() > rows * columns:
        raise ReferenceBackendError(
            f"A shard of {shard.numel()} elements from {start} on is not within a weight of {rows} x {columns}."
        )
    places = torch.arange(start, start + shard.numel(), device=shard.device)
    return places // columns, places % columns


def _in_place(shard: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    weight = shard.new_zeros(rows, columns)
    weight[_places(shard, rows, columns, start)] = shard.reshape(-1)
    return weight


def _check_mxfp8(rows: int, columns: int) -> None:
    if rows % mxfp8.BLOCK or columns % mxfp8.BLOCK:
        raise ReferenceBackendError(f"A weight of {rows} x {columns}: MXFP8 needs multiples of {mxfp8.BLOCK}.")
