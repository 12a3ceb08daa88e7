"""docs/speed.md: its code, what it shows of the output, and its table of devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.speed import device_named, known_devices
from te_precision_callbacks.speed.estimate import Step, estimate_step
from te_precision_callbacks.speed.trace import MeasuredStep
from tests.docs.pages import PAGES, blocks

PAGE = "docs/speed.md"


@pytest.mark.slow
def test_a_session_and_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(te.Linear(64, 128), te.LayerNormMLP(128, 256), torch.nn.Linear(128, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    with InspectSession(None, model=model, log_dir="logs") as session:
        for _ in range(2):
            with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                y = model(torch.randn(64, 64))
            y.sum().backward()
            optimizer.step()
            session.step()
    live = estimate_step(Step.of(session.coverage(), session.precision), device_named("h200"))
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(blocks(PAGE, "python", "import pandas")[0], names)
    speed = names["speed"]
    assert [time.as_json() for time in speed.times] == [time.as_json() for time in live.times]
    assert {time.recipe for time in speed.times} == {"fp8_current_scaling", ""}
    assert "keep" in capsys.readouterr().out


def test_a_device_file(tmp_path: Path) -> None:
    [text] = blocks(PAGE, "yaml")
    (tmp_path / "my_device.yaml").write_text(text)
    assert device_named(str(tmp_path / "my_device.yaml")).fitted.measured_on == "NVIDIA H200 NVL"


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


_, LOOP, READ, OWN = blocks("docs/fp8-not-faster.md", "python")


def test_the_code_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("{}\n")
    model = te.Linear(32, 32)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 1e-3),
        "loader": [torch.randn(32, 32)] * 14,
    }
    exec(LOOP, names)
    exec(READ, names)
    assert names["step"].iterations == (11, 12, 13)
    assert "linear" in capsys.readouterr().out
    names["path"].rename("trace.json.gz")
    exec(OWN, names)
    assert isinstance(names["step"], MeasuredStep)
