"""The variables that Transformer Engine reads, from the sources of 2.20.2: its Python and its extension."""

from __future__ import annotations

from te_precision_callbacks.base.environment.values import (
    Fault,
    anything,
    equals_0_is_off,
    equals_1,
    extension_flag,
    flag,
    flag_above_0,
    integer,
    one_of,
)
from te_precision_callbacks.base.environment.variable import Variable, variables

OVERRIDES = ("high_precision", "dequantized")
"""The values of ``backward_override``."""

_4OVER6 = one_of(
    "none", "weights", "activations", "all", otherwise=Fault("NVFP4BlockScaling() raises ValidationError", stops=True)
)
_TORCH = "transformer_engine/pytorch"
_ATTENTION = f"{_TORCH}/attention/dot_product_attention"

_RECIPES = (
    *variables(
        "transformer_engine/common/recipe/__init__.py",
        "precision",
        (
            "NVTE_BACKWARD_OVERRIDE",
            "",
            one_of(*OVERRIDES, otherwise=Fault("every recipe raises ValidationError", stops=True)),
            "backward_override of every recipe: dgrad and wgrad read operands in high precision, the original or"
            " dequantized ones; DelayedScaling() raises ValidationError",
        ),
        (
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            "0",
            equals_1,
            "1: scales of Float8CurrentScaling are powers of two",
        ),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0", equals_1, "1: scales of Float8BlockScaling are any float32"),
        ("NVTE_NVFP4_DISABLE_RHT", "0", equals_1, "1: NVFP4 without the random Hadamard transform"),
        ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "0", equals_1, "1: NVFP4 rounds gradients to nearest"),
        (
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
            "0",
            equals_1,
            "1: NVFP4 scales weights by 1 x 16 elements, not 16 x 16",
        ),
        ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "0", equals_1, "1: NVFP4 keeps an amax for each row of an activation"),
        ("NVTE_NVFP4_4OVER6", "none", _4OVER6, "tensors whose NVFP4 blocks take the better of two scales (4over6)"),
        (
            "NVTE_NVFP4_4OVER6_E4M3_USE_256",
            "all",
            _4OVER6,
            "4over6 tensors with 256 as the largest block scale, not 448",
        ),
        (
            "NVTE_NVFP4_4OVER6_ERR_MODE",
            "MAE",
            one_of(
                "MAE", "MSE", "mae", "mse", otherwise=Fault("NVFP4BlockScaling() raises ValidationError", stops=True)
            ),
            "the error by which 4over6 chooses a scale",
        ),
    ),
    *variables(
        f"{_TORCH}/csrc/quantizer.cpp",
        "precision",
        ("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0", extension_flag, "1: 4over6 computes this error approximately"),
    ),
    *variables(
        f"{_TORCH}/csrc/quantizer.cpp",
        "numerics",
        (
            "NVTE_USE_FAST_MATH",
            "0",
            extension_flag,
            "1: NVFP4 divides approximately, and does not round to BF16 after the Hadamard transform",
        ),
    ),
    *variables(
        f"{_TORCH}/quantization.py",
        "numerics",
        (
            "NVTE_UNFUSED_FP8_UPDATE",
            "0",
            flag,
            "1: delayed scaling updates scales in torch operations, not in one kernel",
        ),
    ),
    *variables(
        f"{_TORCH}/_extra_state.py",
        "precision",
        (
            "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
            "0",
            equals_1,
            "1: scales and amax history of delayed scaling are unpickled from a checkpoint; otherwise loading it raises"
            " RuntimeError",
        ),
    ),
    *variables(
        "transformer_engine/common/__init__.py",
        "precision",
        ("NVTE_PLUGIN", "", anything, "the module that replaces the extension, with formats and kernels of its own"),
    ),
)

_FP8_ATTENTION = (
    *variables(
        f"{_ATTENTION}/dot_product_attention.py",
        "precision",
        (
            "NVTE_DPA_FP8_RECIPE",
            "",
            one_of(
                *("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
                otherwise=Fault("DotProductAttention ignores this value, but MultiheadAttention does not", stops=False),
            ),
            "the recipe of attention, instead of that of autocast; F16: not in FP8, and fp8_dpa and fp8_mha of the"
            " recipe become False",
        ),
        (
            "NVTE_DPA_FP8_FORMAT",
            "HYBRID",
            one_of(
                *("HYBRID", "E4M3", "E5M2"),
                otherwise=Fault("importing transformer_engine.pytorch raises KeyError", stops=True),
            ),
            "the format of attention that NVTE_DPA_FP8_RECIPE switches from NVFP4 to FP8",
        ),
        (
            "NVTE_DPA_FP8DS_AMAX_ALGO",
            "most_recent",
            one_of("most_recent", "max", otherwise=Fault("updating the scales raises an exception", stops=True)),
            "amax_compute_algo of delayed scaling in attention",
        ),
        ("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1", integer, "amax_history_len of delayed scaling in attention"),
        ("NVTE_DPA_FP8DS_REDUCE_AMAX", "1", flag, "0: delayed scaling in attention does not reduce amaxes over ranks"),
        ("NVTE_UnfusedDPA_Emulate_FP8", "0", flag, "1: unfused attention emulates FP8 in high precision"),
    ),
    *variables(
        f"{_TORCH}/attention/multi_head_attention.py",
        "precision",
        ("NVTE_DPA_FP8_RECIPE_DPA", "0", equals_1, "fp8_dpa of MultiheadAttention under NVTE_DPA_FP8_RECIPE"),
        ("NVTE_DPA_FP8_RECIPE_MHA", "0", equals_1, "fp8_mha of MultiheadAttention under NVTE_DPA_FP8_RECIPE"),
    ),
    *variables(
        f"{_ATTENTION}/backends.py",
        "precision",
        (
            "NVTE_DPA_FP8CS_O_in_F16",
            "1",
            flag,
            "0: the backward of attention under current scaling reads its output in FP8, not in BF16 or FP16",
        ),
        ("NVTE_FP8_DPA_BWD", "1", flag, "0: the backward of FP8 attention is in BF16 or FP16"),
    ),
)

_ATTENTION_KERNELS = (
    *variables(
        f"{_ATTENTION}/utils.py",
        "numerics",
        ("NVTE_FLASH_ATTN", "1", flag, "0: no flash-attn, of any version"),
        ("NVTE_FLASH_ATTN_V2", "1", flag, "0: no flash-attn 2"),
        ("NVTE_FLASH_ATTN_V3", "1", flag, "0: no flash-attn 3"),
        ("NVTE_FLASH_ATTN_V4", "1", flag, "0: no flash-attn 4"),
        ("NVTE_FUSED_ATTN", "1", flag, "0: no fused attention of cuDNN, the only kernel that trains in FP8"),
        ("NVTE_UNFUSED_ATTN", "1", flag, "0: no attention in torch operations"),
    ),
    *variables(
        f"{_ATTENTION}/backends.py",
        "numerics",
        (
            "NVTE_FUSED_ATTN_USE_FAv2_BWD",
            "0",
            equals_1,
            "1: on Hopper, fused attention has the backward of flash-attn 2",
        ),
        (
            "NVTE_APPLY_QK_LAYER_SCALING",
            "0",
            flag,
            "1: unfused attention divides QK^T by the layer's number",
        ),
    ),
    *variables(
        f"{_ATTENTION}/dot_product_attention.py",
        "numerics",
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", flag, "0: only kernels whose results are the same in every run"),
    ),
    *variables(
        f"{_ATTENTION}/softmax.py",
        "numerics",
        ("NVTE_MASKED_SOFTMAX_FUSION", "1", flag, "0: unfused attention scales and masks in separate operations"),
    ),
    *variables(
        f"{_TORCH}/attention/fused_mla_q_uproj.py",
        "numerics",
        (
            "NVTE_FUSED_MLA_Q_UPROJ",
            "1",
            flag_above_0,
            "0: latent attention projects, rotates and quantizes Q separately",
        ),
    ),
)

_FUSIONS_AND_NORMS = (
    *variables(
        f"{_TORCH}/jit.py",
        "numerics",
        ("NVTE_TORCH_COMPILE", "1", flag, "0: bias, GELU, dropout and add are not compiled: each of them rounds"),
    ),
    *variables(
        f"{_TORCH}/module/layernorm_mlp.py",
        "numerics",
        ("NVTE_BIAS_GELU_NVFUSION", "1", flag, "0: LayerNormMLP adds the bias and applies GELU separately"),
        ("NVTE_GEMM_GELU_FUSION", "0", flag, "1: LayerNormMLP applies GELU in the GEMM, before the output is rounded"),
    ),
    *variables(
        f"{_TORCH}/transformer.py",
        "numerics",
        ("NVTE_BIAS_DROPOUT_FUSION", "1", flag, "0: TransformerLayer adds bias and residual and drops out separately"),
    ),
    *variables(
        "transformer_engine/common/normalization/common.cpp",
        "numerics",
        ("NVTE_NORM_FWD_USE_CUDNN", "0", extension_flag, "1: the forward of norms is cuDNN's"),
        ("NVTE_NORM_BWD_USE_CUDNN", "0", extension_flag, "1: the backward of norms is cuDNN's"),
    ),
    *variables(
        "transformer_engine/common/normalization/common.cpp",
        "precision",
        (
            "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
            "0",
            extension_flag,
            "1: with cuDNN 9.25, a norm rounds to the dtype of its input before it quantizes to MXFP8",
        ),
        (
            "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
            "0",
            extension_flag,
            "1: a norm with zero-centered gamma computes 1 + gamma in the dtype of the weight, not in float32",
        ),
    ),
    *variables(
        f"{_TORCH}/module/layernorm_linear.py",
        "numerics",
        ("NVTE_FWD_LAYERNORM_SM_MARGIN", "0", integer, "multiprocessors that norms leave free in the forward"),
        ("NVTE_BWD_LAYERNORM_SM_MARGIN", "0", integer, "multiprocessors that norms leave free in the backward"),
        ("NVTE_INF_LAYERNORM_SM_MARGIN", "0", integer, "multiprocessors that norms leave free in inference"),
    ),
)

_GEMM_KERNELS = (
    *variables(
        f"{_TORCH}/cpp_extensions/gemm.py",
        "numerics",
        ("NVTE_EXT_MARGIN_SM", "", integer, "multiprocessors that GEMMs leave free, by which cuBLAS chooses a kernel"),
    ),
    *variables(
        "transformer_engine/common/gemm/cublaslt_gemm.cu",
        "numerics",
        (
            "NVTE_USE_CUTLASS_GROUPED_GEMM",
            "0",
            extension_flag,
            "1: on Hopper, grouped GEMMs are CUTLASS's, not cuBLAS's",
        ),
    ),
    *variables(
        f"{_TORCH}/module/grouped_linear.py",
        "numerics",
        (
            "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
            "0",
            flag,
            "1: GroupedLinear computes all GEMMs in one kernel (deprecated: use_grouped_tensor=True)",
        ),
    ),
    *variables(
        f"{_TORCH}/utils.py",
        "numerics",
        (
            "NVTE_GROUPED_LINEAR_SINGLE_PARAM",
            "0",
            flag_above_0,
            "1: GroupedLinear may hold all weights in one parameter, with results that can differ between runs",
        ),
    ),
    *variables(
        f"{_TORCH}/csrc/extensions/cast.cpp",
        "numerics",
        (
            "NVTE_FUSED_GROUP_REQUANTIZE",
            "1",
            extension_flag,
            "0: grouped MXFP8 tensors are requantized in separate kernels",
        ),
    ),
    *variables(
        f"{_TORCH}/ops/fused/grouped_mlp.py",
        "numerics",
        ("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0", flag_above_0, "1: on Blackwell, te.ops fuses a grouped MLP"),
        (
            "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM",
            "0",
            equals_1,
            "1: the fused grouped MLP takes the amax after the Hadamard transform from tensor memory",
        ),
        (
            "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP",
            "0",
            flag_above_0,
            "1: the fused grouped MLP computes wgrad by the usual GEMMs",
        ),
    ),
    *variables(
        "transformer_engine/common/__init__.py",
        "numerics",
        (
            "NVTE_ENABLE_CUTEDSL_BACKEND",
            "0",
            equals_0_is_off,
            "1: quantization kernels of CuTe DSL replace the extension's",
        ),
    ),
    *variables(
        "transformer_engine/common/comm_gemm_overlap/comm_gemm_overlap.cpp",
        "numerics",
        ("NVTE_RS_STRIDED_ATOMIC", "0", integer, "1, 2: a reduce-scatter that overlaps with a GEMM adds atomically"),
    ),
    *variables(
        "transformer_engine/common/fused_router/utils.h",
        "numerics",
        ("NVTE_RADIX_TOPK_THRESHOLD", "16", integer, "experts per token from which the fused router selects by radix"),
    ),
    *variables(
        "transformer_engine/common/triton/mhc.py",
        "numerics",
        ("NVTE_DISABLE_TRITON_AUTOTUNING", "0", equals_1, "1: kernels of hyper-connections have fixed block sizes"),
    ),
)

VARIABLES: tuple[Variable, ...] = (*_RECIPES, *_FP8_ATTENTION, *_ATTENTION_KERNELS, *_FUSIONS_AND_NORMS, *_GEMM_KERNELS)
"""Those that change precision or numerics."""

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
