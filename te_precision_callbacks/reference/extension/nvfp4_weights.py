"""NVFP4 weights with square blocks: their transpose, and casting them from master weights that ranks share.

Usage::

    columnwise_data = nvfp4_data_transpose(rowwise_data, out=None)  # no requantization: blocks are square
    nvfp4_2d_scale_transpose(rowwise_scales, columnwise_scales, rows // 16, columns // 16)

    # A rank has a part of a weight's elements, from start_offset on, in float32.
    nvfp4_2d_compute_partial_amax(part, block_amax, rows, columns, start_offset)  # then all_reduce(MAX) over ranks
    nvfp4_fused_scale(block_amax, amax, scale, scale_inv, target_amax, rows // 16, columns // 16, padded_rows, 16)
    nvfp4_2d_partial_cast(part, its_bytes, scale, encode_scale, rows, columns, start_offset)

``common/recipe/nvfp4.cu`` and ``pytorch/csrc/extensions/{transpose,nvfp4_2d_partial_cast}.cpp`` (TE 2.20), called by
``pytorch/tensor/storage/nvfp4_tensor_storage.py`` and, for distributed optimizers, ``pytorch/tensor/utils.py``.

In two places the numbers are those that upstream intends, not those that its kernels write: scales with padded rows
(columns that are not a multiple of 64) are written row by row, while the kernels ignore the padding; and a part that
starts at an odd element is written at that element, while the kernels are one byte off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_precision_callbacks.base.numerics.blocks import block_amaxes
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3
from te_precision_callbacks.base.numerics.layouts import packed, unpacked
from te_precision_callbacks.base.numerics.nvfp4 import BLOCK
from te_precision_callbacks.base.numerics.scaling import (
    FLOAT32_MAX,
    amax_of,
    nvfp4_block_scales,
    nvfp4_encode_scale,
    nvfp4_multiplier,
)
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.partial_cast import in_place


@torch.no_grad()
def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """The transpose of packed E2M1 codes.

    Args:
        input: uint8, [rows, columns / 2], an even number of rows.
        out: uint8, [columns, rows / 2], to write to; a new tensor if None.
    """
    if input.dim() != 2 or input.shape[0] % 2:
        raise ReferenceBackendError(
            f"nvfp4_data_transpose takes a matrix with an even number of rows, not {list(input.shape)}."
        )
    shape = (input.shape[1] * 2, input.shape[0] // 2)
    if out is not None and tuple(out.shape) != shape:
        raise ReferenceBackendError(f"nvfp4_data_transpose: out has shape {list(out.shape)}; {list(shape)} is needed.")
    result = packed(unpacked(input).t())
    return result.contiguous() if out is None else out.copy_(result)


@torch.no_grad()
def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """The scales of the transpose of a tensor with square blocks.

    Args:
        input: E4M3 as uint8, [padded rows, padded columns / 16], each scale on the 16 rows of its block.
        output: E4M3 as uint8, [padded columns, padded rows / 16]; its padding becomes 0 below the blocks, and does not
            change beside them.
        M_tiles: blocks along the rows.
        K_tiles: blocks along the columns.
    """
    of_blocks = input[: M_tiles * BLOCK : BLOCK, :K_tiles].t()
    valid = output[:, :M_tiles]
    valid.zero_()
    valid[: K_tiles * BLOCK] = of_blocks.repeat_interleave(BLOCK, 0)[: valid.shape[0]]


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor],
    columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor],
    columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """:func:`nvfp4_data_transpose` and :func:`nvfp4_2d_scale_transpose` for each tensor of M x K elements."""
    tensors = zip(
        rowwise_data_list,
        columnwise_data_list,
        rowwise_scale_inv_list,
        columnwise_scale_inv_list,
        M_list,
        K_list,
        strict=True,
    )
    for data, transposed_data, scales, transposed_scales, rows, columns in tensors:
        nvfp4_data_transpose(data, out=transposed_data)
        nvfp4_2d_scale_transpose(scales, transposed_scales, -(-rows // BLOCK), -(-columns // BLOCK))


@torch.no_grad()
def nvfp4_2d_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int = BLOCK
) -> None:
    """The largest magnitude in each 16 x 16 block, over the elements of the part; NaN is skipped.

    Args:
        tensor: float32 or bfloat16: a part of a matrix, its elements in order.
        amax: float32, [blocks along the rows, blocks along the columns], written.
        h: rows of the matrix.
        w: columns of the matrix.
        start_offset: elements of the matrix before the part.
        block_len: must be 16.

    Raises:
        ReferenceBackendError: another block length, or a part that is not in the matrix.
    """
    _check_part(tensor, h, w, start_offset, block_len)
    amax.copy_(block_amaxes(in_place(tensor.float(), h, w, start_offset), (BLOCK, BLOCK)))


@torch.no_grad()
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[torch.Tensor],
    partial_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = BLOCK,
) -> None:
    """:func:`nvfp4_2d_compute_partial_amax`, and the amax of the whole part (float32, [1]), for each tensor."""
    tensors = zip(
        master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list, strict=True
    )
    for part, block_amax, amax, rows, columns, start in tensors:
        nvfp4_2d_compute_partial_amax(part, block_amax, rows, columns, start, block_len)
        amax.copy_(amax_of(part).view_as(amax))


@torch.no_grad()
def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """The scale that brings each tensor into the range of E2M1 times E4M3, written into ``global_scale`` (float32).

    2688 / amax, at most the largest float32; 1 for an amax that is not above 0.
    """
    global_scale.copy_(nvfp4_encode_scale(global_amax, nan_spreads=True))


@torch.no_grad()
def nvfp4_compute_per_block_scale(block_amax: torch.Tensor, scale: torch.Tensor, global_amax: torch.Tensor) -> None:
    """Each block's scale before it is rounded to E4M3, written into ``scale``.

    Args:
        block_amax: float32, any shape.
        scale: float32, same shape.
        global_amax: float32, one element.
    """
    product = nvfp4_block_scales(block_amax, nvfp4_encode_scale(global_amax.view(()), nan_spreads=True))
    scale.copy_(torch.fmin(product, torch.full_like(product, FLOAT32_MAX)))


@torch.no_grad()
def nvfp4_expand_scale_to_fp8(
    input: torch.Tensor, output: torch.Tensor, tile_rows: int, tile_cols: int, rows_padded: int, block_len: int
) -> None:
    """Blocks' scales as E4M3, one for each row.

    Args:
        input: float32, [tile_rows, tile_cols].
        output: uint8, [rows_padded, at least tile_cols]; rows below the blocks become 0, other columns do not change.
        tile_rows: blocks along the rows.
        tile_cols: blocks along the columns.
        rows_padded: rows to write.
        block_len: rows of a block.
    """
    valid = output[:rows_padded, :tile_cols]
    valid.zero_()
    codes = E4M3.encode(input[:tile_rows, :tile_cols].float())
    valid[: tile_rows * block_len] = codes.repeat_interleave(block_len, 0)[: valid.shape[0]]


@torch.no_grad()
def nvfp4_fused_scale(
    block_amax: torch.Tensor,
    global_amax: torch.Tensor,
    per_block_scale: torch.Tensor,
    target_scale: torch.Tensor,
    target_amax: torch.Tensor,
    tile_rows: int,
    tile_cols: int,
    rows_padded: int,
    block_len: int,
) -> None:
    """:func:`nvfp4_compute_per_block_scale`, :func:`nvfp4_expand_scale_to_fp8`, and amax copied to ``target_amax``."""
    nvfp4_compute_per_block_scale(block_amax, per_block_scale, global_amax)
    nvfp4_expand_scale_to_fp8(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len)
    target_amax.copy_(global_amax.view_as(target_amax))


def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[torch.Tensor],
    global_amax_list: Sequence[torch.Tensor],
    per_block_scale_list: Sequence[torch.Tensor],
    target_scale_list: Sequence[torch.Tensor],
    target_amax_list: Sequence[torch.Tensor],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: int,
) -> None:
    """:func:`nvfp4_fused_scale` for each tensor."""
    tensors = zip(
        block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, strict=True
    )
    sizes = zip(tile_rows_list, tile_cols_list, rows_padded_list, strict=True)
    for (block_amax, amax, scale, scale_inv, amax_out), (rows, columns, padded_rows) in zip(
        tensors, sizes, strict=True
    ):
        nvfp4_fused_scale(block_amax, amax, scale, scale_inv, amax_out, rows, columns, padded_rows, block_len)


@torch.no_grad()
def nvfp4_2d_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int = BLOCK,
) -> None:
    """Quantize a part of a matrix.

    Args:
        inp: float32 or bfloat16: a part of a matrix, its elements in order.
        out: uint8, the bytes that hold the codes of the part, two a byte; a half byte of an element before or after the
            part does not change.
        scale: float32, [blocks along the rows, blocks along the columns], not yet rounded to E4M3.
        global_scale: float32, one element, from :func:`nvfp4_compute_global_scale`.
        h: rows of the matrix.
        w: columns of the matrix.
        start_offset: elements of the matrix before the part.
        block_len: must be 16.

    Raises:
        ReferenceBackendError: another block length, or a part that is not in the matrix.
    """
    _check_part(inp, h, w, start_offset, block_len)
    if inp.numel() == 0:
        return
    encode = torch.where(global_scale > 0, global_scale, torch.ones_like(global_scale)).view(())
    multiplier = nvfp4_multiplier(E4M3.decode(E4M3.encode(scale)), encode)
    index = torch.arange(start_offset, start_offset + inp.numel(), device=inp.device)
    of_elements = multiplier[index // w // BLOCK, index % w // BLOCK]
    bytes_out = out.view(-1)
    codes = unpacked(bytes_out)
    first = start_offset % 2
    codes[first : first + inp.numel()] = E2M1.encode(inp.detach().reshape(-1).float() * of_elements)
    bytes_out.copy_(packed(codes))


def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[torch.Tensor],
    out_list: Sequence[torch.Tensor],
    scale_list: Sequence[torch.Tensor],
    global_scale_list: Sequence[torch.Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = BLOCK,
) -> None:
    """:func:`nvfp4_2d_partial_cast` for each tensor."""
    tensors = zip(inp_list, out_list, scale_list, global_scale_list, strict=True)
    places = zip(h_list, w_list, start_offset_list, strict=True)
    for (part, out, scale, encode_scale), (rows, columns, start) in zip(tensors, places, strict=True):
        nvfp4_2d_partial_cast(part, out, scale, encode_scale, rows, columns, start, block_len)


def _check_part(part: torch.Tensor, rows: int, columns: int, start_offset: int, block_len: int) -> None:
    if block_len != BLOCK:
        raise ReferenceBackendError(f"block_len={block_len}: NVFP4 has blocks of {BLOCK} x {BLOCK}.")
    if part.dtype not in (torch.float32, torch.bfloat16):
        raise ReferenceBackendError(f"Master weights are float32 or bfloat16, not {part.dtype}.")
    if not 0 <= start_offset <= start_offset + part.numel() <= rows * columns:
        raise ReferenceBackendError(
            f"Elements {start_offset} to {start_offset + part.numel()} are not all in a matrix of {rows} x {columns}."
        )
