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


class FP8FwdTensors(IntEnum):
    """The index of each forward tensor's scale and amax under delayed scaling."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(IntEnum):
    """The index of each backward tensor's scale and amax under delayed scaling."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class FP8TensorMeta:
    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


class NVTE_Fused_Attn_Backend(IntEnum):
    """Fused attention kernels; the reference backend has ``NVTE_FP8``."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class NVTE_QKV_Format(IntEnum):
    """Order of the dimensions batch, sequence, head, head size, or tokens, head, head size (THD)."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


class NVTE_QKV_Layout(IntEnum):
    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24
    NVTE_BHSD_BHSD_BHSD = 25
    NVTE_QKV_Layout_NOT_SET = 26


class NVTE_Bias_Type(IntEnum):
    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTEScalingMode(IntEnum):
    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


class CommOverlapType(IntEnum):
    RS = 0
    AG = 1


class NVTERoutingMapFormat(IntEnum):
    BYTEMAP = 0
    BITMAP_U8 = 1


class NVTEQBHistogramMode(IntEnum):
    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


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
