"""te-precision speed RUN with a trace of the run: measured times beside expected ones."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.run_files import own_traces
from te_precision_callbacks.speed.estimate import estimate_step, layer_rows
from te_precision_callbacks.speed.recorded import run_speed
from te_precision_callbacks.speed.trace import TraceError
from tests.runs.making import RunWriter
from tests.speed.planted import Planted, products, tables

H100 = "NVIDIA H100 80GB HBM3"
LONG = "a_module_with_a_name_that_is_far_longer_than_a_terminal_is_wide_and_has_no_place_to_break"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ("speed", "logs", *arguments), env={"COLUMNS": "80"})


def read(*arguments: str) -> dict[str, Any]:
    result = show(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def write(gpu: str | None, *, inside: str = "") -> Path:
    """The run of the planted model, and where its traces lie."""
    with RunWriter.begin("logs", gpu=gpu, world=1) as writer:
        gemms, operands = tables([replace(p, layer=f"{inside}.{p.layer}" if inside else p.layer) for p in products()])
        writer.put_facts("gemms", gemms)
        writer.put_facts("operands", operands)
        writer.add_step(0)
    traces = Path("logs/precision_records") / writer.run_id / "traces"
    traces.mkdir()
    return traces / "seg-000.rank-00000.iterations-000007-000007.json.gz"


def test_measured_gemms_stand_beside_expected_ones() -> None:
    planted = Planted()
    planted.write(write(H100))
    truth: dict[str, float] = defaultdict(float)
    for item in planted.truth:
        if item.kind in ("gemm", "cast"):
            truth[item.layer] += item.us / 1e3
    known = run_speed(open_run("logs"), estimate_step)
    assert known.expected is not None
    rows = {row.layers: row.measured_ms for row in layer_rows(known.expected, known.measured_layers)}
    assert rows["head",] == pytest.approx(truth["head"])
    both = ("layers.0.qkv", "layers.1.qkv")
    assert rows[both] == pytest.approx(sum(truth[layer] for layer in both))
    assert rows["layers.0.attention", "layers.1.attention"] is None
    result = read()
    gemms = [row for row in result["measured"]["products"] if row["kind"] == "gemm"]
    assert len({(row["layer"], row["gemm"]) for row in gemms}) == 25
    assert result["measured"]["device"] == H100
    text = show().output
    for words in (" measured ", "Measured in the trace"):
        assert words in text


def test_a_trace_of_another_device_is_not_compared() -> None:
    Planted().write(write(None))
    result = read("--device", "h200")
    assert result["products"]
    assert any("not comparable" in note for note in result["notes"])
    result = read()
    assert result["products"] == [], "no device is known, so nothing is expected"
    assert result["measured"]["wall_ms"] > 0


def test_a_run_without_records_has_the_trace_in_its_log_folder() -> None:
    traces = Path("logs/precision_traces")
    traces.mkdir(parents=True)
    trace = Planted().write(traces / "rank-00000.iterations-000000-000000.json.gz")
    statistics = Path("logs/nvdlfw_inspect_statistics_logs")
    statistics.mkdir()
    line = "2026-03-01 09:30:00,718 - INFO - fc_activation_max \t\t\t\t iteration=000000 \t\t\t\t value=1.5\n"
    (statistics / "nvdlfw_inspect_globalrank-0.log").write_text(line)
    assert read()["measured"]["device"] == H100
    with RunWriter.begin("logs", gpu=H100, world=1) as writer:
        writer.add_step(0)
    assert own_traces(Path("logs"), writer.run_id) == [], "it is of another run"
    assert own_traces(Path("logs"), "logs") == [trace]


def test_a_damaged_trace_is_left_out_where_it_was_not_asked_for() -> None:
    trace = write(H100)
    trace.write_bytes(b"not a trace")
    result = read()
    assert result["measured"] is None
    assert any("own trace is not used" in note for note in result["notes"])
    with pytest.raises(TraceError):
        raise show("--trace", str(trace)).exception or AssertionError


def test_a_trace_of_another_model_is_not_compared() -> None:
    Planted().write(write(H100, inside="decoder"))
    assert any("trace of another model" in note for note in read()["notes"])


def test_a_patch_can_be_copied() -> None:
    write(H100, inside=LONG)
    lines = show().output.splitlines()
    [begin, *_] = [number for number, line in enumerate(lines) if line.strip() == "keep_in_high_precision:"]
    patch = []
    for line in lines[begin:]:
        if line.strip() and not line.startswith("    "):
            break
        patch.append(line)
    assert LONG in yaml.safe_load("\n".join(patch))["keep_in_high_precision"]["layers"]["layer_name_regex_pattern"]
