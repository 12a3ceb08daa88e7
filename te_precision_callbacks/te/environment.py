"""Installed versions, GPUs, and the environment variables and torch settings that change numerical results.

Libraries read most variables once, at import. The variables are from Transformer Engine 2.20.2, torch 2.13, accelerate
1.15 and transformers 5.23.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCH_VARIABLE = "TE_PRECISION_LAUNCH"
"""Set by ``te-precision run`` to a name of the launch, for all processes that it starts."""

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
    "NVTE_BIAS_DROPOUT_FUSION",
    "NVTE_BIAS_GELU_NVFUSION",
    "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM",
    "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP",
    "NVTE_DISABLE_TRITON_AUTOTUNING",
    "NVTE_DPA_FP8CS_O_in_F16",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_RECIPE_DPA",
    "NVTE_DPA_FP8_RECIPE_MHA",
    "NVTE_ENABLE_CUTEDSL_BACKEND",
    "NVTE_EXT_MARGIN_SM",
    "NVTE_FLASH_ATTN",
    "NVTE_FLASH_ATTN_V2",
    "NVTE_FLASH_ATTN_V3",
    "NVTE_FLASH_ATTN_V4",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_FP8_DPA_BWD",
    "NVTE_FUSED_ATTN",
    "NVTE_FUSED_ATTN_USE_FAv2_BWD",
    "NVTE_FUSED_MLA_Q_UPROJ",
    "NVTE_GEMM_GELU_FUSION",
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM",
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
    "NVTE_MASKED_SOFTMAX_FUSION",
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
    "NVTE_PLUGIN",
    "NVTE_TORCH_COMPILE",
    "NVTE_UNFUSED_ATTN",
    "NVTE_UNFUSED_FP8_UPDATE",
    "NVTE_USE_FAST_MATH",
    "NVTE_UnfusedDPA_Emulate_FP8",
    "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
    "TE_PRECISION_REFERENCE_CAPABILITY",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_USE_FAST_MATH",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "UB_SKIPMC",
)


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in VARIABLES if name in environ}


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """The state of torch in this process; the version of a missing library is None.

    Attributes:
        visible_devices: CUDA_VISIBLE_DEVICES, if set.
        warnings: torch's warnings during the detection of GPUs and cuDNN.
        settings: settings that change precision; scripts can change them.
    """

    gpus: tuple[Gpu, ...]
    visible_devices: str | None
    driver: str | None
    cuda: str | None
    cudnn: str | None
    warnings: tuple[str, ...]
    settings: Mapping[str, str]


def torch_facts() -> Torch:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(number))
        gpus.append(Gpu(torch.cuda.get_device_name(number), capability, properties.total_memory))
    messages = [str(warning.message) for warning in caught]
    try:
        encoded = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch was built with another cuDNN than the loaded one; raised only once
        encoded = torch._C._cudnn.getVersionInt()
        messages.append(str(error))
    return Torch(
        gpus=tuple(gpus),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=_driver(_DRIVER.read_text()) if _DRIVER.is_file() else None,
        cuda=torch.version.cuda,
        cudnn=None if encoded is None else _cudnn(encoded),
        warnings=tuple(messages),
        settings={name: str(value) for name, value in _settings(torch).items()},
    )


def _settings(torch: Any) -> dict[str, object]:
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "default_dtype": torch.get_default_dtype(),
        "autocast_dtype cuda": torch.get_autocast_dtype("cuda"),
        "autocast_dtype cpu": torch.get_autocast_dtype("cpu"),
    }


def _driver(text: str) -> str | None:
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    if version is None:
        return None
    return version[1]


def _cudnn(encoded: int) -> str:
    """Decode a version: 90100 is 9.1.0; before version 9, 8902 is 8.9.2 (cudnn_version.h)."""
    major, rest = divmod(encoded, 10_000 if encoded >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
