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
from te_precision_callbacks.reference.extension import mxfp8
from te_precision_callbacks.reference.extension.buffers import padded
from te_precision_callbacks.reference.extension.multi_tensor import TensorLists


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
    weight = _in_place(input.float(), rows, cols, start_offset)
    for amax, block in ((amax_rowwise, (1, mxfp8.BLOCK)), (amax_colwise, (mxfp8.BLOCK, 1))):
        amax.copy_(padded(block_amaxes(weight, block), amax.shape))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists
) -> None:
    """The MXFP8 scale for each amax, for E4M3, of lists [amaxes (bfloat16), scales (uint8)]; the rest has no effect."""
    for amax, scale_inv in zip(*tensor_lists, strict=True):
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
    row, column = _places(input, cols, start_offset)
    values = input.reshape(-1).float()
    for output, exponents in (
        (output_rowwise, scale_inv_rowwise[row, column // mxfp8.BLOCK]),
        (output_colwise, scale_inv_colwise[row // mxfp8.BLOCK, column]),
    ):
        output.copy_(E4M3.encode(values * torch.reciprocal(E8M0.decode(exponents))).view(output.shape))


def _places(shard: torch.Tensor, columns: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(start, start + shard.numel(), device=shard.device)
    return places // columns, places % columns


def _in_place(shard: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    weight = shard.new_zeros(rows, columns)
    weight[_places(shard, columns, start)] = shard.reshape(-1)
    return weight
