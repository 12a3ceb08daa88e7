"""Kind of work of a kernel or operator, by its name: tables of patterns, each with its source.

The first matching row counts. Kernel names are as CUPTI reports them, demangled or not.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

KernelKind = Literal[
    "gemm",
    "convolution",
    "cast",
    "norm",
    "attention",
    "softmax",
    "embedding",
    "routing",
    "communication",
    "optimizer",
    "copy",
    "reduction",
    "elementwise",
    "host",
]
"""What a kernel does.

``cast``: quantization, including amax, scales, transposes, Hadamard transforms, swizzled scales and padding.
``routing``: sorts and permutes the tokens of experts. ``softmax``: in attention of plain torch, and in losses.
``copy``: moves memory, changing only layout or type. ``host``: only in a CPU profile, time outside torch operators,
mostly Python.
"""


class NamedKernel(NamedTuple):
    """Kind of a kernel, and the format of a GEMM's operands such as ``bf16`` or ``fp8``; empty if not in the name."""

    kind: KernelKind
    format: str = ""


class _Row(NamedTuple):
    kind: KernelKind
    pattern: str
    source: str
    format: str = ""


_TE = "NVIDIA/TransformerEngine, transformer_engine/common/"

_KERNELS: tuple[_Row, ...] = (
    # ---- memory, as Kineto names it
    _Row("copy", r"^Memcpy |^Memset ", "Kineto"),
    # ---- communication
    _Row("communication", r"(?i)nccl(Dev)?Kernel|^nccl", "NVIDIA/nccl"),
    _Row(
        "communication",
        r"userbuffers_|kuserbuffers|reduce_(bf16|fp8_in_bf16_out)_cuda|(producer|consumer)(_batch)?_kernel"
        r"|wait_until_on_stream_and_reset",
        f"{_TE}comm_gemm_overlap/userbuffers, nvshmem_api",
    ),
    _Row("communication", r"multimem_|nvshmem|symm_mem|barrier_kernel", "pytorch aten CUDASymmetricMemoryOps.cu"),
    # ---- casts of Transformer Engine, before its GEMMs: its Hadamard transforms are written as GEMMs
    _Row("cast", r"(?i)rht_gemm_device|hadamard|MultiAmax|ZeroAmax", f"{_TE}hadamard_transform"),
    _Row(
        "cast",
        r"(de|re)?quantize_(transpose_|gated_)?(mxfp8|nvfp4|fp4|4over6)|quantize_kernel::|dequantize_kernel"
        r"|group_(de)?quantize|fused_group_requantize|zero_scales_kernel|update_tma_descriptors",
        f"{_TE}cast",
    ),
    _Row(
        "cast",
        r"cast_fp8_|group_cast_fp8|group_block_scaled|grouped_(amax|compute_scale)|compute_columnwise_amax",
        f"{_TE}cast/fp8, cast/fp8_blockwise, cast/nvfp4",
    ),
    _Row(
        "cast",
        r"cast_transpose|block_scaled_.*cast|transpose_(dbias|optimized|general)_kernel|multi_cast_transpose"
        r"|swap_first_dims|transpose_dbias|reduce_dbias",
        f"{_TE}transpose",
    ),
    _Row(
        "cast",
        r"amax_kernel|compute_scale_from_amax|partial_(amax|cast)_kernel|delayed_scaling_recipe|amax_and_scale_update"
        r"|nvfp4_\w+_kernel|compute_nvfp4|update_tensor_scale_inv",
        f"{_TE}recipe, common.cu",
    ),
    _Row(
        "cast",
        r"swizzle_(row|col|block)?_?scaling|swizzle_.*_kernel|multi_(un)?padding_kernel|set_float_kernel",
        f"{_TE}swizzle, util/padding.cu, gemm/cublaslt_gemm.cu",
    ),
    # ---- compiled by Inductor: what its name says was fused, before the names of what is inside
    _Row("gemm", r"^triton_(tem|mm)_.*(mm|matmul)", "torch/_inductor: templates"),
    _Row("cast", r"^triton_.*(amax.*(clamp|to_copy)|float8|fp8)", "torch/_inductor: names of fused operators"),
    _Row("norm", r"^triton_.*(layer_norm|rms_norm|(mean|var).*rsqrt|group_norm|batch_norm)", "torch/_inductor"),
    _Row("softmax", r"^triton_.*(softmax|cross_entropy|nll_loss)", "torch/_inductor"),
    _Row("embedding", r"^triton_.*embedding", "torch/_inductor"),
    _Row("reduction", r"^triton_(red|per)_", "torch/_inductor: reductions"),
    _Row("elementwise", r"^triton_(poi|for)_", "torch/_inductor: pointwise"),
    # ---- attention
    _Row(
        "attention",
        r"(?i)flash_?(attn|fwd|bwd|attention)|pytorch_flash|flash::|fmha|attention_kernel|_attn_|sdpa|FlashAttn",
        "Dao-AILab/flash-attention; cuDNN's sdpa; pytorch aten",
    ),
    _Row(
        "attention",
        r"cudnn_generated.*(fort|flash|fprop_wgmma.*sdpa)|thd_\w+_kernel|prepare_kernel_(fwd|bwd)|transpose_to_bhsd"
        r"|convert_(bshd|thd)|copy_to_kv|cu_seqlens",
        f"{_TE}fused_attn",
    ),
    # ---- GEMMs of cuBLASLt since CUDA 12.8: nvjet_[sm100_]<types>_<tile>; q: 8 bits, o: 4, t: BF16, h: FP16
    _Row("gemm", r"nvjet_(sm\d+\w*_)?oo", "cuBLASLt 12.9 and later", "nvfp4"),
    _Row("gemm", r"nvjet_(sm\d+\w*_)?qq\w+.*vec32UE8M0", "cuBLASLt 12.9 and later", "mxfp8"),
    _Row("gemm", r"nvjet_(sm\d+\w*_)?qq", "cuBLASLt 12.8 and later", "fp8"),
    _Row("gemm", r"nvjet_(sm\d+\w*_)?t", "cuBLASLt 12.8 and later", "bf16"),
    _Row("gemm", r"nvjet_(sm\d+\w*_)?h", "cuBLASLt 12.8 and later", "fp16"),
    _Row("gemm", r"nvjet_", "cuBLASLt 12.8 and later"),
    # ---- convolutions, some of which are called GEMM
    _Row("norm", r"cudnn::bn_|cudnn.*(batch_?norm|layer_?norm|rms_?norm)", "cuDNN"),
    _Row(
        "convolution",
        r"(?i)implicit_(conv|gemm)|xmma_(fprop|dgrad|wgrad)|(fprop|dgrad|wgrad)_(optimized|analytic)|scudnn|hcudnn"
        r"|winograd|(dgrad|wgrad_alg\d|conv2d)\w*_engine|grouped_conv|conv_?(2d|3d|depthwise|fwd|bwd|kernel)"
        r"|(nchw|nhwc)To(Nchw|Nhwc)|convolve|im2col|col2im|cask_cudnn|scalePackedTensor",
        "cuDNN's engines; pytorch aten",
    ),
    # ---- GEMMs of cuBLAS before: sm90_xmma_gemm_<A><B>_<..>, and of CUTLASS
    _Row(
        "gemm",
        r"(?i)bstensorop.*ue4m3x(f4|e2m1)|nvfp4.*gemm|gemm.*nvfp4|mxf4nvf4",
        "NVIDIA/cutlass library names",
        "nvfp4",
    ),
    _Row(
        "gemm", r"(?i)bstensorop.*(ue8m0|mx).*(e[45]m[32])|mxfp8.*gemm|gemm.*mxfp8|mxf8f6f4", "NVIDIA/cutlass", "mxfp8"
    ),
    _Row(
        "gemm",
        r"(?i)(xmma_gemm|tensorop|wgmma|gemm|device_kernel).*(e4m3|e5m2|float_e4|float_e5|fp8|float8)|(fp8|float8)\w*(gemm|_mm|matmul)",
        "cuBLAS xmma; NVIDIA/cutlass; torch _scaled_mm; triton",
        "fp8",
    ),
    _Row(
        "gemm",
        r"xmma_gemm_bf16|(tensorop|wmma)\w*_bf16|ampere_bf16|(s1688|s16816|s161616)gemm_bf16",
        "cuBLAS; CUTLASS",
        "bf16",
    ),
    _Row(
        "gemm",
        r"xmma_gemm_f16|(tensorop|wmma)\w*_f16|(ampere|turing)_fp16|[hs]16816gemm_f16|_h\d+gemm|[hs]884gemm|_hgemm_|hgemm",
        "cuBLAS; CUTLASS",
        "fp16",
    ),
    _Row("gemm", r"xmma_gemm_\w*tf32|tensorop_\w*tf32|tensorop_s1688gemm|tf32gemm", "cuBLAS; CUTLASS", "tf32"),
    _Row("gemm", r"xmma_gemm_f32f32|(volta|ampere|maxwell|turing)_sgemm|sgemm|simt_sgemm", "cuBLAS; CUTLASS", "fp32"),
    _Row(
        "gemm",
        r"(gemv\w*|gemvx::kernel|gemvNSP|dot_kernel|splitKreduce_kernel|reduce_1Block)\w*<.*__nv_bfloat16",
        "cuBLAS: products of few rows, sums of split K",
        "bf16",
    ),
    _Row(
        "gemm",
        r"(gemv\w*|gemvx::kernel|gemvNSP|dot_kernel|splitKreduce_kernel|reduce_1Block)\w*<.*__half",
        "cuBLAS",
        "fp16",
    ),
    _Row(
        "gemm",
        r"(gemv\w*|gemvx::kernel|gemvNSP|dot_kernel|splitKreduce_kernel|reduce_1Block)\w*<.*float",
        "cuBLAS",
        "fp32",
    ),
    _Row(
        "gemm",
        r"(?i)gemv|splitKreduce|gemvx|reduce_1Block_kernel|dot_kernel|cublasLt::|epilogue::impl::globalKernel",
        "cuBLAS",
    ),
    _Row(
        "gemm",
        r"(setup_grouped_gemm|compute_grouped_tensor_offsets|grouped_bias_add)_kernel",
        f"{_TE}gemm/cublaslt_grouped_gemm.cu",
    ),
    _Row(
        "gemm",
        r"(?i)gemm|_mm_kernel|matmul|tensorop|^mm_|_mm$",
        "NVIDIA/cutlass; triton",
    ),
    # ---- norms
    _Row(
        "norm",
        r"(?i)rmsnorm|rms_norm|layer_?norm|ln_(fwd|bwd)_\w*kernel|batch_?norm|group_?norm|RowwiseMoments|GammaBeta"
        r"|ComputeInternalGradients|Compute(Backward)?FusedParams|weight_norm|compute_(g|b)rad_weights|l2norm_kernel(?!.*multi)",
        f"{_TE}normalization; pytorch aten native/cuda; NVIDIA/apex",
    ),
    # ---- experts
    _Row(
        "routing",
        r"(?i)moe_(permute|unpermute)|permute_(kernel|with)|_permute_kernel|_unpermute|row_id_map|chunk_sort|sort_chunks"
        r"|fused_(topk|moe_aux|score)|fused_router|topk_|TopK|gating|routing|splits_to_offsets|expert",
        f"{_TE}permutation, fused_router; NVIDIA/Megatron-LM",
    ),
    # ---- optimizers
    _Row(
        "optimizer",
        r"(?i)multi_tensor_apply_kernel|adam|FusedOptimizer|lamb_|sgd|adagrad|rowwise_adagrad|_foreach|l2norm|clip_grad"
        r"|amp_(non_finite|update_scale)|muon|newton_schulz|noop_kernel",
        f"{_TE}multi_tensor; NVIDIA/apex; pytorch native/cuda/ForeachFunctors.cuh, FusedAdam",
    ),
    # ---- softmax and losses
    _Row(
        "softmax",
        r"(?i)softmax|cross_entropy|nll_loss|logsumexp|log_softmax|liger_.*loss|online_softmax|mse_|cunn_",
        f"pytorch aten; {_TE}fused_softmax, pytorch/triton/cross_entropy.py",
    ),
    # ---- embeddings
    _Row("elementwise", r"(?i)rotary|_rope_|rope_", f"{_TE}fused_rope"),
    _Row(
        "embedding",
        r"(?i)embedding|vectorized_gather_kernel|compute_grad_weight|sum_and_scatter|krn_partial|indexSelect",
        "pytorch aten",
    ),
    # ---- copies: those that only move
    _Row(
        "copy",
        r"(?i)CatArrayBatchedCopy|direct_copy_kernel|copy_kernel_cuda|bfloat16(tofloat32)?_copy|batched_memcpy|split_with_sizes_copy"
        r"|chunk_cat|memcpy|memset_kernel|FillFunctor|fill_|_copy_kernel|transpose_kernel|permute_\d|vectorized_copy|concat|_transpose_"
        r"|zero_pad",
        "pytorch aten native/cuda: Copy.cu, Shape.cu, FillKernel.cu",
    ),
    # ---- reductions, sorts, scans
    _Row(
        "reduction",
        r"reduce_kernel|ReduceOp|(?i:reduce)|DeviceRadixSort|DeviceScan|DeviceSelect|DeviceReduce|DeviceRunLength|DeviceSegmented"
        r"|DeviceMerge|cub::|thrust::|bitonicSort|radixSort|sort_|cumsum|scan|histogram|unique|gatherTopK|sbtopk|mbtopk"
        r"|computeDigit|ArgMax|max_pool|avg_pool|adaptive_|upsample|kernelHistogram|BlockReduce|find_bound|computeBlock"
        r"|gatherKth|countRadix|searchsorted|to_dense_representation|fillindex",
        "pytorch aten native/cuda; NVIDIA/cub",
    ),
    # ---- all that takes elements one by one
    _Row(
        "elementwise",
        r"(?i)elementwise|gelu|silu|relu|swiglu|geglu|act_and_mul|(gated_)?act_kernel|dgated|scaled_(gated|unary)|unary_|dropout"
        r"|rope|rotary|index_|scatter|gather|arange|distribution_|where_|masked|triu|tril|clamp|bias|add_kernel|mul_kernel|CUDAFunctor"
        r"|philox|random|bernoulli|normal_|uniform_|flip|roll_|repeat|pad\b|reflection_pad|element_mul|activation|glu"
        r"|fused_(add|mul)|pointwise|populate_rng|extract_seed|convert_|compute_cuda_kernel|scal_kernel",
        f"pytorch aten native/cuda; {_TE}activation, fused_rope, dropout",
    ),
)
"""The kernels of devices. To add one, add a row with where its name comes from, above the rows that would match too."""

_OPERATORS: tuple[_Row, ...] = (
    _Row("communication", r"^(c10d::|nccl:|gloo:|record_param_comms|_c10d_functional::)", "pytorch c10d"),
    _Row(
        "gemm",
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|ger|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_addmm_activation"
        r"|mkldnn_linear|_int_mm)$|^mkldnn::_linear",
        "pytorch native_functions.yaml",
    ),
    _Row("convolution", r"^aten::.*conv|^aten::(im2col|col2im)", "pytorch native_functions.yaml"),
    _Row(
        "attention",
        r"^aten::.*(scaled_dot_product|flash_attention|efficient_attention)|^flash_attn|FlashAttn|FusedAttn",
        "pytorch native_functions.yaml; Dao-AILab/flash-attention; Transformer Engine",
    ),
    _Row(
        "norm", r"^aten::.*(layer_norm|batch_norm|group_norm|rms_norm|instance_norm)", "pytorch native_functions.yaml"
    ),
    _Row("softmax", r"^aten::.*(softmax|nll_loss|cross_entropy|logsumexp|mse_loss)", "pytorch native_functions.yaml"),
    _Row("embedding", r"^aten::.*embedding|^aten::index_(select|add)|^aten::(index_put|_index_put_impl)", "pytorch"),
    _Row(
        "cast",
        r"^aten::(aminmax|_amp_|fake_quantize|quantize_per)|^(tex|transformer_engine)::",
        "pytorch; Transformer Engine",
    ),
    _Row("optimizer", r"^aten::_(fused|foreach)_|^Optimizer\.", "pytorch native_functions.yaml"),
    _Row(
        "copy",
        r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|empty|empty_like|empty_strided|zeros|ones|full"
        r"|resize_|set_|detach|view|as_strided|slice|select|split|chunk|reshape|transpose|permute|expand|t|unsqueeze|squeeze|lift_fresh"
        r"|item|_local_scalar_dense|new_\w+|\w*_like|_unsafe_view|alias|movedim|flatten|unbind|narrow|pin_memory|is_pinned)_?$",
        "pytorch native_functions.yaml",
    ),
    _Row(
        "reduction",
        r"^aten::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|any|all|argmax|argmin|cumsum|sort|topk|std|var"
        r"|count_nonzero|prod|bincount|unique\w*|_unique2)_?$",
        "pytorch native_functions.yaml",
    ),
    _Row("elementwise", r"^(aten|prims|inductor|torch_\w+)::", "pytorch: all others"),
)
"""The operators of torch, for the profile of a CPU, and for kernels whose names say nothing."""


def _first(rows: tuple[_Row, ...], name: str) -> NamedKernel | None:
    return next((NamedKernel(row.kind, row.format) for row in rows if re.search(row.pattern, name)), None)


@functools.cache
def of_kernel(name: str) -> NamedKernel | None:
    """Return the kind and format of a kernel, copy or fill; None for an unknown name."""
    return _first(_KERNELS, name)


@functools.cache
def of_operator(name: str) -> NamedKernel | None:
    return _first(_OPERATORS, name)
