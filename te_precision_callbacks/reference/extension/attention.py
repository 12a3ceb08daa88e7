"""The layouts and softmaxes of attention; fused attention kernels do not exist.

Masked scores are set to -10000 after scaling, and a fully masked row becomes zeros. Causally masked probabilities are
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from te_precision_callbacks.reference.extension.enums import NVTE_Fused_Attn_Backend
from te_precision_callbacks.reference.extension.exports import export


@export
def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Return that no kernel exists, with the reason, so that Transformer Engine selects its unfused attention."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "The reference backend has no fused attention."


@export
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """Convert concatenated sequences [tokens, heads, head size] to [b, max_seq_len, heads, head size], padded with
    zeros.

    ``cu_seqlens``: int32, [b + 1], the start of each sequence, and the end of the last one. Longer sequences are cut.
    """
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for sequence, (start, end) in zip(padded, pairwise(cu_seqlens.tolist()), strict=False):
        sequence[: end - start] = tensor[start:end][:max_seq_len]
    return padded


@export
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Invert :func:`convert_thd_to_bshd`: [t, heads, head size], with zeros after the last sequence."""
    tokens = tensor.new_zeros(t, *tensor.shape[2:])
    for sequence, (start, end) in zip(tensor, pairwise(cu_seqlens.tolist()), strict=False):
        tokens[start:end][: len(sequence)] = sequence[: end - start]
    return tokens


@export
def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[torch.Tensor | None], original_format: str, outputs: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor | None]:
    """Convert tensors from "bshd" or "sbhd" to contiguous [batch, heads, tokens, head size]; None stays None.

    ``outputs`` are written to, with zeros if their last dimension is larger; a missing one is allocated.
    """
    results: list[torch.Tensor | None] = []
    for tensor, output in zip(inputs, outputs or [None] * len(inputs), strict=True):
        if tensor is not None:
            heads = tensor.permute([original_format.index(dimension) for dimension in "bhsd"])
            output = heads.new_empty(heads.shape) if output is None else output
            output[..., : heads.shape[-1]] = heads
            output[..., heads.shape[-1] :] = 0
        results.append(None if tensor is None else output)
    return results


# --- softmax: common/fused_softmax (TE 2.20). Computed in float32, returned in the type of the input. ---

MASKED_SCORE = -10000.0


@export
def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax(scale * x) over the last dimension; [batch, heads, queries, keys]."""
    return torch.softmax(input.float() * scale_factor, dim=-1).to(input.dtype)


@export
def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled and masked scores: [batch, heads, queries, keys], float16 or bfloat16.

    ``mask`` is [batch or 1, 1, queries, keys], bool or uint8; 1 where a score is masked.
    """
    scores = (input.float() * scale_factor).masked_fill(mask.bool(), MASKED_SCORE)
    result = torch.softmax(scores, dim=-1)
    all_masked = scores.amax(dim=-1, keepdim=True) == MASKED_SCORE
    return result.masked_fill(all_masked, 0.0).to(input.dtype)


@export
def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled scores with a causal mask, [batch * heads, length, length]."""
    return _causal(input.float() * scale_factor, 1).to(input.dtype)


@export
def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled scores with a causal mask aligned to the last key, [batch, heads, queries, keys]."""
    return _causal(input.float() * scale_factor, input.shape[-1] - input.shape[-2] + 1).to(input.dtype)


def _causal(scores: torch.Tensor, first_masked: int) -> torch.Tensor:
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first_masked)
    result = torch.softmax(scores.masked_fill(masked, float("-inf")), dim=-1)
    # A query before the first key attends to no key.
    return result.masked_fill(masked, 0.0)


@export
def scaled_softmax_backward(
    output_grad: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Gradient of any of these softmaxes, from its result."""
    grad = output_grad.float()
    result = softmax_results.float()
    weighted = grad * result
    dscores = scale_factor * (weighted - result * weighted.sum(dim=-1, keepdim=True))
    return dscores.to(output_grad.dtype)


for masks in ("masked", "upper_triang_masked", "aligned_causal_masked"):
    export(scaled_softmax_backward, f"scaled_{masks}_softmax_backward")
