"""Rotary position embedding, which Transformer Engine's attention modules apply through the extension.

``x * cos(freqs) + rotate(x) * sin(freqs)`` over the first dimensions of each head, in float32, rounded once; the other
dimensions do not change (``common/fused_rope/fused_rope.cu``, TE 2.20). ``rotate`` swaps the two halves of these
dimensions, or the elements of each pair (``interleaved``), and negates the new first half, or first elements.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch

from te_precision_callbacks.reference.extension.enums import NVTE_QKV_Format
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.extension.missing import refuse


def _rope(
    tensor: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
    *,
    backward: bool,
) -> torch.Tensor:
    """Apply rotary position embedding, or its gradient, the reverse rotation.

    Args:
        tensor: [sequence, batch, heads, head size], [batch, sequence, ...] or [tokens, heads, head size].
        freqs: float32, [positions, 1, 1, rotated dimensions], in radians.
        start_positions: [batch], the position of each sequence's first token; None for 0.
        qkv_format: SBHD, BSHD or THD.
        interleaved: swap neighbors instead of halves.
        cu_seqlens: for THD, [batch + 1]: the start of each sequence, and the end of the last one.
        cp_size: 1; context parallelism is not supported.

    Returns:
        contiguous, the shape and type of ``tensor``.
    """
    if cp_size > 1:
        refuse(f"Rotary embedding with cp_size={cp_size}", "context parallelism")
    positions = _positions(tensor, start_positions, qkv_format, cu_seqlens)
    angles = freqs.flatten(1)[positions].unsqueeze(-2)
    rotated = angles.shape[-1]
    source = tensor.float()
    turned = source[..., :rotated]
    sine = angles.sin()
    # The backward is the transpose: multiplied by the sine first, then swapped in reverse.
    swapped = _swap(turned * sine, interleaved, -1.0) if backward else _swap(turned, interleaved, 1.0) * sine
    return torch.cat([turned * angles.cos() + swapped, source[..., rotated:]], dim=-1).to(tensor.dtype)


export(partial(_rope, backward=False), "fused_rope_forward")
export(partial(_rope, backward=True), "fused_rope_backward")


def _positions(
    tensor: torch.Tensor, start_positions: torch.Tensor | None, qkv_format: int, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The position of each token: int64, the dimensions of ``tensor`` before the heads, or 1 for equal ones."""
    if qkv_format == NVTE_QKV_Format.NVTE_THD and cu_seqlens is not None:
        positions = torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.device)
        for index, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            positions[start:end] = torch.arange(end - start, device=tensor.device)
            if start_positions is not None:
                positions[start:end] += start_positions[index].long()
        return positions
    sequence_first = qkv_format == NVTE_QKV_Format.NVTE_SBHD
    length = tensor.shape[0 if sequence_first else 1]
    positions = torch.arange(length, device=tensor.device).unsqueeze(1)
    if start_positions is not None:
        positions = positions + start_positions.long()
    if sequence_first:
        return positions
    return positions.t()


def _swap(x: torch.Tensor, interleaved: bool, sign: float) -> torch.Tensor:
    if interleaved:
        return torch.stack([-sign * x[..., 1::2], sign * x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-sign * second, sign * first], dim=-1)
