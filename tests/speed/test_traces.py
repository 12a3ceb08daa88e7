"""Traces of torch.profiler: planted ones, with known times, and traces of ``profile=``."""

import gzip
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner

from examples.byte_lm import ByteLanguageModel
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.cli import app
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.instrumentation.profiler import StepProfiler, export, profiler_runs
from te_precision_callbacks.options import ProfileChoice, SessionOptions, read_profile
from te_precision_callbacks.runs import list_runs, traces_of
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session import profiling as profiling_module
from te_precision_callbacks.speed.trace import TraceError, measure, read_trace, show
from te_precision_callbacks.speed.trace.measuring import kind_of_kernel, kind_of_operator
from tests.speed.planted import Planted


def summed(rows: Iterable[tuple[Any, float, int]]) -> tuple[Counter[Any], Counter[Any]]:
    times, counts = Counter(), Counter()
    for key, us, count in rows:
        times[key] += us
        counts[key] += count
    return times, counts


@pytest.mark.parametrize("facts", [{}, {"again": 2, "recompute": True}, {"casts_behind": True}], ids=str)
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
    last = kernels[-1]
    assert step.wall_ms == pytest.approx((last["ts"] + last["dur"] - kernels[0]["ts"]) / 1e3)
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


# ---------------------------------------------------------------------- profile=, the ranges and the trace of a session


QUIET: dict[str, Any] = {"quiet": True, "statistics_log": "off"}


class Checkpointed(ByteLanguageModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            with te.autocast(enabled=True):
                hidden = te.checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)  # type: ignore[no-any-return]


def byte_lm(
    micro_batches: int = 1, *, layers: int = 1, again: bool = False
) -> tuple[torch.nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = (Checkpointed if again else ByteLanguageModel)(layers=layers, hidden=64, heads=2, window=32)
    model.configure_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(micro_batches):
            tokens = torch.randint(256, (4, 33))
            torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def tiny() -> tuple[torch.nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = te.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        with te.autocast(enabled=True):
            model(torch.randn(32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def trained(
    folder: Path, model: torch.nn.Module, step: Callable[[], None], steps: int = 4, **keywords: Any
) -> Coverage:
    with InspectSession(None, model=model, log_dir=folder, **{**QUIET, **keywords}) as session:
        for _ in range(steps):
            step()
            session.step()
    return session.coverage()


def traces(folder: Path) -> list[Path]:
    (run,) = list_runs(folder)
    return traces_of(folder / FOLDER / run)


def only_trace(folder: Path) -> Path:
    (path,) = traces(folder)
    return path


def gemms_of(folder: Path, of_pass: str) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in measure(read_trace(only_trace(folder))).products:
        if row.kind == "gemm" and row.gemm and row.of_pass == of_pass:
            counts[row.layer, row.gemm] += round(row.calls)
    return counts


@pytest.mark.parametrize(("micro_batches", "again"), [(2, False), (1, True)], ids=["plain", "checkpointed"])
def test_each_gemm_has_its_layer(micro_batches: int, again: bool, tmp_path: Path) -> None:
    coverage = trained(tmp_path, *byte_lm(micro_batches, layers=2, again=again), 4, profile="3")
    for backward in (False, True):
        counted = Counter({(p.layer, p.gemm): p.calls for p in coverage if p.family == "te" and p.backward == backward})
        assert gemms_of(tmp_path, "backward" if backward else "forward") == counted
        if not backward:
            assert gemms_of(tmp_path, "recompute") == (counted if again else {})


def test_a_profile_is_the_iterations_that_were_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, *byte_lm(), 8, profile="6-7")
    step_ = measure(read_trace(only_trace(tmp_path)))
    assert step_.iterations == (6, 7)
    assert all(row.layer for row in step_.products if row.kind == "gemm")
    of_head = {row.of_pass for row in step_.products if row.layer == "head" and row.kind == "gemm"}
    assert of_head == {"forward", "backward"}
    show(step_)
    assert "layers.0.layernorm_mlp.fc1" in capsys.readouterr().out


class OtherLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.operations = te.ops.Sequential(te.ops.Linear(64, 64), te.ops.GELU(), te.ops.Linear(64, 64))
        self.experts = te.GroupedLinear(2, 64, 64)
        self.late = te.Linear(64, 64, delay_wgrad_compute=True)
        self.compiled = torch.nn.Linear(64, 64)
        self.compiled.compile(backend="eager")
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True):
            rows = self.late(self.experts(self.operations(rows), [32, 32]))
        rows = self.compiled(rows)
        return rows + self.conv(rows.unsqueeze(1)).mean(1)


def test_other_layers_have_their_gemms_too(tmp_path: Path) -> None:
    model = OtherLayers()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    hooked = []

    def step() -> None:
        hooked.append(len(model.compiled._forward_pre_hooks))
        model(torch.randn(64, 64)).square().mean().backward()
        model.late.backward_dw()
        optimizer.step()
        optimizer.zero_grad()

    trained(tmp_path, model, step, 5, profile="3-4")
    gemms = [row for row in measure(read_trace(only_trace(tmp_path))).products if row.kind == "gemm"]
    layers = ("operations.0", "operations.2", "experts", "late")  # one kernel may run all experts
    expected = {("conv", ""), *((layer, gemm) for layer in layers for gemm in GEMMS)}
    assert {(row.layer, row.gemm) for row in gemms if row.layer} == expected
    assert {row.of_pass for row in gemms if row.layer == "conv"} == {"forward", "backward"}
    assert sum(row.calls for row in gemms if not row.layer) == 3, "of compiled"
    assert len({*hooked[1:]}) == 1, "a hook would compile the module again"


@pytest.mark.parametrize(("value", "count"), [("1", 0), ("1, all", 1)])
def test_rank_0_is_profiled_unless_all_are(
    value: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling_module, "own_rank", lambda: 1)
    trained(tmp_path, *tiny(), steps=2, profile=value)
    assert len(traces(tmp_path)) == count


def test_nothing_is_there_before_a_profile_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    model, step = byte_lm()
    runs, hooks = [], []
    with InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile=3) as session:
        for _ in range(5):
            runs.append(profiler_runs())
            hooks.append(sum(len(module._forward_pre_hooks) for module in model.modules()))
            step()
            session.step()
    assert runs == [False, False, False, True, False]
    assert hooks[1] == hooks[2] == hooks[4] < hooks[3]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_training_is_the_same_with_a_profile(tmp_path: Path) -> None:
    weights = []
    for number, keywords in enumerate(({}, {"profile": "0-2"})):
        model, step = tiny()
        trained(tmp_path / str(number), model, step, steps=3, **keywords)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("when", ["before", "waiting"])
def test_a_profiler_of_the_users_own_gets_the_ranges(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = tiny()
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with (
        own if when == "before" else nullcontext(),
        InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile="1-2") as session,
        caplog.at_level(logging.WARNING),
    ):
        for number in range(4):
            step()
            session.step()
            if number == 0 and when == "waiting":  # while the session's own warms up
                own.start()
    if when != "before":
        own.stop()
    own.export_chrome_trace(str(tmp_path / "own.json"))
    assert caplog.text.count("another torch profiler") == 1
    assert traces(tmp_path) == []
    assert {row.layer for row in measure(read_trace(tmp_path / "own.json")).products if row.gemm} == {"linear"}


def test_a_trace_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiling_module, "export", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with caplog.at_level(logging.ERROR):
        trained(tmp_path, *tiny(), steps=3, profile=1)
    assert "writing a profile: OSError" in caplog.text


def test_a_run_that_ends_in_a_profile_writes_what_there_is(tmp_path: Path) -> None:
    model, step = tiny()
    with (
        pytest.raises(RuntimeError, match="of the script"),
        InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile="1-9") as session,
    ):
        for _ in range(2):
            step()
            session.step()
        raise RuntimeError("of the script")
    assert only_trace(tmp_path).name.endswith("iterations-000001-000001.json.gz")
    assert measure(read_trace(only_trace(tmp_path))).iterations == (1,), "without the one that has only begun"


@pytest.mark.parametrize(
    ("profile", "begins", "ran", "said"),
    [
        ("7", 0, [], "asked for iteration 7, of which none ran: the run ended before iter"),
        ("1-9", 0, ["000001-000003"], "asked for iterations 1 to 9, of which 3 ran: the run ended before"),
        ("0-3", 2, ["000002-000003"], "asked for iterations 0 to 3, of which 2 ran: the run started later"),
        ("0", 2, [], "asked for iteration 0, of which none ran: the run started later"),
        ("2-3", 0, ["000002-000003"], ""),
    ],
)
def test_iterations_that_the_run_does_not_have(
    profile: str, begins: int, ran: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = tiny()
    with InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile=profile) as session:
        session.iteration = begins
        for _ in range(begins, 4):
            step()
            session.step()
    stated = [record.getMessage() for record in caplog.records if "profile= asked" in record.getMessage()]
    assert len(stated) == bool(said)
    assert said in "".join(stated)
    known = CliRunner().invoke(app, ["speed", str(tmp_path), "--device", "h200", "--json"])
    assert [note for note in json.loads(known.stdout)["notes"] if "profile= asked" in note] == stated
    assert [path.name for path in traces(tmp_path)] == [
        f"seg-000.rank-00000.iterations-{numbers}.json.gz" for numbers in ran
    ]


@pytest.mark.parametrize("when", ["it has warmed up", "it runs", "the other one has warmed up"])
def test_a_profile_that_is_given_up_leaves_the_other_one_whole(when: str, tmp_path: Path) -> None:
    first = StepProfiler()
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if when == "the other one has warmed up":
        other.prepare_trace()
    assert first.warm_up()
    if when == "it runs":
        assert first.start()
    if when != "the other one has warmed up":
        other.prepare_trace()
    other.start_trace()
    assert first.given_up
    assert not first.start()
    torch.ones(3).add(1)
    assert first.stop() is None
    other.stop_trace()
    export(other, tmp_path / "other.json.gz")
    assert "aten::add" in {event.name for event in read_trace(tmp_path / "other.json.gz").host}


@pytest.fixture(autouse=True)
def _no_profiler_is_left() -> Iterator[None]:
    yield
    assert not profiler_runs()


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, None),
        (10, ProfileChoice(10, 10, False)),
        ("10", ProfileChoice(10, 10, False)),
        ("10-12", ProfileChoice(10, 12, False)),
        ("10 - 12, all", ProfileChoice(10, 12, True)),
        ("7,all", ProfileChoice(7, 7, True)),
    ],
)
def test_what_profile_takes(value: Any, choice: ProfileChoice | None) -> None:
    assert read_profile(value) == choice


@pytest.mark.parametrize("value", [-1, True, 1.5, "", "12-10", "10-", "a", "10, some", [10]])
def test_what_profile_does_not_take(value: Any) -> None:
    with pytest.raises(OptionError, match=r"profile= must be an iteration, such as 11, a range"):
        SessionOptions.from_keywords(None, profile=value)
