"""A stand-in for Transformer Engine's compiled module ``transformer_engine_torch``, in plain PyTorch.

It has all names that Transformer Engine 2.20.2's Python looks up in the compiled module. A function either replaces the
compiled function, on any device, slowly and exactly, or raises
:class:`~te_precision_callbacks.reference.errors.MissingFunctionError` (``missing.py``). Transformer Engine is not
imported until a function needs one of its tensor classes.
"""

# ruff: noqa: F401  # all that is imported is exported

from __future__ import annotations

from types import ModuleType
from typing import Any

from te_precision_callbacks.reference.extension import missing as _missing
from te_precision_callbacks.reference.extension.activation import (
    clamped_dswiglu,
    clamped_swiglu,
    dbias_dgelu,
    dbias_dqgelu,
    dbias_drelu,
    dbias_dsilu,
    dbias_dsrelu,
    dgeglu,
    dgelu,
    dglu,
    dqgeglu,
    dqgelu,
    dreglu,
    drelu,
    dsilu,
    dsreglu,
    dsrelu,
    dswiglu,
    geglu,
    gelu,
    glu,
    qgeglu,
    qgelu,
    reglu,
    relu,
    silu,
    sreglu,
    srelu,
    swiglu,
)
from te_precision_callbacks.reference.extension.attention import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    get_fused_attn_backend,
    multi_tensor_transpose_to_bhsd,
    scaled_aligned_causal_masked_softmax_backward,
    scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
)
from te_precision_callbacks.reference.extension.buffers import (
    multi_tensor_swizzle_scales_for_gemm_,
    multi_tensor_swizzle_scales_for_gemm_unchecked_,
    swizzle_scales_for_gemm_,
)
from te_precision_callbacks.reference.extension.enums import (
    CommOverlapType,
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    FP8TensorMeta,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    NVTEQBHistogramMode,
    NVTERoutingMapFormat,
    NVTEScalingMode,
)
from te_precision_callbacks.reference.extension.gemm import generic_gemm, te_general_grouped_gemm
from te_precision_callbacks.reference.extension.missing import (
    CommOverlap,
    CommOverlapHelper,
    CommOverlapP2P,
    grouped_mlp_experimental,
)
from te_precision_callbacks.reference.extension.multi_tensor import (
    compute_amax,
    fused_amax_and_scale_update_after_reduction,
    multi_tensor_adam,
    multi_tensor_adam_fp8,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
)
from te_precision_callbacks.reference.extension.mxfp8 import (
    multi_tensor_compute_scale_inv_e8m0,
    mxfp8_scaling_compute_partial_amax,
    mxfp8_scaling_partial_cast,
)
from te_precision_callbacks.reference.extension.normalization import (
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    rmsnorm_fwd,
)
from te_precision_callbacks.reference.extension.nvfp4 import nvfp4_2d_scale_transpose, nvfp4_data_transpose
from te_precision_callbacks.reference.extension.padding import fused_multi_row_padding, fused_multi_row_unpadding
from te_precision_callbacks.reference.extension.quantization import (
    bgrad_quantize,
    create_empty_quantized_tensor,
    dequantize,
    fp8_transpose,
    multi_tensor_quantize,
    quantize,
    split_quantize,
    swap_first_dims,
)
from te_precision_callbacks.reference.extension.rope import fused_rope_backward, fused_rope_forward
from te_precision_callbacks.reference.extension.versions import (
    device_supports_multicast,
    get_cublasLt_version,
    get_cudnn_version,
    get_num_cublas_streams,
    get_stream_priority_range,
    nvte_built_with_cublasmp,
    ubuf_built_with_mpi,
)

_IN_THIS_FILE = {"Any", "ModuleType", "annotations"}
_imported = {name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, ModuleType))}
__all__ = [*sorted(_imported - _IN_THIS_FILE), *sorted(_missing.FUNCTIONS)]

globals().update(_missing.FUNCTIONS)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"The reference backend's transformer_engine_torch has no attribute {name!r}: the Python code of Transformer "
        "Engine 2.20.2 does not look it up."
    )
