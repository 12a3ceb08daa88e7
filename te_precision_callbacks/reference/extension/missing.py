"""Placeholders for functions of the compiled extension that the reference backend lacks; a call raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.extension.exports import EXPORTED

# Purpose -> missing functions, as named in Transformer Engine 2.20.2.
MISSING: dict[str, tuple[str, ...]] = {
    "fused attention": (
        "copy_to_kv_cache",
        "fa_prepare_bwd",
        "fa_prepare_fwd",
        "fused_attn_bwd",
        "fused_attn_fwd",
        "multi_tensor_pad_last_dim",
    ),
    "context parallelism": (
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        "thd_cp_rank_order_to_sequence_order",
        "thd_get_partitioned_indices",
        "thd_grad_correction",
        "thd_out_correction",
        "thd_read_half_tensor",
        "thd_read_second_half_lse",
        "thd_second_half_lse_correction",
        "thd_sequence_order_to_cp_rank_order",
    ),
    "rotary embedding of query, key and value in one tensor": (
        "fused_qkv_rope_backward",
        "fused_qkv_rope_forward",
    ),
    "userbuffers": (
        "bulk_overlap_ag_with_external_gemm",
        "create_nvshmem_tensor",
        "device_supports_multicast",
        "get_stream_priority_range",
        "init_nvshmem_backend",
        "nvshmem_finalize",
        "nvshmem_send_on_current_stream",
        "nvshmem_wait_on_current_stream",
        "ubuf_built_with_mpi",
    ),
    "grouped tensors": (
        "bgrad_group_quantize",
        "bulk_allocate",
        "copy_data_ptrs_to_device",
        "get_grouped_gemm_setup_workspace_size",
        "group_dequantize",
        "group_quantize",
        "group_requantize_inplace",
        "grouped_swizzle_for_gemm",
        "nvfp4_group_quantize_with_amax",
        "splits_to_offsets",
        "splits_to_offsets_multi",
        "te_general_grouped_gemm_for_discrete_in",
        "te_general_grouped_gemm_for_discrete_out",
        "te_general_grouped_gemm_for_grouped_tensor",
    ),
    "operations of te.ops": (
        "dropout_bwd",
        "dropout_fwd",
        "dsituglu",
        "group_scaled_clamped_swiglu",
        "group_scaled_swiglu",
        "scaled_clamped_dswiglu",
        "scaled_clamped_swiglu",
        "scaled_dsituglu",
        "scaled_dsrelu",
        "scaled_dswiglu",
        "scaled_situglu",
        "scaled_srelu",
        "scaled_swiglu",
        "situglu",
    ),
    "permutation of tokens to experts": (
        "moe_permute_bwd",
        "moe_permute_fwd",
        "moe_unpermute_bwd",
        "moe_unpermute_fwd",
    ),
    "the router": (
        "fused_moe_aux_loss_bwd",
        "fused_moe_aux_loss_fwd",
        "fused_moe_aux_loss_fwd_graph_safe",
        "fused_score_for_moe_aux_loss_bwd",
        "fused_score_for_moe_aux_loss_fwd",
        "fused_topk_with_score_function_bwd",
        "fused_topk_with_score_function_fwd",
        "fused_topk_with_score_function_qb_fwd",
    ),
    "expert parallelism": (
        "ep_combine",
        "ep_combine_bwd",
        "ep_dispatch",
        "ep_dispatch_bwd",
        "ep_finalize",
        "ep_get_zero_copy",
        "ep_handle_mem_size",
        "ep_initialize",
        "ep_prepare",
        "ep_prepare_and_dispatch",
        "ep_zero_copy_supported",
    ),
    "scaling and norms by a number in a tensor": (
        "multi_tensor_scale_tensor",
        "multi_tensor_unscale_l2norm",
    ),
    "Adam in a CUDA graph": (
        "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master",
    ),
    "Adam with store_param_remainders": ("multi_tensor_adam_param_remainder",),
    "casting shards of master weights to FP8 blocks or NVFP4": (
        "fp8_block_scaling_compute_partial_amax",
        "fp8_block_scaling_partial_cast",
        "nvfp4_2d_compute_partial_amax",
        "nvfp4_2d_multi_tensor_transpose",
        "nvfp4_2d_partial_cast",
        "nvfp4_compute_global_scale",
        "nvfp4_compute_per_block_scale",
        "nvfp4_expand_scale_to_fp8",
        "nvfp4_fused_scale",
        "nvfp4_multi_tensor_2d_partial_cast",
        "nvfp4_multi_tensor_compute_partial_amax",
        "nvfp4_multi_tensor_fused_scale",
    ),
    "the Newton-Schulz iteration": (
        "cusolvermp_ctx_create",
        "cusolvermp_ctx_destroy",
        "newton_schulz",
    ),
    "NVFP4 outside of quantized modules": ("nvfp4_quantize_with_amax",),
}


def refuse(name: str, purpose: str, *_arguments: object, **_options: object) -> NoReturn:
    raise MissingFunctionError(
        f"{name} is not in the reference backend ({purpose}). Use the compiled Transformer Engine on a GPU, or avoid"
        " it in the model."
    )


for purpose, names in MISSING.items():
    EXPORTED.update((name, partial(refuse, name, purpose)) for name in names)

# Classes, since Transformer Engine evaluates annotations with them; creating an instance raises.
for name in ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P"):
    EXPORTED[name] = type(name, (), {"__init__": partial(refuse, name, "userbuffers")})


class _GroupedMlp:
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return partial(refuse, f"grouped_mlp_experimental.{name}", "grouped tensors")


EXPORTED["grouped_mlp_experimental"] = _GroupedMlp()
