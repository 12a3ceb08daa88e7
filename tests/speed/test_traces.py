"""Traces of torch.profiler: what each kernel is, against a trace with a known truth, and what bad traces give."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace import TraceError, measure, read_trace, show
from te_precision_callbacks.speed.trace.measuring import MeasuredStep
from tests.speed.planted import Planted, products


def told(step: MeasuredStep) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """Layer, GEMM, pass and kind -> microseconds and kernels, as they were measured."""
    found: dict[tuple[str, str, str, str], tuple[float, int]] = {}
    for row in step.products:
        key = row.layer, row.gemm, row.of_pass, str(row.kind)
        us, count = found.get(key, (0.0, 0))
        found[key] = us + row.ms * 1e3, count + round(row.calls)
    return {key: (pytest.approx(us), count) for key, (us, count) in found.items()}


def shown(step: MeasuredStep, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed of a step, in one line."""
    show(step)
    return " ".join(capsys.readouterr().out.split())


def true(planted: Planted) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """The same, as they are."""
    times: Counter[tuple[str, str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for kernel in planted.truth:
        times[kernel[:4]] += kernel.us  # type: ignore[assignment]
        counts[kernel[:4]] += 1
    return {key: (times[key], counts[key]) for key in times}


@pytest.mark.parametrize("facts", [{}, {"recompute": True}, {"again": 3}, {"again": 2, "recompute": True}], ids=str)
def test_each_kernel_of_a_planted_trace_has_its_layer_gemm_pass_and_kind(facts: dict[str, Any], tmp_path: Path) -> None:
    planted = Planted(**facts)
    trace = read_trace(planted.write(tmp_path / "trace.json.gz"))
    step = measure(trace, products(again=facts.get("again", 1)))
    assert told(step) == true(planted)
    assert (step.device, step.rank, step.iterations) == ("NVIDIA H100 80GB HBM3", 3, (7,))
    assert step.notes == ()
    assert all(row.layer for row in step.products if row.kind == "gemm")


def test_without_shapes_the_ranges_name_layers(tmp_path: Path) -> None:
    planted = Planted(shapes=False)
    step = measure(read_trace(planted.write(tmp_path / "trace.json")), products())
    gemms = {key: value for key, value in true(planted).items() if key[3] == "gemm" and key[0] != "head"}
    assert {key: value for key, value in told(step).items() if key[3] == "gemm" and key[0] != "head"} == gemms
    assert {row.gemm for row in step.products if row.layer == "head"} == {"fprop", ""}
    assert all(row.layer for row in step.products if row.kind == "gemm")
    assert any("no shapes" in note for note in step.notes)


@pytest.mark.parametrize("run", [products(), []], ids=["with a run", "alone"])
def test_a_trace_without_ranges_is_refused(run: list[Product], tmp_path: Path) -> None:
    path = Planted(ranges=False).write(tmp_path / "trace.json")
    with pytest.raises(TraceError, match=r"trace.json has no ranges of layers.*Record the trace with profile="):
        measure(read_trace(path), run)


def test_the_times_add_up(tmp_path: Path) -> None:
    for late in (10.0, 150.0):
        planted = Planted(late=late)
        step = measure(read_trace(planted.write(tmp_path / "trace.json")), products())
        assert step.work_ms == pytest.approx(sum(kernel.us for kernel in planted.truth) / 1e3)
        kernels = [event for event in planted.events if event.get("cat") == "kernel"]
        first, last = kernels[0]["ts"], kernels[-1]["ts"] + kernels[-1]["dur"]
        assert step.wall_ms == pytest.approx((last - first) / 1e3)
        assert sum(step.by_kind().values()) == pytest.approx(step.work_ms)


@pytest.mark.parametrize("columns", [60, 100])
def test_what_is_printed_is_as_wide_as_the_terminal(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = measure(read_trace(Planted(late=400, recompute=True).write(tmp_path / "trace.json")), products())
    monkeypatch.setenv("COLUMNS", str(columns))
    show(step)
    lines = capsys.readouterr().out.splitlines()
    assert columns - 20 < max(map(len, lines)) <= columns
    words = {word.strip(":,") for line in lines for word in line.split()}
    assert {"layers.0.mlp.fc1", "recompute", "dgrad", f"{step.wall_ms:.3f}"} <= words


def test_the_json_is_the_rows(tmp_path: Path) -> None:
    step = measure(read_trace(Planted().write(tmp_path / "trace.json")), products())
    facts = json.loads(json.dumps(plain(step)))
    row = next(row for row in facts["products"] if row["layer"] == "layers.0.mlp.fc1" and row["gemm"] == "wgrad")
    assert row == {
        "layer": "layers.0.mlp.fc1",
        "gemm": "wgrad",
        "of_pass": "backward",
        "kind": "gemm",
        "format": "fp8",
        "ms": pytest.approx(0.27),
        "calls": 1,
    }


def test_a_kernel_that_nobody_knows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = Planted()
    for event in planted.events:
        if event.get("cat") == "kernel" and "ln_fwd" in event["name"]:
            event["name"] = "zorg_17"
    for event in planted.events:
        if event["name"] == "_LayerNormLinear":
            event["name"] = "SomethingOwn"  # the operator does not say it either
    step = measure(read_trace(planted.write(tmp_path / "trace.json")), products())
    assert step.by_kind()["unknown", ""] == pytest.approx(0.06)
    assert "Kernels of unknown kind take 0.6 % of the kernels' time: zorg_17." in shown(step, capsys)


def test_a_trace_without_a_gpu_and_one_without_the_host(tmp_path: Path) -> None:
    planted = Planted()
    every = list(planted.events)
    planted.events = [event for event in every if event.get("cat") != "kernel"]
    step = measure(read_trace(planted.write(tmp_path / "cpu.json")), products())
    assert (step.device, step.on_device) == ("CPU", False)
    assert any("no event of a GPU" in note for note in step.notes)
    planted.events = [event for event in every if event.get("cat") == "kernel"]
    with pytest.raises(TraceError, match="has no ranges of layers"):
        measure(read_trace(planted.write(tmp_path / "gpu.json")), products())


def test_a_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    trace = read_trace(Planted().write(tmp_path / "trace.json"))
    other = [Product("decoder.fc", "te", "fprop", False, 8, 8, 8, 1, 1, 512, {"activation": "FP8 E4M3"})]
    with pytest.raises(TraceError, match=r"trace of another run: its ranges name layers.*the run has decoder.fc"):
        measure(trace, other)


def test_the_format_is_that_of_the_kernel_before_that_of_the_run(tmp_path: Path) -> None:
    trace = read_trace(Planted().write(tmp_path / "trace.json"))
    high = [replace(one, operands={"activation": "BF16", "weight": "BF16"}) for one in products()]
    step = measure(trace, high)
    assert {row.format for row in step.products if row.gemm and row.layer != "head"} == {"fp8"}
    assert {row.format for row in step.products if row.layer == "head"} == {"bf16"}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("share", [0.999, 0.6, 0.01])
def test_a_trace_that_is_cut_off_is_refused(share: float, suffix: str, tmp_path: Path) -> None:
    whole = Planted().write(tmp_path / f"whole{suffix}").read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError, match="is cut off"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"PAR1\x00\x80\xff\xfe", "is not JSON"),
        (b'{"loss": 2.5}', "is not a trace of torch.profiler: it has no operator"),
        (b'{"traceEvents": []}', "is not a trace of torch.profiler: it has no operator"),
        (b'{"traceEvents": [{"ph": "X"}, 3]}', "is not a trace of torch.profiler: it has no operator"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon", "name": "a"}]}', "does not write: .*soon"),
        (b'{"traceEvents": [{"ph": "M"} {"ph": "M"}]}', "is not JSON"),
        (b"\x1f\x8bnot a gzip at all", "not a gzip"),
        (gzip.compress(b'{"traceEvents": [{"ph": "M"}, {"ph":', mtime=0), "is cut off"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing.json")


def test_a_list_of_events_alone_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(Planted().events))
    assert measure(read_trace(path), products()).products


def test_an_empty_step_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the whole trace" in shown(MeasuredStep("CPU", False, None, (), 0.0, (), ()), capsys)
