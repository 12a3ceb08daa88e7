"""Support of the reference backend's fused attention: FP8, within the limits of the emulated GPU.

Transformer Engine queries it to select an attention (``pytorch/attention/dot_product_attention/utils.py:
get_attention_backend``, TE 2.20.2), after its own filters of recipes, environment variables, the compute capability and
the version of cuDNN. Attention in high precision is Transformer Engine's unfused attention, which is pure torch.

The limits of a GPU are those of ``common/fused_attn/fused_attn.cpp: nvte_get_fused_attn_backend`` (TE 2.20) and of
cudnn-frontend 1.23 (``node/sdpa_support_surface.h``, ``node/sdpa_fp8_bwd.h``), so that an attention which runs here
also runs on that GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from te_precision_callbacks.reference.extension.attention_heads import format_of
from te_precision_callbacks.reference.extension.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    NVTEScalingMode,
)
from te_precision_callbacks.reference.target import capability

CAUSAL = (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
PADDING = (NVTE_Mask_Type.NVTE_PADDING_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)

_FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)
_FORMATS = ("bshd", "sbhd", "bhsd")


def get_fused_attn_backend(params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The fused attention for Transformer Engine's ``FusedAttentionParams``: ``NVTE_FP8`` and an empty text, or
    ``NVTE_No_Backend`` and the reason.
    """
    missing = _missing(params)
    if missing is None:
        return NVTE_Fused_Attn_Backend.NVTE_FP8, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"The reference backend has no fused attention {missing}."


def missing_option(
    layout: int, bias: int, mask: int, softmax: int, window: Sequence[int], dropout: float
) -> str | None:
    """The option of a call that FP8 attention does not have here, to follow "no fused attention"; None if it has all.

    ``window`` is the number of visible keys to the left and right of a query; -1 for all.
    """
    if format_of(layout) not in _FORMATS:
        return f"for the layout {_name(NVTE_QKV_Layout(layout))}"
    if bias != NVTE_Bias_Type.NVTE_NO_BIAS:
        return f"with the bias {_name(NVTE_Bias_Type(bias))}"
    if mask not in (NVTE_Mask_Type.NVTE_NO_MASK, *CAUSAL, *PADDING):
        return f"with the mask {_name(NVTE_Mask_Type(mask))}"
    if softmax != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        return f"with the softmax {_name(NVTE_Softmax_Type(softmax))}"
    left, right = window
    if left != -1 or (right != -1 and not (right == 0 and mask in CAUSAL)):
        return f"with the sliding window {(left, right)}"
    if dropout:
        return f"with dropout (p={dropout})"
    return None


def _missing(params: Any) -> str | None:
    if params.qkv_dtype not in _FP8:
        return "in high precision"
    if params.scaling_mode not in (NVTEScalingMode.NVTE_DELAYED_TENSOR_SCALING, NVTEScalingMode.NVTE_MXFP8_1D_SCALING):
        return f"with the scaling {_name(NVTEScalingMode(params.scaling_mode))}"
    if params.return_max_logit:
        return "that returns the largest logit"
    if params.cuda_graph:
        return "in a CUDA graph"
    return missing_option(
        params.qkv_layout,
        params.bias_type,
        params.attn_mask_type,
        params.softmax_type,
        (params.window_size_left, params.window_size_right),
        params.dropout if params.is_training else 0.0,
    ) or _beyond_the_gpu(params)


def _beyond_the_gpu(params: Any) -> str | None:
    d_qk, d_v = params.head_dim_qk, params.head_dim_v
    gpu = "of compute capability {}.{}".format(*capability())
    if params.num_attn_heads % params.num_gqa_groups:
        return f"of {params.num_attn_heads} query heads over {params.num_gqa_groups} heads of keys"
    if capability() >= (10, 0):
        if d_qk % 16 or d_v % 16 or d_v > 128 or (d_qk > 128 and (d_qk, d_v) != (192, 128)):
            return (
                f"with heads of {d_qk} and {d_v}: cuDNN has multiples of 16 up to 128, and 192 with 128, on a GPU {gpu}"
            )
        return None
    if not {params.o_dtype, params.dqkv_dtype} <= set(_FP8):
        return f"with results in high precision: cuDNN has them in FP8 alone on a GPU {gpu}"
    if params.is_training and (d_qk, d_v) != (128, 128):
        return f"in training with heads of {d_qk} and {d_v}: cuDNN has 128 alone on a GPU {gpu}"
    if d_qk % 16 or d_v % 16 or max(d_qk, d_v) > 256:
        return f"with heads of {d_qk} and {d_v}: cuDNN has multiples of 16 up to 256 on a GPU {gpu}"
    return None


def _name(member: IntEnum) -> str:
    return member.name.removeprefix("NVTE_")
