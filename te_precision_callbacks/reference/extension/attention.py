"""The layouts of attention, and the answer that there is no fused kernel for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.enums import NVTE_Fused_Attn_Backend


def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """No kernel, and the reason: Transformer Engine then selects its unfused attention, which is pure torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "The reference backend has no fused attention."


@torch.no_grad()
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Convert concatenated sequences [tokens, heads, head size] to [b, max_seq_len, heads, head size], padded with
    zeros.

    ``cu_seqlens``, int32, [b + 1], has where each sequence starts, and where the last one ends. Longer sequences are
    cut.
    """
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    starts = cu_seqlens.tolist()
    for index in range(b):
        length = min(starts[index + 1] - starts[index], max_seq_len)
        padded[index, :length] = tensor[starts[index] : starts[index] + length]
    return padded


@torch.no_grad()
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """The inverse of :func:`convert_thd_to_bshd`: [t, heads, head size], zeros beyond the last sequence."""
    tokens = tensor.new_zeros(t, *tensor.shape[2:])
    starts = cu_seqlens.tolist()
    for index in range(tensor.shape[0]):
        length = min(starts[index + 1] - starts[index], tensor.shape[1])
        tokens[starts[index] : starts[index] + length] = tensor[index, :length]
    return tokens


@torch.no_grad()
def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[torch.Tensor | None], original_format: str, outputs: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor | None]:
    """Batches of heads, contiguous, from tensors of 4 dimensions in the format "bshd" or "sbhd"; None is passed on.

    ``outputs`` are [batch, heads, tokens, at least the input's last dimension], filled up with zeros; a new tensor
    where there is none.

    Raises:
        ReferenceBackendError: another format, or not as many outputs as inputs.
    """
    if original_format not in ("bshd", "sbhd") or (outputs and len(outputs) != len(inputs)):
        raise ReferenceBackendError(
            f"multi_tensor_transpose_to_bhsd takes tensors in bshd or sbhd, and an output for each or for none; got "
            f"{len(inputs)} in {original_format!r} and {len(outputs)} outputs."
        )
    results: list[torch.Tensor | None] = []
    for tensor, output in zip(inputs, outputs or [None] * len(inputs), strict=True):
        if tensor is not None:
            heads = tensor.permute([original_format.index(dimension) for dimension in "bhsd"])
            output = heads.new_empty(heads.shape) if output is None else output
            output[..., : heads.shape[-1]] = heads
            output[..., heads.shape[-1] :] = 0
        results.append(None if tensor is None else output)
    return results
