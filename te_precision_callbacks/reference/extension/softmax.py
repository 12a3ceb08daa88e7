"""Scaled and masked softmax of attention scores, forward and backward.

``common/fused_softmax`` (TE 2.20): computed in float32, returned in the type of the input. Scores that a mask masks are
set to -10000 after scaling, and a row that is masked throughout becomes zeros. Causally masked scores become zeros.
"""

from __future__ import annotations

import torch

MASKED_SCORE = -10000.0


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax(scale * x) over the last dimension; [batch, heads, queries, keys]."""
    return torch.softmax(input.detach().float() * scale_factor, dim=-1).to(input.dtype)


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled and masked scores: [batch, heads, queries, keys], float16 or bfloat16.

    ``mask`` is [batch or 1, 1, queries, keys], bool or uint8; 1 where a score is masked.
    """
    scores = (input.detach().float() * scale_factor).masked_fill(mask.bool(), MASKED_SCORE)
    result = torch.softmax(scores, dim=-1)
    all_masked = scores.amax(dim=-1, keepdim=True) == MASKED_SCORE
    return result.masked_fill(all_masked, 0.0).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled scores, each query seeing keys up to its own position; [batch * heads, length, length]."""
    return _causal(input.detach().float() * scale_factor, 1).to(input.dtype)


def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """softmax of the scaled scores, causal with the last query at the last key; [batch, heads, queries, keys]."""
    return _causal(input.detach().float() * scale_factor, input.shape[-1] - input.shape[-2] + 1).to(input.dtype)


def _causal(scores: torch.Tensor, first_masked: int) -> torch.Tensor:
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first_masked)
    result = torch.softmax(scores.masked_fill(masked, float("-inf")), dim=-1)
    # A query before the first key sees none.
    return result.masked_fill(masked, 0.0)


def scaled_softmax_backward(
    output_grad: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Gradient of each of the softmaxes, from its result."""
    grad, result = output_grad.detach().float(), softmax_results.detach().float()
    weighted = grad * result
    dscores = scale_factor * (weighted - result * weighted.sum(dim=-1, keepdim=True))
    return dscores.to(output_grad.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward
