"""Traces of torch.profiler: each kernel against a trace with a known truth, and the errors of invalid traces."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.speed.trace import TraceError, measure, read_trace, show
from te_precision_callbacks.speed.trace.measuring import kind_of_kernel, kind_of_operator
from tests.speed.planted import Planted

Rows = Iterable[tuple[tuple[str, str, str, str], float, int]]


def summed(rows: Rows) -> tuple[Counter[tuple[str, str, str, str]], ...]:
    times, counts = Counter(), Counter()
    for key, us, count in rows:
        times[key] += us
        counts[key] += count
    return times, counts


@pytest.mark.parametrize("facts", [{}, {"again": 2, "recompute": True}], ids=str)
def test_each_kernel_of_a_planted_trace_has_its_layer_gemm_pass_and_kind(facts: dict[str, Any], tmp_path: Path) -> None:
    planted = Planted(**facts)
    step = measure(read_trace(planted.write(tmp_path / "trace.json.gz")))
    times, counts = summed(
        ((row.layer, row.gemm, row.of_pass, str(row.kind)), 1e3 * row.ms, round(row.calls)) for row in step.products
    )
    true_times, true_counts = summed((kernel[:4], kernel.us, 1) for kernel in planted.truth)
    assert times == pytest.approx(true_times)
    assert counts == true_counts
    assert (step.device, step.rank, step.iterations) == ("NVIDIA H100 80GB HBM3", 3, (7,))
    assert {row.format for row in step.products if row.gemm} == {"fp8"}
    assert {row.format for row in step.products if row.layer == "head"} == {"bf16"}
    row = next(row for row in plain(step)["products"] if row["layer"] == "layers.0.mlp.fc1" and row["gemm"] == "wgrad")
    assert row["of_pass"] == "backward"
    assert row["ms"] == pytest.approx(0.27 * facts.get("again", 1))


def test_a_trace_without_ranges_is_refused(tmp_path: Path) -> None:
    """Recorded without profile=, or without the host."""
    of_gpu = Planted()
    of_gpu.events = [event for event in of_gpu.events if event.get("cat") == "kernel"]
    for planted in (Planted(ranges=False), of_gpu):
        with pytest.raises(TraceError, match=r"trace.json has no ranges of layers.*Record the trace with profile="):
            measure(read_trace(planted.write(tmp_path / "trace.json")))


@pytest.mark.parametrize("late", [10.0, 150.0])
def test_the_times_add_up(late: float, tmp_path: Path) -> None:
    planted = Planted(late=late)
    step = measure(read_trace(planted.write(tmp_path / "trace.json")))
    assert step.work_ms == pytest.approx(sum(kernel.us for kernel in planted.truth) / 1e3)
    kernels = [event for event in planted.events if event.get("cat") == "kernel"]
    first, last = kernels[0]["ts"], kernels[-1]["ts"] + kernels[-1]["dur"]
    assert step.wall_ms == pytest.approx((last - first) / 1e3)
    assert sum(step.by_kind().values()) == pytest.approx(step.work_ms)


def test_the_tables_are_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = measure(read_trace(Planted(late=400, recompute=True).write(tmp_path / "trace.json")))
    monkeypatch.setenv("COLUMNS", "80")
    show(step)
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= 80
    words = {word.strip(":,") for line in lines for word in line.split()}
    assert {"layers.0.mlp.fc1", "recompute", "dgrad", f"{step.wall_ms:.3f}"} <= words


def test_a_trace_without_a_gpu(tmp_path: Path) -> None:
    planted = Planted()
    planted.events = [event for event in planted.events if event.get("cat") != "kernel"]
    step = measure(read_trace(planted.write(tmp_path / "cpu.json")))
    assert (step.device, step.on_device) == ("CPU", False)
    assert any("no GPU events" in note for note in step.notes)


WHOLE = json.dumps(Planted().events).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1\x00\x80\xff\xfe", "cannot be read: UnicodeDecodeError"),
        (b'{"loss": 2.5}', "is not a trace of torch.profiler: it has no operator"),
        (b'{"traceEvents": [{"ph": "X"}, 3]}', "is not a trace of torch.profiler: it has no operator"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon", "name": "a"}]}',
            "cannot be read: ValueError.*soon",
        ),
        pytest.param(WHOLE[: len(WHOLE) // 2], "cannot be read", id="half"),
        pytest.param(gzip.compress(WHOLE)[:2000], "cannot be read", id="half of a gzip"),
        (b"\x1f\x8bnot a gzip at all", "cannot be read: BadGzipFile"),
        (gzip.compress(b'{"traceEvents": [{"ph": "M"}, {"ph":', mtime=0), "cannot be read: JSONDecodeError"),
    ],
)
def test_an_invalid_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_missing_file_and_a_list_of_events(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: FileNotFoundError"):
        read_trace(tmp_path / "nothing.json")
    path = tmp_path / "trace.json"
    path.write_bytes(WHOLE)
    assert measure(read_trace(path)).products


# ----------------------------------------------------------------------------------------------------- kinds of kernels


TE_CASTS = """
cast_fp8_1D_kernel cast_fp8_2D_kernel cast_fp8_gated_kernel cast_transpose_general_kernel
cast_transpose_optimized_kernel cast_transpose_fused_kernel_notaligned dgated_act_cast_transpose_kernel
multi_cast_transpose_kernel block_scaled_cast_transpose_kernel block_scaled_1d_cast_transpose_kernel
transpose_general_kernel transpose_dbias_kernel quantize_mxfp8_kernel quantize_gated_mxfp8_kernel
quantize_mxfp8_kernel_cast_only dequantize_mxfp8_kernel group_quantize_mxfp8_kernel quantize_transpose_nvfp4_kernel
quantize_transpose_nvfp4_2D_kernel dequantize_fp4_kernel quantize_transpose_nvfp4_tuned_1D_kernel
group_quantize_transpose_nvfp4_kernel compute_columnwise_amax_kernel amax_kernel compute_scale_from_amax_kernel
zero_amax_kernel nvfp4_transpose_kernel nvfp4_fused_scale_kernel fp8_block_scaling_compute_partial_amax_kernel
mxfp8_scaling_partial_cast_kernel update_tensor_scale_inv_kernel swizzle_row_scaling_kernel swizzle_col_scaling_kernel
multi_tensor_swizzle_row_scaling_kernel unswizzle_scaling_kernel
swizzle_block_scaling_2d_to_mxfp8_scaling_factors_kernel multi_padding_kernel multi_unpadding_kernel
reduce_dbias_kernel HadamardTransformKernel HadamardAmaxTmaKernel ZeroAmaxKernel rht_gemm_device
row_col_rht_gemm_device group_rht_gemm_device
"""
"""Kernels of quantization in Transformer Engine at d0067d0, transformer_engine/common."""

TE_OTHERS = {
    "communication": "userbuffers_fp16_sum_inplace_gpu_mc_rs kuserbuffers_pushsendrecv producer_kernel"
    " reduce_fp8_in_bf16_out_cuda",
    "other": "ln_fwd_tuned_kernel ln_bwd_general_kernel ln_bwd_finalize_tuned_kernel rmsnorm_fwd_tuned_kernel"
    " rmsnorm_bwd_finalize_general_kernel scaled_upper_triang_masked_softmax_warp_forward"
    " scaled_masked_softmax_warp_backward cross_entropy_kernel moe_permute_kernel moe_unpermute_kernel"
    " fused_topk_with_score_function_forward_kernel _row_id_map_pass_1_kernel _permute_kernel"
    " fused_moe_aux_loss_forward_kernel fused_rope_forward_kernel gated_act_kernel dgated_act_kernel"
    " unary_grad_kernel dropout_kernel_fwd_f16 scaled_gated_forward_kernel multi_tensor_apply_kernel",
}

OTHERS = {
    "nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT": ("gemm", "bf16"),
    "nvjet_hss_128x256_64x6_2x1_2cta": ("gemm", "fp16"),
    "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT": ("gemm", "fp8"),
    "nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT": ("gemm", "mxfp8"),
    "nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT": ("gemm", "nvfp4"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas": ("gemm", "bf16"),
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64": ("gemm", "fp8"),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>": ("gemm", "bf16"),
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_32x3_nt_align1>": ("gemm", "tf32"),
    "volta_sgemm_128x32_nt": ("gemm", "fp32"),
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>": ("attention", ""),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("communication", ""),
    "Memcpy DtoD (Device -> Device)": ("other", ""),
    "Memset (Device)": ("other", ""),
    "triton_poi_fused_addmm_gelu_view_15": ("other", ""),
    "triton_red_fused__unsafe_view_add_mean_mul_pow_rsqrt_1": ("other", ""),
}
"""Names from public traces and reports."""


def test_the_casts_of_transformer_engine() -> None:
    for name in TE_CASTS.split():
        mangled = f"_ZN18transformer_engine6detail{len(name)}{name}ILi8ELi4EfE"
        for spelled in (name, f"void transformer_engine::detail::{name}<8, 4, float>(float const*)", mangled):
            assert kind_of_kernel(spelled) == ("cast", ""), spelled


def test_the_other_kernels_of_transformer_engine() -> None:
    for kind, names in TE_OTHERS.items():
        for name in names.split():
            assert kind_of_kernel(f"void transformer_engine::{name}<8, 4>(float const*)") == (kind, ""), name


def test_the_kernels_of_libraries() -> None:
    assert {name: kind_of_kernel(name) for name in OTHERS} == OTHERS
    assert kind_of_kernel("zorg_17") == ("other", "")
    assert kind_of_kernel("zorg_17", "aten::mm") == ("gemm", "")


def test_operators_of_torch() -> None:
    kinds = {"addmm": "gemm", "_scaled_mm": "gemm", "convolution": "gemm", "copy_": "other", "add": "other"}
    results = {name: kind_of_operator(f"aten::{name}") for name in kinds}
    assert results == {name: (kind, "") for name, kind in kinds.items()}
    assert kind_of_operator("_LayerNormLinear") == ("other", "")
