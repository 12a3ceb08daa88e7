"""The replay section of docs/gemm-error.md: its config records, and its commands print what the page says."""

import runpy
import shlex
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from transformer_engine.common.recipe import Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks.cli import app
from te_precision_callbacks.session import InspectSession
from tests.docs.pages import blocks
from tests.replay import faults

pytestmark = pytest.mark.usefixtures("any_gpu")

PAGE = "docs/gemm-error.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"fc2": te.Linear(64, 128, params_dtype=torch.bfloat16)})
    config, with_condition = map(yaml.safe_load, blocks(PAGE, "yaml", "record_"))
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        for sections, folder in ((config, "run"), (with_condition, "run2")):
            with InspectSession(sections, model=model, log_dir=folder) as session:
                with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                    out = model["fc2"](torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True))
                out.float().square().sum().backward()
                session.step()
    assert [path.name for path in Path("run2").rglob("*_gemm.safetensors")] == ["fc2.fprop_gemm.safetensors"]
    printed, by_script = blocks(PAGE, "text")
    for block in blocks(PAGE, "bash"):
        (line,) = block.strip().splitlines()
        result = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "200"})
        assert result.exit_code == 1
        assert result.output.startswith(printed)
    assert {path.name for path in Path("bug").iterdir()} == {"repro.py", "repro.safetensors"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("bug/repro.py", run_name="__main__")
    assert capsys.readouterr().out == by_script
    assert ended.value.code == 0
    Path("bug/repro.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("bug/repro.py", run_name="__main__")
    assert ended.value.code == 2
    assert "repro.safetensors is missing" in capsys.readouterr().err
