"""The enumerations of the compiled extension, with the same names and values.

They equal Transformer Engine 2.20.2's (``pytorch/csrc/extensions/pybind.cpp`` and the C headers that it binds). On
import, Transformer Engine's Python compares the member names of :class:`DType` and :class:`NVTE_Fused_Attn_Backend`
with its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import SupportsInt

import torch

from te_precision_callbacks.base.numerics.formats import E4M3, E5M2, FloatFormat
from te_precision_callbacks.reference.extension.exports import EXPORTED


class DType(IntEnum):
    """Element types. int16, int64 and e8m0 have numbers in C++ (1, 3, 9) but no name in Python."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
"""The index of each forward tensor's scale and amax under delayed scaling."""


FP8BwdTensors = IntEnum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    start=0,
)
"""The index of each backward tensor's scale and amax under delayed scaling."""


class FP8TensorMeta:
    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


class NVTE_Fused_Attn_Backend(IntEnum):
    """Fused attention kernels; the reference backend has ``NVTE_FP8``."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


NVTE_QKV_Format = IntEnum(
    "NVTE_QKV_Format",
    "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
    start=0,
)
"""Order of the dimensions batch, sequence, head, head size, or tokens, head, head size (THD)."""


NVTE_QKV_Layout = IntEnum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D "
    "NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D "
    "NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
    "NVTE_QKV_Layout_NOT_SET",
    start=0,
)


NVTE_Bias_Type = IntEnum(
    "NVTE_Bias_Type",
    "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    start=0,
)


NVTE_Mask_Type = IntEnum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    start=0,
)


NVTE_Softmax_Type = IntEnum(
    "NVTE_Softmax_Type",
    "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    start=0,
)


class NVTEScalingMode(IntEnum):
    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


CommOverlapType = IntEnum("CommOverlapType", "RS AG", start=0)


NVTERoutingMapFormat = IntEnum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8", start=0)


NVTEQBHistogramMode = IntEnum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC", start=0)


EXPORTED.update(
    {name: kind for name, kind in globals().items() if isinstance(kind, type) and kind.__module__ == __name__}
)

_TORCH: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
_FP8: dict[int, FloatFormat] = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}


def torch_dtype(dtype: SupportsInt) -> torch.dtype:
    return _TORCH[int(dtype)]


def fp8_format(dtype: SupportsInt) -> FloatFormat:
    return _FP8[int(dtype)]
