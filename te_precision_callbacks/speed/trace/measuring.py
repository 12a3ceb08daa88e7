"""The measured time of a step, by layer, pass, GEMM and kind of kernel, from a trace.

The kind of a kernel or operator comes from its name, by tables of patterns, each with its source.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from te_precision_callbacks.base import terminal
from te_precision_callbacks.speed.trace.range_names import parse_range
from te_precision_callbacks.speed.trace.reading import Pass, Trace, TraceError, TraceEvent, set_contexts

_MOST_LAYERS = 20
_MOST_PARTS = 6
_PASSES = ("forward", "backward", "recompute", "optimizer", "other")

KernelKind = Literal["gemm", "cast", "attention", "communication", "other"]
"""What a kernel does.

``gemm``: matrix products, also of convolutions. ``cast``: quantization, including amax, scales, transposes, Hadamard
transforms, swizzled scales and padding.
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
    # ---- compiled by Inductor: the name's prefix decides, before the names of fused operators in it
    _Row("gemm", r"^triton_(tem|mm)_.*(mm|matmul)", "torch/_inductor: templates"),
    _Row("cast", r"^triton_.*(amax.*(clamp|to_copy)|float8|fp8)", "torch/_inductor: names of fused operators"),
    _Row("other", r"^triton_(red|per|poi|for)_", "torch/_inductor: reductions, pointwise"),
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
    # ---- convolutions
    _Row("other", r"cudnn::bn_|cudnn.*(batch_?norm|layer_?norm|rms_?norm)", "cuDNN"),
    _Row(
        "gemm",
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
)
"""The kernels of devices; all others are ``other``. The first matching row counts.

Names are as CUPTI reports them, demangled or not. To add a kernel, add a row with where its name comes from, above the
rows that would match too.
"""

_OPERATORS: tuple[_Row, ...] = (
    _Row("communication", r"^(c10d::|nccl:|gloo:|record_param_comms|_c10d_functional::)", "pytorch c10d"),
    _Row(
        "gemm",
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|ger|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_addmm_activation"
        r"|mkldnn_linear|_int_mm)$|^mkldnn::_linear",
        "pytorch native_functions.yaml",
    ),
    _Row("gemm", r"^aten::.*conv|^aten::(im2col|col2im)", "pytorch native_functions.yaml"),
    _Row(
        "attention",
        r"^aten::.*(scaled_dot_product|flash_attention|efficient_attention)|^flash_attn|FlashAttn|FusedAttn",
        "pytorch native_functions.yaml; Dao-AILab/flash-attention; Transformer Engine",
    ),
    _Row(
        "cast",
        r"^aten::(aminmax|_amp_|fake_quantize|quantize_per)|^(tex|transformer_engine)::",
        "pytorch; Transformer Engine",
    ),
)
"""The operators of torch, for the profile of a CPU, and for kernels with unknown names."""


def _first(rows: tuple[_Row, ...], name: str) -> NamedKernel | None:
    for row in rows:
        if re.search(row.pattern, name):
            return NamedKernel(row.kind, row.format)
    return None


@functools.cache
def kind_of_kernel(name: str, operator: str = "") -> NamedKernel:
    """Return the kind and format of a kernel, copy or fill, by its name or the operator that launched it."""
    return _first(_KERNELS, name) or kind_of_operator(operator)


@functools.cache
def kind_of_operator(name: str) -> NamedKernel:
    return _first(_OPERATORS, name) or NamedKernel("other")


@dataclass(frozen=True)
class MeasuredProduct:
    """Time per step of one kind of kernel in a layer and pass.

    Attributes:
        layer: the layer of a GEMM; for other kernels the module if several layers share it; empty if unknown.
        gemm: the GEMM of a Transformer Engine layer; empty for other layers and kinds.
        of_pass: empty outside of forward, backward and optimizer.
        format: the format of a GEMM's operands, from the kernel's name.
        ms: the mean over iterations; concurrent kernels count fully.
        calls: kernels, or operators of the host, per step.
    """

    layer: str
    gemm: str
    of_pass: Pass
    kind: KernelKind
    format: str
    ms: float
    calls: float


@dataclass(frozen=True)
class MeasuredStep:
    """Time of a step in a trace, the mean over iterations.

    Attributes:
        device: the name of the device, or ``CPU``.
        on_device: whether device kernels were measured, rather than host operators.
        wall_ms: milliseconds per step from the first kernel to the last; on a CPU, the length of the iterations.
        products: longest first.
        notes: limits of these times.
    """

    device: str
    on_device: bool
    rank: int | None
    iterations: tuple[int, ...]
    wall_ms: float
    products: tuple[MeasuredProduct, ...]
    notes: tuple[str, ...]

    @property
    def work_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(row.ms for row in self.products)

    def by_kind(self) -> dict[tuple[str, str], float]:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for row in self.products:
            sums[row.kind, row.format] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def measure(trace: Trace) -> MeasuredStep:
    """Measure the steps of a trace.

    Raises:
        TraceError: the trace has no ranges of layers or of a whole step, or nothing in it has a time.
    """
    spans = set_contexts(trace)
    all_work = trace.kernels or [event for event in trace.host if event.what == "operator"]
    if not spans or not any(parse_range(event.name)[0] in ("forward", "backward") for event in trace.host):
        raise TraceError(
            f"{trace.path} has no ranges of layers and of whole steps, so kernels cannot be assigned to layers."
            ' Record the trace with profile=, such as profile="11-13".'
        )
    work, iterations = _select_iterations(all_work, spans)
    if not work:
        raise TraceError(
            f"{trace.path} has no kernels and no operators. Profile a step of the training with the activities CPU and"
            " CUDA."
        )
    steps = len(iterations)
    wall = max(event.end for event in work) - min(event.begin for event in work)
    if not trace.kernels:
        wall = sum(spans[number][1] - spans[number][0] for number in iterations)
    known = {event: _classify(event) for event in work}
    device = "CPU"
    if trace.kernels:
        device = trace.device or "a GPU that the trace does not name"
    return MeasuredStep(
        device=device,
        on_device=bool(trace.kernels),
        rank=trace.rank,
        iterations=iterations,
        wall_ms=wall / 1e3 / steps,
        products=_rows(known, steps),
        notes=tuple(_notes(trace, known)),
    )


def _select_iterations(
    work: Sequence[TraceEvent], spans: Mapping[int, tuple[float, float]]
) -> tuple[Sequence[TraceEvent], tuple[int, ...]]:
    counted = []
    iterations = set()
    for event in work:
        for number, (begin, end) in spans.items():
            if event.launched is not None and begin <= event.launched <= end:
                counted.append(event)
                iterations.add(number)
    return counted, tuple(sorted(iterations))


def _classify(event: TraceEvent) -> NamedKernel:
    if event.what == "operator":
        return kind_of_operator(event.name)
    return kind_of_kernel(event.name, getattr(event.context.operator, "name", ""))


def _rows(work: Mapping[TraceEvent, NamedKernel], steps: int) -> tuple[MeasuredProduct, ...]:
    sums: dict[tuple[str, str, Pass, KernelKind, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event, (kind, form) in work.items():
        layer, gemm, of_pass, _, _ = event.context
        if kind != "gemm":
            gemm = ""
            form = ""
        entry = sums[layer, gemm, of_pass, kind, form]
        entry[0] += max(0.0, event.us) / 1e3 / steps
        entry[1] += 1 / steps
    rows = (MeasuredProduct(*key, ms, count) for key, (ms, count) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer, row.gemm)))


def _notes(trace: Trace, work: Mapping[TraceEvent, NamedKernel]) -> Iterable[str]:
    if not trace.kernels:
        yield "The trace has no GPU events, so the times are of operators on the host."
    products = 0
    without = 0
    for event, known in work.items():
        if known.kind in ("gemm", "attention"):
            products += 1
            without += not event.context.layer
    if without:
        yield (
            f"{without} of {products} GEMM and attention kernels ran outside of all ranges: their layers are unknown."
        )


def show(step: MeasuredStep) -> None:
    """Print kinds of kernels by pass, layers by time, and notes."""
    iterations = step.iterations
    of = f"iteration {iterations[0]}"
    if len(iterations) > 1:
        of = f"mean of {len(iterations)} iterations ({iterations[0]} to {iterations[-1]})"
    device = step.device
    if step.rank is not None:
        device += f", rank {step.rank}"
    terminal.show_text(f"{device}: {of}. Step {step.wall_ms:.3f} ms.")
    _show_kinds(step)
    _show_layers(step)
    terminal.show_notes(step.notes)


def _show_kinds(step: MeasuredStep) -> None:
    passes: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        passes[row.kind, row.format][row.of_pass or "other"] += row.ms
    known = set[str]().union(*passes.values())
    columns = [name for name in _PASSES if name in known]
    rows = []
    for (kind, form), ms in step.by_kind().items():
        share = ""
        if step.work_ms:
            share = f"{100 * ms / step.work_ms:.1f} %"
        cells = [f"{kind} {form}".strip(), f"{ms:.3f}", share]
        for name in columns:
            cells.append("")
            if passes[kind, form].get(name):
                cells[-1] = f"{passes[kind, form][name]:.3f}"
        rows.append(cells)
    whole = "of operators"
    if step.on_device:
        whole = "of kernels"
    _show_table(["kind", "ms", whole, *columns], rows)


def _show_layers(step: MeasuredStep) -> None:
    layers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        layers[row.layer or "(no layer)"][row.gemm or row.kind] += row.ms
    rows = []
    for layer, parts in sorted(layers.items(), key=lambda item: -sum(item[1].values())):
        largest = sorted(parts.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        rows.append([layer, f"{sum(parts.values()):.3f}", ", ".join(f"{name} {ms:.3f}" for name, ms in largest)])
    _show_table(["layer", "ms", "of which"], rows[:_MOST_LAYERS])
    if len(rows) > _MOST_LAYERS:
        terminal.show_text(f"and {len(rows) - _MOST_LAYERS} more layers; --json lists all.")


def _show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = terminal.table(*head)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        if column.header != "of which":
            column.justify = "right"
    for row in rows:
        table.add_row(*map(terminal.cell, row))
    terminal.show(table)
