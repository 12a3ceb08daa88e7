"""The products of attention and its gradient, in float32, with the two roundings inside.

Usage::

    visible = visible_pairs(cu_seqlens_q, cu_seqlens_kv, q_tokens, kv_tokens, causal=True, padding=False)
    done = attend(q, k, v, attn_scale, visible, Rounding(E4M3.round, scale_s))
    done.output  # float32, [batch, heads, tokens, head size], not yet scaled for its own format

S is the softmax of the scores and dP their gradient, as cuDNN names the tensors that it scales (``scale_s``,
``amax_dP``).

Specified: products, factors, scales and amaxes follow the graph that Transformer Engine passes to cuDNN, node by
node, from cudnn-frontend 1.23 (``node/scaled_dot_product_flash_attention.h``, ``node/softmax.h``,
``node/sdpa_fp8_bwd.h``, ``node/matmul_fp8.h``).

Assumed, since cuDNN's kernels are not published:

- The forward rounds S before it divides by the sum of the exponentials, as kernels do that go through the keys in
  blocks, and the amax of S is that of the exponentials, 1. The graph says after the division. With the first scale of
  delayed scaling, 1, that makes all of S 0 in a sequence of 2048 tokens, and fails Transformer Engine's own
  ``test_custom_mha_fp8_vs_f16`` (``tests/pytorch/attention/test_attention.py``), which this order passes. The backward
  has the sums already and rounds as in its graph.
- A cast to FP8 saturates. A query without a visible key gives 0. The order of sums is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.numerics.scaling import amax_of
from te_precision_callbacks.reference.extension.attention_heads import Heads


@dataclass(frozen=True)
class Rounding:
    """Rounding of S, or dP, to an operand of the next product.

    ``scale``, float32, [1], multiplies before the rounding; its inverse multiplies the products.
    """

    round: Callable[[torch.Tensor], torch.Tensor]
    scale: torch.Tensor

    def operand(self, values: torch.Tensor) -> Heads:
        return Heads(self.round(values * self.scale), torch.reciprocal(self.scale))


@dataclass(frozen=True)
class Attended:
    """The result of the forward.

    Attributes:
        output: float32, [batch, heads, query tokens, head size].
        stats: float32, [batch, heads, query tokens, 1]: the logarithm of the sum of the exponentials of each query's
            scores; -inf for a query without a visible key.
        amax_s: float32, [1]: the largest element of S before the division by the sums.
    """

    output: torch.Tensor
    stats: torch.Tensor
    amax_s: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """The result of the backward: float32, [batch, heads, tokens, head size], and the amax of dP (float32, [1])."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    amax_dp: torch.Tensor


def visible_pairs(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q_tokens: int,
    kv_tokens: int,
    *,
    causal: bool,
    padding: bool,
) -> torch.Tensor:
    """Visibility of keys to queries: bool, to be broadcast over [batch, heads, query tokens, key tokens].

    Args:
        cu_seqlens_q, cu_seqlens_kv: int32, [batch + 1]: their differences are the sequences' lengths; for ``padding``.
        q_tokens, kv_tokens: the padded lengths.
        causal: a query sees the keys up to its own place, counted from the first token of both.
        padding: no query or key beyond its sequence's length counts.
    """
    queries = torch.arange(q_tokens, device=cu_seqlens_q.device).view(1, 1, -1, 1)
    keys = torch.arange(kv_tokens, device=cu_seqlens_q.device).view(1, 1, 1, -1)
    visible = (keys <= queries) if causal else torch.ones_like(keys <= queries)
    if padding:
        visible = visible & (queries < cu_seqlens_q.diff().view(-1, 1, 1, 1))
        visible = visible & (keys < cu_seqlens_kv.diff().view(-1, 1, 1, 1))
    return visible


def attend(q: Heads, k: Heads, v: Heads, attn_scale: float, visible: torch.Tensor, rounding_of_s: Rounding) -> Attended:
    """``O = S @ V`` with ``S = softmax(attn_scale * Q @ K.T)`` over the visible keys.

    K and V may have fewer heads than Q: each serves as many consecutive heads of Q.
    """
    scores = _scores(q, k, attn_scale).masked_fill(~visible, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    exponentials = torch.exp(scores - largest)
    sums = exponentials.sum(dim=-1, keepdim=True)
    operand = rounding_of_s.operand(exponentials)
    output = operand.numbers @ _for_each_query_head(v, q) / torch.where(sums == 0.0, 1.0, sums)
    return Attended(output * operand.factor * v.factor, largest + torch.log(sums), amax_of(exponentials))


def attend_backward(
    q: Heads,
    k: Heads,
    v: Heads,
    o: Heads,
    do: Heads,
    stats: torch.Tensor,
    attn_scale: float,
    visible: torch.Tensor,
    rounding_of_s: Rounding,
    rounding_of_dp: Rounding,
    *,
    q_for_dk: Heads,
    k_for_dq: Heads,
    do_for_dv: Heads,
    do_for_sums: Heads,
) -> Gradients:
    """The gradients of :func:`attend`.

    ``dP = S * (dO @ V.T - sum(dO * O)) * attn_scale``, with S from the scores and the forward's ``stats``; ``dV = S.T @
    dO``, ``dQ = dP @ K`` and ``dK = dP.T @ Q``. ``q_for_dk``, ``k_for_dq`` and ``do_for_dv`` are operands of the
    products over tokens, which differ in MXFP8; ``do_for_sums`` is dO in ``sum(dO * O)``.
    """
    sums = (do_for_sums.numbers * o.numbers).sum(dim=-1, keepdim=True) * do_for_sums.factor * o.factor
    s = torch.exp(_scores(q, k, attn_scale) - stats).masked_fill(~visible, 0.0)
    operand = rounding_of_s.operand(s)
    dv = _over_query_heads(operand.numbers.mT @ do_for_dv.numbers, v) * operand.factor * do_for_dv.factor

    of_s = do.numbers @ _for_each_query_head(v, q).mT * do.factor * v.factor
    dp = (of_s - sums) * s * attn_scale
    operand = rounding_of_dp.operand(dp)
    dq = operand.numbers @ _for_each_query_head(k_for_dq, q) * operand.factor * k_for_dq.factor
    dk = _over_query_heads(operand.numbers.mT @ q_for_dk.numbers, k) * operand.factor * q_for_dk.factor
    return Gradients(dq, dk, dv, amax_of(dp))


def _scores(q: Heads, k: Heads, attn_scale: float) -> torch.Tensor:
    return q.numbers @ _for_each_query_head(k, q).mT * attn_scale * q.factor * k.factor


def _for_each_query_head(keys: Heads, q: Heads) -> torch.Tensor:
    return keys.numbers.repeat_interleave(q.numbers.shape[1] // keys.numbers.shape[1], dim=1)


def _over_query_heads(gradient: torch.Tensor, keys: Heads) -> torch.Tensor:
    heads = keys.numbers.shape[1]
    batch, query_heads, *rest = gradient.shape
    return gradient.reshape(batch, heads, query_heads // heads, *rest).sum(dim=2)
