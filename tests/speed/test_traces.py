"""Traces of torch.profiler: each kernel against a trace with a known truth, and the errors of invalid traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.speed.trace import TraceError, measure, read_trace, show
from te_precision_callbacks.speed.trace.measuring import MeasuredStep
from tests.speed.planted import Planted


def measured(step: MeasuredStep) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    """Layer, GEMM, pass and kind -> microseconds and kernels."""
    sums: dict[tuple[str, str, str, str], tuple[float, int]] = {}
    for row in step.products:
        key = row.layer, row.gemm, row.of_pass, str(row.kind)
        us, count = sums.get(key, (0.0, 0))
        sums[key] = us + row.ms * 1e3, count + round(row.calls)
    return {key: (pytest.approx(us), count) for key, (us, count) in sums.items()}


def true(planted: Planted) -> dict[tuple[str, str, str, str], tuple[float, int]]:
    times: Counter[tuple[str, str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for kernel in planted.truth:
        times[kernel[:4]] += kernel.us  # type: ignore[assignment]
        counts[kernel[:4]] += 1
    return {key: (times[key], counts[key]) for key in times}


@pytest.mark.parametrize("facts", [{}, {"again": 2, "recompute": True}], ids=str)
def test_each_kernel_of_a_planted_trace_has_its_layer_gemm_pass_and_kind(facts: dict[str, Any], tmp_path: Path) -> None:
    planted = Planted(**facts)
    step = measure(read_trace(planted.write(tmp_path / "trace.json.gz")))
    assert measured(step) == true(planted)
    assert (step.device, step.rank, step.iterations) == ("NVIDIA H100 80GB HBM3", 3, (7,))
    assert {row.format for row in step.products if row.gemm} == {"fp8"}
    assert {row.format for row in step.products if row.layer == "head"} == {"bf16"}
    row = next(row for row in plain(step)["products"] if row["layer"] == "layers.0.mlp.fc1" and row["gemm"] == "wgrad")
    assert row["of_pass"] == "backward"
    assert row["ms"] == pytest.approx(0.27 * facts.get("again", 1))


def test_a_trace_without_ranges_is_refused(tmp_path: Path) -> None:
    path = Planted(ranges=False).write(tmp_path / "trace.json")
    with pytest.raises(TraceError, match=r"trace.json has no ranges of layers.*Record the trace with profile="):
        measure(read_trace(path))


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
    monkeypatch.setenv("COLUMNS", "60")
    show(step)
    lines = capsys.readouterr().out.splitlines()
    assert 40 < max(map(len, lines)) <= 60
    words = {word.strip(":,") for line in lines for word in line.split()}
    assert {"layers.0.mlp.fc1", "recompute", "dgrad", f"{step.wall_ms:.3f}"} <= words


def test_a_trace_without_a_gpu_and_one_without_the_host(tmp_path: Path) -> None:
    planted = Planted()
    every = list(planted.events)
    planted.events = [event for event in every if event.get("cat") != "kernel"]
    step = measure(read_trace(planted.write(tmp_path / "cpu.json")))
    assert (step.device, step.on_device) == ("CPU", False)
    assert any("no GPU events" in note for note in step.notes)
    planted.events = [event for event in every if event.get("cat") == "kernel"]
    with pytest.raises(TraceError, match="has no ranges of layers"):
        measure(read_trace(planted.write(tmp_path / "gpu.json")))


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_truncated_trace_is_refused(suffix: str, tmp_path: Path) -> None:
    whole = Planted().write(tmp_path / f"whole{suffix}").read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(whole[: int(len(whole) * 0.6)])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


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
    path.write_text(json.dumps(Planted().events))
    assert measure(read_trace(path)).products
