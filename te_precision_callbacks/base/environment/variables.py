"""The names of the environment variables that change precision or numerics, by how the library reads the value.

VARIABLES["NVTE_FLASH_ATTN"]("2")  # Fault("0 or 1 is expected, and another number may count as either", stops=False)

Read from Transformer Engine 2.20.2, nvidia-dlfw-inspect 0.2.2, torch 2.13, accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    """What a library makes of a value that it does not expect.

    Attributes:
        what: in words.
        stops: whether a run ends with an exception.
    """

    what: str
    stops: bool


def _anything(value: str) -> Fault | None:
    return None


def _integer(value: str) -> Fault | None:
    """Read as ``int(value)``."""
    try:
        int(value)
    except ValueError:
        return Fault("an integer is expected, and reading this value raises an exception", stops=True)
    return None


def _number_as_flag(value: str) -> Fault | None:
    """Read as ``bool(int(value))`` or ``int(value) > 0``."""
    if value in ("0", "1"):
        return None
    return _integer(value) or Fault("0 or 1 is expected, and another number may count as either", stops=False)


def _one_of(*words: str, otherwise: str, stops: bool) -> Callable[[str], Fault | None]:
    """Read as one of these words; ``otherwise`` describes what another value does."""
    fault = Fault(f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r} is expected, and {otherwise}", stops)
    return lambda value: None if value in words else fault


_NVFP4_RAISES = "NVFP4BlockScaling() raises ValidationError"
_4over6 = _one_of("none", "weights", "activations", "all", otherwise=_NVFP4_RAISES, stops=True)
_log_level = _one_of(
    "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", otherwise="this value counts as INFO", stops=False
)

VARIABLES: Mapping[str, Callable[[str], Fault | None]] = {
    **dict.fromkeys(
        (
            *("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
            *("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION"),
            *("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"),
            *("NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA", "NVTE_FUSED_ATTN_USE_FAv2_BWD"),
            *("NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM", "NVTE_DISABLE_TRITON_AUTOTUNING"),
            *("TORCHINDUCTOR_USE_FAST_MATH", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"),
            *("TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING", "TORCHINDUCTOR_DETERMINISTIC"),
            *("TORCHINDUCTOR_BATCH_INVARIANT", "TORCHINDUCTOR_CUDAGRAPHS", "FLASH_ATTENTION_DETERMINISTIC"),
        ),
        _one_of("", "0", "1", otherwise="only '1' turns it on", stops=False),
    ),
    **dict.fromkeys(
        (
            *("NVTE_UNFUSED_FP8_UPDATE", "NVTE_DPA_FP8DS_REDUCE_AMAX", "NVTE_UnfusedDPA_Emulate_FP8"),
            *("NVTE_DPA_FP8CS_O_in_F16", "NVTE_FP8_DPA_BWD", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"),
            *("NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
            *("NVTE_APPLY_QK_LAYER_SCALING", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_MASKED_SOFTMAX_FUSION"),
            *("NVTE_TORCH_COMPILE", "NVTE_BIAS_GELU_NVFUSION", "NVTE_GEMM_GELU_FUSION", "NVTE_BIAS_DROPOUT_FUSION"),
            *("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "NVTE_GROUPED_LINEAR_SINGLE_PARAM"),
            *("NVTE_FUSED_MLA_Q_UPROJ", "NVTE_CUTEDSL_FUSED_GROUPED_MLP"),
            *("NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP", "NVDLFW_INSPECT_ENABLE_LOG_TIMESTAMP"),
            "NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE",
        ),
        _number_as_flag,
    ),
    # Transformer Engine's extension (common/util/system.h: getenv<bool>).
    **dict.fromkeys(
        (
            *("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "NVTE_USE_FAST_MATH", "NVTE_NORM_FWD_USE_CUDNN"),
            *("NVTE_NORM_BWD_USE_CUDNN", "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE"),
            *("NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", "NVTE_USE_CUTLASS_GROUPED_GEMM", "NVTE_FUSED_GROUP_REQUANTIZE"),
        ),
        _one_of("", "0", "1", otherwise="the extension raises RuntimeError for this value", stops=True),
    ),
    **dict.fromkeys(
        (
            *("NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"),
            *("NVTE_INF_LAYERNORM_SM_MARGIN", "NVTE_EXT_MARGIN_SM", "NVTE_RS_STRIDED_ATOMIC"),
            *("NVTE_RADIX_TOPK_THRESHOLD", "ACCELERATE_FP8_MARGIN", "ACCELERATE_FP8_AMAX_HISTORY_LEN"),
            *("TE_PRECISION_QUIET", "TE_PRECISION_REFERENCE_CUBLASLT"),
        ),
        _integer,
    ),
    **dict.fromkeys(
        (
            *("NVTE_PLUGIN", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ACCELERATE_FP8_FORMAT"),
            *("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"),
            *("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "ACCELERATE_FP8_OVERRIDE_FPROP"),
            *("ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD", "TE_PRECISION_REFERENCE_INSTALL"),
            "NVDLFW_INSPECT_LOG_TIMESTAMP",
        ),
        _anything,
    ),
    "NVTE_BACKWARD_OVERRIDE": _one_of(
        "high_precision", "dequantized", otherwise="every recipe raises ValidationError", stops=True
    ),
    "NVTE_NVFP4_4OVER6": _4over6,
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": _4over6,
    "NVTE_NVFP4_4OVER6_ERR_MODE": _one_of("MAE", "MSE", "mae", "mse", otherwise=_NVFP4_RAISES, stops=True),
    "NVTE_DPA_FP8_RECIPE": _one_of(
        *("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
        otherwise="DotProductAttention ignores this value, but MultiheadAttention does not",
        stops=False,
    ),
    "NVTE_DPA_FP8_FORMAT": _one_of(
        "HYBRID", "E4M3", "E5M2", otherwise="importing transformer_engine.pytorch raises KeyError", stops=True
    ),
    "NVTE_DPA_FP8DS_AMAX_ALGO": _one_of(
        "most_recent", "max", otherwise="updating the scales raises an exception", stops=True
    ),
    "NVTE_ENABLE_CUTEDSL_BACKEND": _one_of("0", "1", otherwise="every value but '0' turns it on", stops=False),
    # c10/util/env.cpp: check_env.
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _one_of("0", "1", otherwise="torch ignores this value", stops=False),
    "ACCELERATE_MIXED_PRECISION": _one_of(
        "no", "fp16", "bf16", "fp8", otherwise="Accelerator() raises ValueError", stops=True
    ),
    "TE_PRECISION_REFERENCE_CAPABILITY": _one_of(
        "", "9.0", "10.0", otherwise="the reference backend raises InstallError", stops=True
    ),
    "NVDLFW_INSPECT_LOG_LEVEL": lambda value: _log_level(value.upper()),
}
"""Variable -> what is wrong with a value; None for a value that is read as it is meant."""

WITHOUT_INFLUENCE = frozenset(
    (
        # Logs and profiles.
        *("NVTE_DEBUG", "NVTE_DEBUG_LEVEL", "NVTE_PRINT_LAYER_NUMBER", "NVTE_PRINT_RANK", "NVTE_NVTX_ENABLED"),
        *("NVTE_UBDEBUG", "NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK"),
        # Where data waits, and how it travels.
        *("NVTE_CPU_OFFLOAD_V1", "NVTE_BATCH_MHA_P2P_COMM", "NVTE_AG_P2P_MULTI_ATOMIC", "NVTE_DOPIN", "NVTE_NODOUBLE"),
        *("NVTE_EP_HANDLE_CACHE_SIZE", "NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB"),
        # How kernels are compiled, and what torch.compile keeps of custom operators.
        *("NVTE_DISABLE_NVRTC", "NVTE_CUDA_INCLUDE_DIR", "NVTE_COMPILE_OP_SIDE_EFFECTS"),
        # How Transformer Engine is built and installed.
        *("NVTE_FRAMEWORK", "NVTE_PROJECT_BUILDING", "NVTE_RELEASE_BUILD", "NVTE_PYTORCH_FORCE_BUILD"),
        *("NVTE_PYTORCH_FORCE_CXX11_ABI", "NVTE_PYTORCH_SKIP_CUDA_BUILD", "NVTE_UB_WITH_MPI", "NVTE_WITH_CUBLASMP"),
        *("NVTE_WITH_NCCL_EP", "NVTE_CUDA_ARCHS", "NVTE_BUILD_THREADS_PER_JOB", "NVTE_BUILD_DEBUG"),
        *("NVTE_BUILD_MAX_JOBS", "NVTE_USE_CCACHE", "NVTE_CMAKE_BUILD_DIR"),
        # JAX.
        *("NVTE_FUSED_RING_ATTENTION_USE_SCAN", "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION"),
        *("NVTE_JAX_ALL_REDUCE_IN_FP32", "NVTE_JAX_CUSTOM_CALLS", "NVTE_JAX_CUSTOM_CALLS_RE"),
        *("NVTE_JAX_ENFORCE_TRITON_AUTOTUNING", "NVTE_JAX_ENFORCE_V2_GROUPED_GEMM", "NVTE_JAX_EP_NCCL_COMM_FROM_XLA"),
        "NVTE_USE_PYTORCH_TRITON",
    )
)
"""The other variables that Transformer Engine 2.20.2 reads: they change no number of a training in torch."""
