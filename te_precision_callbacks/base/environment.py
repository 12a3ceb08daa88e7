"""Installed versions, and environment variables that change numbers.

Most variables are read once, when a library is imported. Read from Transformer Engine 2.20.2, torch 2.13, accelerate
1.15 and transformers 5.23.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

VARIABLES = (
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN",
    "ACCELERATE_FP8_FORMAT",
    "ACCELERATE_FP8_MARGIN",
    "ACCELERATE_FP8_OVERRIDE_DGRAD",
    "ACCELERATE_FP8_OVERRIDE_FPROP",
    "ACCELERATE_FP8_OVERRIDE_WGRAD",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
    "ACCELERATE_MIXED_PRECISION",
    "CUBLAS_WORKSPACE_CONFIG",
    "FLASH_ATTENTION_DETERMINISTIC",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_APPLY_QK_LAYER_SCALING",
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
    "NVTE_DPA_FP8CS_O_in_F16",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_RECIPE_DPA",
    "NVTE_DPA_FP8_RECIPE_MHA",
    "NVTE_FLASH_ATTN",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_FP8_DPA_BWD",
    "NVTE_FUSED_ATTN",
    "NVTE_NORM_BWD_USE_CUDNN",
    "NVTE_NORM_FWD_USE_CUDNN",
    "NVTE_NVFP4_4OVER6",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256",
    "NVTE_NVFP4_4OVER6_ERR_MODE",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_DISABLE_RHT",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "NVTE_UNFUSED_ATTN",
    "NVTE_UNFUSED_FP8_UPDATE",
    "NVTE_USE_FAST_MATH",
    "NVTE_UnfusedDPA_Emulate_FP8",
    "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
    "TE_PRECISION_REFERENCE_CAPABILITY",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_USE_FAST_MATH",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in VARIABLES if name in environ}


def installed_version(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
