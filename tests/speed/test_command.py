"""te-precision speed and te-precision check --speed; docs/speed.md and docs/fp8-not-faster.md."""

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from transformer_engine.common.recipe import Float8CurrentScaling
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.runs import RunError, open_run
from te_precision_callbacks.runs.run_files import own_traces
from te_precision_callbacks.speed import Calibration, Time, device_named, known_devices
from te_precision_callbacks.speed.calibration import cast_key, gemm_key, high_key
from te_precision_callbacks.speed.costs import Shape, cast_users, operand_sizes
from te_precision_callbacks.speed.estimate import Step, estimate_step, layer_rows
from te_precision_callbacks.speed.recorded import run_speed
from te_precision_callbacks.speed.trace import MeasuredStep, TraceError
from tests.docs.pages import PAGES, blocks
from tests.runs.making import RunWriter
from tests.speed.planted import Planted, products, tables
from tests.speed.test_expected import layer
from tests.training import observed

KEYS = {
    "layer", "gemm", "m", "n", "k", "recipe", "high_ms", "low_ms", "cast_ms", "speedup", "speedup_low", "speedup_high",
    "source",
}  # fmt: skip

MODEL = """
import torch
import transformer_engine.pytorch as te

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.big = te.Linear(8192, 8192, params_dtype=torch.bfloat16)
        self.small = te.Linear(1024, 256, params_dtype=torch.bfloat16)
        self.head = torch.nn.Linear(256, 32000, dtype=torch.bfloat16)

build = Net
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("speed_models.py").write_text(MODEL)
    Path("empty.yaml").write_text("stats: {enabled: False, layers: {layer_types: [big]}, transformer_engine: {}}\n")
    yield tmp_path
    sys.modules.pop("speed_models", None)


def run(*arguments: str, columns: int = 200) -> Result:
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": str(columns)})


def read(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def write(gpus: list[str | None], *, macs: int | None = None) -> None:
    products = [replace(item, macs=item.macs if macs is None else macs) for item in layer("fc", 8192, (1024, 4096))]
    run_id = None
    for begin, gpu in enumerate(gpus):
        gemms, operands = tables(products, since=begin)
        with RunWriter.begin("logs", run_id=run_id, first_iteration=begin, gpu=gpu, world=1) as writer:
            run_id = writer.run_id
            writer.put_facts("layers", [{"layer": "fc", "since": begin}])
            writer.put_facts("gemms", gemms)
            writer.put_facts("operands", operands)
            writer.add_step(begin)


def test_a_calibrated_shape_has_its_measured_speed_up() -> None:
    """GEMMs of 0.3 ms in BF16 and 0.2 in FP8, with casts of 0.1: the input and weight with fprop, the gradient."""
    recipe, table = "fp8_current_scaling", Calibration("NVIDIA B300 SXM6 AC")
    shapes = {"fprop": Shape(8192, 1024, 4096), "dgrad": Shape(8192, 4096, 1024), "wgrad": Shape(4096, 8192, 1024)}
    write(["NVIDIA B300 SXM6 AC"])
    for shape in shapes.values():
        table.times |= {high_key(shape): Time(0.3, 0.002), gemm_key(shape, recipe): Time(0.2, 0.002)}
    for operand, first, directions in cast_users(dict.fromkeys(shapes, recipe)):
        sizes = operand_sizes(operand, first, shapes[first])
        table.times[cast_key(recipe, operand, *sizes, directions)] = Time(0.1, 0.002)
    table.write(Path("table.json"))
    arguments = ("speed", "logs", "--table", "table.json", "--device")
    result = read(*arguments, "b300")
    assert [set(item) for item in result["products"]] == [KEYS] * 3
    assert {item["source"] for item in [*result["products"], result["total"]]} == {"calibrated"}
    assert [item["speedup"] for item in result["products"]] == pytest.approx([0.3 / 0.4, 0.3 / 0.3, 0.3 / 0.2])
    assert result["total"]["speedup"] == pytest.approx(1)
    assert result["products"][0]["speedup_high"] < 1 < result["products"][2]["speedup_low"]
    assert device_named("b300").title in run(*arguments, "b300").output
    assert "measured on 'NVIDIA B300 SXM6 AC', not on NVIDIA H200" in refusal(*arguments, "h200")


def refusal(*arguments: str) -> str:
    error = run(*arguments).exception
    assert isinstance(error, PrecisionDebugError)
    return str(error)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([None], "ran without a GPU. Pass --device"),
        (["NVIDIA H200", "NVIDIA B200"], "ran on several devices: NVIDIA H200, NVIDIA B200. Choose one with --device"),
        (["AMD Instinct MI300X"], "The speed of 'AMD Instinct MI300X', the GPU of the run"),
    ],
)
def test_the_device_of_a_run(gpus: list[str | None], said: str) -> None:
    write(gpus)
    assert said in refusal("speed", "logs")
    assert read("speed", "logs", "--device", "h200")["device"] == "NVIDIA H200 SXM"


def test_one_of_several_runs() -> None:
    write(["NVIDIA H200"])
    write(["NVIDIA B300 SXM6 AC"])
    runs = sorted(path.name for path in Path("logs/precision_records").iterdir())
    for run_id, device in zip(runs, ("h200", "b300"), strict=True):
        assert read("speed", "logs", "--run", run_id)["device"] == device_named(device).title


def test_a_run_without_products() -> None:
    write(["NVIDIA H200"], macs=0)
    assert "has no matrix products with sizes" in refusal("speed", "logs")


@pytest.mark.parametrize("table", ["gemms", "layers"])
def test_what_cannot_be_read_of_a_run_is_reported(table: str) -> None:
    write(["NVIDIA H200"])
    (part,) = Path("logs").rglob(f"{table}.parquet")
    part.write_bytes(part.read_bytes()[:200])
    if table == "gemms":
        stated = refusal("speed", "logs")
        assert re.search(r"A part of the run cannot be read\. .*gemms.parquet", stated)
        assert "A session records" not in stated
    else:
        for arguments in (("--json",), ()):
            result = run("speed", "logs", *arguments)
            assert isinstance(result.exception, RunError), "so the exit code is 2"
            assert "layers.parquet cannot be read" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "mxfp9", "--device", "b300"), "Did you mean 'mxfp8'"),
        (("--recipe", "nvfp4", "--device", "h100"), "does not run nvfp4"),
        (("--device", "b3000"), "Did you mean 'b300'"),
        (("--device", "b300", "--table", "none.json"), "none.json cannot be read: [Errno 2] No such file"),
        (("--device", "b300", "--calibrate"), "torch finds none"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], said: str) -> None:
    write(["NVIDIA H200"])
    assert said in refusal("speed", "logs", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("speed",), "Missing argument 'RUN'"),
        (("check", "empty.yaml", "--speed"), "also give --model"),
        (("check", "empty.yaml", "--memory"), "also give --model"),
        (("check", "empty.yaml", "--device", "h200"), "also give --speed"),
        (("check", "empty.yaml", "--model", "speed_models:build", "--tokens", "64", "--speed"), "need a device"),
        (("check", "empty.yaml", "--model", "speed_models:build", "--speed", "--device", "h200"), "need --tokens or"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


PLAN = ("check", "empty.yaml", "--model", "speed_models:build", "--recipe", "fp8_current_scaling", "--tokens", "8192")


def test_a_plan_and_its_patch() -> None:
    result = read(*PLAN, "--speed", "--device", "h200")["speed"]
    assert {item["layer"] for item in result["products"]} == {"big", "small", "head"}
    assert {item["recipe"] for item in result["products"] if item["layer"] == "head"} == {None}
    keep = next(item for item in result["advice"] if item["text"].startswith("Keep small in BF16"))
    assert "Estimated for te.autocast(enabled=False)" in keep["note"]
    Path("patched.yaml").write_text(keep["patch"])
    again = run("check", "patched.yaml", *PLAN[2:], "--json")
    assert again.exit_code == 0, "no finding"
    [row] = [row for row in json.loads(again.stdout)["plan"] if row["layers"] == ["small"]]
    assert row["gemms"]["fprop"]["precision"] == "bf16"
    patched = read("check", "patched.yaml", *PLAN[2:], "--speed", "--device", "h200")["speed"]
    assert result["total"]["low_ms"] - patched["total"]["low_ms"] == pytest.approx(keep["saves_ms"])
    assert "Keep small in BF16: saves about" in run(*PLAN, "--speed", "--device", "h200").output


def test_a_recipe_that_the_device_does_not_run_is_refused_with_its_remedy() -> None:
    stated = refusal(*PLAN[:5], "nvfp4", *PLAN[6:], "--speed", "--device", "h200")
    assert re.search(r"H200 SXM does not run nvfp4: .* or another device with --device", stated)


# ---------------------------------------------------------------------------------------------- with a trace of the run


H100 = "NVIDIA H100 80GB HBM3"
LONG = "a_module_with_a_name_that_is_far_longer_than_a_terminal_is_wide_and_has_no_place_to_break"


def write_planted(gpu: str | None, *, inside: str = "") -> Path:
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
    planted.write(write_planted(H100))
    truth: dict[str, float] = defaultdict(float)
    for item in planted.truth:
        if item.kind in ("gemm", "cast"):
            truth[item.layer] += item.us / 1e3
    known = run_speed(open_run("logs"), estimate_step)
    rows = {row.layers: row.measured_ms for row in layer_rows(known.expected, known.measured_layers)}
    assert rows["head",] == pytest.approx(truth["head"])
    both = ("layers.0.qkv", "layers.1.qkv")
    assert rows[both] == pytest.approx(sum(truth[layer] for layer in both))
    assert rows["layers.0.attention", "layers.1.attention"] is None
    result = read("speed", "logs")
    measured = result["measured"]["products"]
    assert len({(row["layer"], row["gemm"]) for row in measured if row["kind"] == "gemm"}) == 25
    assert result["measured"]["device"] == H100
    assert re.search(" measured .*Measured in the trace", run("speed", "logs").output, re.DOTALL)


def test_a_trace_of_another_device_is_not_compared() -> None:
    Planted().write(write_planted(None))
    result = read("speed", "logs", "--device", "h200")
    assert result["products"]
    assert any("not comparable" in note for note in result["notes"])
    result = read("speed", "logs")
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
    assert read("speed", "logs")["measured"]["device"] == H100
    with RunWriter.begin("logs", gpu=H100, world=1) as writer:
        writer.add_step(0)
    assert own_traces(Path("logs"), writer.run_id) == [], "it is of another run"
    assert own_traces(Path("logs"), "logs") == [trace]


def test_a_damaged_trace_is_left_out_where_it_was_not_asked_for() -> None:
    trace = write_planted(H100)
    trace.write_bytes(b"not a trace")
    result = read("speed", "logs")
    assert result["measured"] is None
    assert any("own trace is not used" in note for note in result["notes"])
    assert isinstance(run("speed", "logs", "--trace", str(trace)).exception, TraceError)


def test_a_trace_of_another_model_is_not_compared() -> None:
    Planted().write(write_planted(H100, inside="decoder"))
    assert any("from another model" in note for note in read("speed", "logs")["notes"])


def test_a_patch_can_be_copied() -> None:
    write_planted(H100, inside=LONG)
    lines = run("speed", "logs", columns=80).output.splitlines()
    [begin, *_] = [number for number, line in enumerate(lines) if line.strip() == "keep_in_high_precision:"]
    patch = itertools.takewhile(lambda line: not line.strip() or line.startswith("    "), lines[begin:])
    assert LONG in yaml.safe_load("\n".join(patch))["keep_in_high_precision"]["layers"]["layer_name_regex_pattern"]


# -------------------------------------------------------------------------------------------------------- docs/speed.md


PAGE = "docs/speed.md"


@pytest.mark.slow
def test_a_session_and_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(te.Linear(32, 128), te.LayerNormMLP(128, 256), torch.nn.Linear(128, 32))
    session = observed(Path("logs"), net=model, recipe=Float8CurrentScaling())
    live = estimate_step(Step.of(session.coverage(), session.precision), device_named("h200"))
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(blocks(PAGE, "python", "import pandas")[0], names)
    speed = names["speed"]
    assert [time.as_json() for time in speed.times] == [time.as_json() for time in live.times]
    assert {time.recipe for time in speed.times} == {"fp8_current_scaling", ""}
    assert "keep" in capsys.readouterr().out


def test_a_device_file() -> None:
    Path("my_device.yaml").write_text(*blocks(PAGE, "yaml"))
    assert device_named("my_device.yaml").fitted.measured_on == "NVIDIA H200 NVL"


def test_the_table_of_devices_is_that_of_the_data() -> None:
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for name, device in known_devices().items():
        names = ", ".join(f"`{item}`" for item in (name, *device.other_names))
        figures = [device.bf16_tflops, device.fp8_tflops, device.fp4_tflops, device.bandwidth_tbs]
        cells = " | ".join("" if figure is None else f"{figure:g}" for figure in figures).replace("|  |", "| |")
        shown = next(line for line in text.splitlines() if line.startswith(f"| {names} |"))
        like = device.fitted.measured_on.removeprefix("NVIDIA ")
        assert shown.replace("2.0", "2") == f"| {names} | {cells} | {like} |", shown


# ----------------------------------------------------------------------------------------------- docs/fp8-not-faster.md


def test_the_code_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text("{}\n")
    model = te.Linear(32, 32)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 1e-3),
        "loader": [torch.randn(32, 32)] * 14,
    }
    _, loop, read_trace, own_trace = blocks("docs/fp8-not-faster.md", "python")
    exec(loop, names)
    exec(read_trace, names)
    assert names["step"].iterations == (11, 12, 13)
    assert "linear" in capsys.readouterr().out
    names["path"].rename("trace.json.gz")
    exec(own_trace, names)
    assert isinstance(names["step"], MeasuredStep)
