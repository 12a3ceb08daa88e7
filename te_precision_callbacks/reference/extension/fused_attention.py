"""Fused attention in FP8: delayed scaling, current scaling and MXFP8.

``pytorch/csrc/extensions/attention.cpp`` and ``common/fused_attn/fused_attn_fp8.cu`` (TE 2.20) define the role of each
tensor in cuDNN's graph. The graph, and assumptions about cuDNN's kernels, are in
:mod:`~te_precision_callbacks.reference.extension.attention_products`.

============ ======================================== ========================= ======================================
tensor       delayed scaling                          current scaling           MXFP8
============ ======================================== ========================= ======================================
Q, K, V      FP8, one scale for all three             FP8, one scale for all    MXFP8
                                                      three
S            rounded to the type of Q, by the scale   as in delayed scaling     rounded to the type of Q without a
             of its quantizer, whose amax is raised                             scale; in the backward not rounded
O            FP8, by the scale of its quantizer,      of the nominal type       of the nominal type
             whose amax is raised
dO           FP8                                      FP8                       MXFP8, and plain
dP           rounded to the type of dO, by the scale  as in delayed scaling     not rounded
             of its quantizer, whose amax is raised
dQ, dK, dV   FP8, by the scale of their quantizer,    of the nominal type       of the nominal type
             whose amax is raised
============ ======================================== ========================= ======================================

Transformer Engine gives S and dP quantizers of delayed scaling under current scaling too, and none under MXFP8. Amaxes
are of float32 results before rounding. dQ, dK and dV share a quantizer: it is assumed that its amax becomes the largest
of the three. With ``NVTE_FP8_DPA_BWD=0`` the backward gets high-precision tensors, and S and dP are rounded to their
type.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics import layouts
from te_precision_callbacks.base.numerics.heads import from_heads
from te_precision_callbacks.base.numerics.layouts import fp8_format, is_quantized, scaling_mode
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.extension.attention_heads import (
    format_of,
    name_of,
    read,
    unwritten_gradients,
)
from te_precision_callbacks.reference.extension.attention_products import (
    Rounding,
    attend,
    attend_backward,
    visible_pairs,
)
from te_precision_callbacks.reference.extension.attention_support import CAUSAL, PADDING, missing_option
from te_precision_callbacks.reference.extension.autocast import outside_of_autocast
from te_precision_callbacks.reference.extension.float8 import raise_amax
from te_precision_callbacks.reference.extension.quantization import quantize_result
from te_precision_callbacks.reference.extension.quantizers import casting_for


@outside_of_autocast
@torch.no_grad()
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    qkv_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    Q: Any,
    K: Any,
    V: Any,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    page_table_k: torch.Tensor | None,
    page_table_v: torch.Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: torch.Tensor | None,
    SoftmaxOffset: torch.Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Any]:
    """The forward, in the order of the compiled extension's arguments.

    Args:
        max_seqlen_q, max_seqlen_kv: padded lengths of the sequences.
        attn_scale: multiplies the scores.
        p_dropout: must be 0.
        qkv_layout, o_format: bshd, sbhd or bhsd; Q, K and V may be parts of a packed buffer.
        bias_type, softmax_type: no bias, vanilla.
        attn_mask_type: no mask, causal, padding or both.
        window_size: all keys, or all up to a query's own place.
        cu_seqlens_q, cu_seqlens_kv: int32, [batch + 1]: the lengths, for padding.
        Q, K, V: FP8, 4 dimensions; K and V with as many heads or a divisor of them.
        fake_dtype: type of a plain output, nominal type of a quantized one.
        page_table_k, page_table_v, Bias, SoftmaxOffset: must be None.
        s_quantizer: of delayed scaling; None for MXFP8.
        o_quantizer: of delayed scaling for an FP8 output, otherwise of current scaling or MXFP8.
        return_max_logit: must be False.
        the others: have no effect. They are for concatenated sequences and random numbers; the scales of MXFP8 are in
            the format bhsd.

    Returns:
        O, in ``o_format``; the softmax statistics, float32, [batch, heads, padded query length, 1]; the state of the
        random number generator, int64, [2], which is 0.

    Raises:
        MissingFunctionError: high precision, or an option, that the backend does not have.
        ReferenceBackendError: data that the compiled extension needs too are missing.
    """
    _refuse(
        "fused_attn_fwd", missing_option(qkv_layout, bias_type, attn_mask_type, softmax_type, window_size, p_dropout)
    )
    if not is_quantized(Q):
        _refuse("fused_attn_fwd", "in high precision")
    if return_max_logit:
        _refuse("fused_attn_fwd", "that returns the largest logit")
    form = format_of(qkv_layout)
    q, k = read(Q, form), read(K, form)
    v = read(V, form, along_tokens=True)
    visible = _visible(attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    done = attend(q, k, v, attn_scale, visible, _rounding(s_quantizer, Q, cu_seqlens_q.device, in_forward=True))
    if s_quantizer is not None:
        raise_amax(s_quantizer, done.amax_s)
    output = from_heads(done.output, name_of(o_format)).contiguous()
    is_fp8 = recipe_of(o_quantizer) == "fp8_delayed_scaling"
    rng_state = torch.zeros(2, dtype=torch.int64, device=output.device)
    return [quantize_result(output, fake_dtype, o_quantizer if is_fp8 else None), done.stats, rng_state]


@outside_of_autocast
@torch.no_grad()
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    do_format: int,
    dqkv_layout: int,
    qkv_scale_inv_format: int,
    do_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    Q: Any,
    K: Any,
    V: Any,
    O: Any,  # noqa: E741  # upstream's name
    dO: Any,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: Sequence[torch.Tensor],
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Any]:
    """The backward, in the order of the compiled extension's arguments.

    Args:
        Q, K, V, O: of the forward, quantized or not; O is plain under current scaling by default, and under MXFP8.
        dO, do_format: the gradient of O, FP8 if Q is, and its format.
        dqkv_layout: the layout of the gradients, which may pack them.
        fake_dtype: type of plain gradients, nominal type of quantized ones.
        Aux_CTX_Tensors: the softmax statistics and the state of the generator; for MXFP8 also ``dO`` not quantized.
        s_quantizer, dp_quantizer: of delayed scaling; None for MXFP8 and in high precision. The scale of S is the
            forward's.
        dqkv_quantizer: of delayed scaling for FP8 gradients.
        the others: as in :func:`fused_attn_fwd`, or without effect.

    Returns:
        dQ, dK, dV, and None for the gradients of a bias and of a softmax offset.

    Raises:
        MissingFunctionError: an option that the backend does not have.
        ReferenceBackendError: data that the compiled extension needs too are missing.
    """
    _refuse(
        "fused_attn_bwd", missing_option(qkv_layout, bias_type, attn_mask_type, softmax_type, window_size, p_dropout)
    )
    form, do_form = format_of(qkv_layout), name_of(do_format)
    stats, _, *plain_do = Aux_CTX_Tensors
    done = attend_backward(
        read(Q, form),
        read(K, form),
        read(V, form),
        read(O, name_of(o_format)),
        read(dO, do_form),
        stats,
        attn_scale,
        _visible(attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv),
        _rounding(s_quantizer, Q, cu_seqlens_q.device),
        _rounding(dp_quantizer, dO, cu_seqlens_q.device),
        q_for_dk=read(Q, form, along_tokens=True),
        k_for_dq=read(K, form, along_tokens=True),
        do_for_dv=read(dO, do_form, along_tokens=True),
        do_for_sums=read(plain_do[0] if plain_do else dO, do_form),
    )
    if dp_quantizer is not None:
        raise_amax(dp_quantizer, done.amax_dp)
    return [*_gradients((done.dq, done.dk, done.dv), dqkv_layout, fake_dtype, dqkv_quantizer), None, None]


def _gradients(values: Sequence[torch.Tensor], layout: int, dtype: torch.dtype, quantizer: Any) -> list[Any]:
    form = format_of(layout)
    values = [from_heads(value, form) for value in values]
    is_fp8 = recipe_of(quantizer) == "fp8_delayed_scaling"
    buffers = unwritten_gradients(
        layout, [value.shape for value in values], torch.uint8 if is_fp8 else dtype, values[0].device
    )
    if not is_fp8:
        return [buffer.copy_(value) for buffer, value in zip(buffers, values, strict=True)]
    casting = casting_for(quantizer)
    results = []
    for buffer, value in zip(buffers, values, strict=True):
        result = casting.create(quantizer, value.shape, dtype, value.device)
        result._data = buffer
        casting.write(quantizer, value.contiguous(), result)
        results.append(result)
    return results


def _rounding(quantizer: Any, like: Any, device: torch.device, *, in_forward: bool = False) -> Rounding:
    """The rounding of S to the type of Q, in the forward also in MXFP8; or of dP to the type of dO."""
    if scaling_mode(like) == layouts.PER_TENSOR:
        if recipe_of(quantizer) != "fp8_delayed_scaling":
            raise MissingFunctionError(
                f"FP8 attention with a {type(quantizer).__name__} for S or dP is not in the reference backend. Use one "
                "of Transformer Engine's own recipes, which have quantizers of delayed scaling there."
            )
        return Rounding(fp8_format(like).round, quantizer.scale)
    if in_forward:
        return Rounding(fp8_format(like).round, torch.ones(1, device=device))
    dtype = torch.float32 if is_quantized(like) else like.dtype
    return Rounding(functools.partial(_to_type_and_back, dtype), torch.ones(1, device=device))


def _to_type_and_back(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    return values.to(dtype).float()


def _visible(
    mask: int, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, q_tokens: int, kv_tokens: int
) -> torch.Tensor:
    return visible_pairs(
        cu_seqlens_q, cu_seqlens_kv, q_tokens, kv_tokens, causal=mask in CAUSAL, padding=mask in PADDING
    )


def _refuse(function: str, missing: str | None) -> None:
    if missing is not None:
        raise MissingFunctionError(
            f"{function}: the reference backend has no fused attention {missing}. Leave the choice of an attention to "
            "Transformer Engine, or use the compiled Transformer Engine on a GPU."
        )
