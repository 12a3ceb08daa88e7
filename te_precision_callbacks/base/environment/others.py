"""The variables that torch, trainers, nvidia-dlfw-inspect and this package read.

Read from torch 2.13, accelerate 1.15, transformers 5.23 and nvidia-dlfw-inspect 0.2.2.
"""

from __future__ import annotations

from te_precision_callbacks.base.environment.values import (
    Fault,
    anything,
    equals_1,
    flag,
    integer,
    one_of,
    torch_flag,
)
from te_precision_callbacks.base.environment.variable import Variable, variables

_CAPABILITIES = one_of("", "9.0", "10.0", otherwise=Fault("the reference backend raises InstallError", stops=True))
_LEVELS = one_of(
    *("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), otherwise=Fault("this value counts as INFO", stops=False)
)

_TORCH = (
    *variables(
        "cuBLAS, cuDNN",
        "precision",
        (
            "NVIDIA_TF32_OVERRIDE",
            "",
            anything,
            "0: NVIDIA's libraries compute float32 without TF32, whatever torch asks",
        ),
    ),
    *variables(
        "aten/src/ATen/Context.h",
        "precision",
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", torch_flag, "1: float32 matmuls are in TF32"),
    ),
    *variables(
        "aten/src/ATen/Context.cpp",
        "numerics",
        ("CUBLAS_WORKSPACE_CONFIG", "", anything, ":4096:8 or :16:8: cuBLAS gives the same results in every run"),
    ),
    *variables(
        "torch/_inductor/config.py",
        "numerics",
        ("TORCHINDUCTOR_USE_FAST_MATH", "", equals_1, "1: torch.compile uses approximate functions"),
        ("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "0", equals_1, "1: torch.compile rounds between fused operations"),
        ("TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING", "0", equals_1, "1: torch.compile divides as torch does"),
        ("TORCHINDUCTOR_DETERMINISTIC", "", equals_1, "1: torch.compile chooses no kernel by measuring"),
        ("TORCHINDUCTOR_BATCH_INVARIANT", "", equals_1, "1: results of torch.compile do not depend on the batch size"),
    ),
    *variables(
        "torch/_inductor/config.py",
        "none",
        (
            "TORCHINDUCTOR_CUDAGRAPHS",
            "",
            equals_1,
            "1: torch.compile replays CUDA graphs, in which nothing is observed",
        ),
    ),
)

_TRAINERS = (
    *variables(
        "transformers/modeling_flash_attention_utils.py",
        "numerics",
        (
            "FLASH_ATTENTION_DETERMINISTIC",
            "0",
            equals_1,
            "1: flash-attn in transformers gives the same results in every run",
        ),
    ),
    *variables(
        "accelerate/state.py",
        "precision",
        (
            "ACCELERATE_MIXED_PRECISION",
            "no",
            one_of("no", "fp16", "bf16", "fp8", otherwise=Fault("Accelerator() raises ValueError", stops=True)),
            "mixed_precision of an Accelerator that is given none",
        ),
    ),
    *variables(
        "accelerate/utils/dataclasses.py",
        "precision",
        ("ACCELERATE_FP8_FORMAT", "HYBRID", anything, "fp8_format of Accelerate's recipe"),
        ("ACCELERATE_FP8_MARGIN", "0", integer, "margin of Accelerate's recipe"),
        ("ACCELERATE_FP8_AMAX_HISTORY_LEN", "1024", integer, "amax_history_len of Accelerate's recipe"),
        ("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "most_recent", anything, "amax_compute_algo of Accelerate's recipe"),
        ("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "", anything, "true: Accelerate's recipe is MXFP8BlockScaling"),
        ("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "", anything, "true: Accelerate evaluates in FP8"),
        ("ACCELERATE_FP8_OVERRIDE_FPROP", "", anything, "true: Accelerate asks for fprop in high precision"),
        ("ACCELERATE_FP8_OVERRIDE_DGRAD", "", anything, "true: Accelerate asks for dgrad in high precision"),
        ("ACCELERATE_FP8_OVERRIDE_WGRAD", "", anything, "true: Accelerate asks for wgrad in high precision"),
    ),
)

_DEBUGGING = (
    *variables(
        "te_precision_callbacks/reference/target.py",
        "precision",
        ("TE_PRECISION_REFERENCE_CAPABILITY", "9.0", _CAPABILITIES, "the GPU that the reference backend emulates"),
    ),
    *variables(
        "te_precision_callbacks/reference/extension/versions.py",
        "numerics",
        ("TE_PRECISION_REFERENCE_CUBLASLT", "120905", integer, "the cuBLASLt that the reference backend reports"),
    ),
    *variables(
        "te_precision_callbacks/reference/inherited.py",
        "precision",
        ("TE_PRECISION_REFERENCE_INSTALL", "", anything, "child processes install the reference backend"),
    ),
    *variables(
        "nvdlfw_inspect/logging.py",
        "none",
        ("NVDLFW_INSPECT_LOG_LEVEL", "INFO", lambda value: _LEVELS(value.upper()), "the level of the log of events"),
        ("NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP", "", flag, "1: names of log files have a time"),
        ("NVDLFW_INSPECT_LOG_TIMESTAMP", "", anything, "that time, set by nvidia-dlfw-inspect"),
        ("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", "", flag, "1: log files of an earlier run are emptied"),
    ),
)

VARIABLES: tuple[Variable, ...] = (*_TORCH, *_TRAINERS, *_DEBUGGING)
"""Those that change precision or numerics, and those of nvidia-dlfw-inspect and of this package."""
