"""The functions of the extension that unfused attention needs: no fused kernel, and moving tokens between layouts.

Usage::

    get_fused_attn_backend(params)  # (NVTE_Fused_Attn_Backend.NVTE_No_Backend, "...")
    padded = convert_thd_to_bshd(tokens, cu_seqlens, batch, max_length)
"""

from __future__ import annotations

from typing import Any

import torch

from te_precision_callbacks.reference.extension.enums import NVTE_Fused_Attn_Backend


def get_fused_attn_backend(*args: Any, **kwargs: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """No fused attention, and why; Transformer Engine then uses its unfused attention, which is pure torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "The reference backend has no fused attention."


@torch.no_grad()
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Convert concatenated sequences to a batch of sequences padded with zeros.

    Args:
        tensor: [tokens, heads, head size].
        cu_seqlens: int32, [b + 1]: where each sequence starts, and where the last one ends.
        b: number of sequences.
        max_seq_len: length to pad to; longer sequences are cut.

    Returns:
        [b, max_seq_len, heads, head size].
    """
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    starts = cu_seqlens.tolist()
    for index in range(b):
        length = min(starts[index + 1] - starts[index], max_seq_len)
        padded[index, :length] = tensor[starts[index] : starts[index] + length]
    return padded


@torch.no_grad()
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """The inverse of :func:`convert_thd_to_bshd`.

    Args:
        tensor: [b, max_seq_len, heads, head size].
        cu_seqlens: int32, [b + 1].
        t: number of tokens.

    Returns:
        [t, heads, head size]; zeros beyond the last sequence.
    """
    tokens = tensor.new_zeros(t, *tensor.shape[2:])
    starts = cu_seqlens.tolist()
    for index in range(tensor.shape[0]):
        length = min(starts[index + 1] - starts[index], tensor.shape[1])
        tokens[starts[index] : starts[index] + length] = tensor[index, :length]
    return tokens
