"""docs/report.md: its commands and its code as they stand there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession
from te_precision_callbacks.cli import main
from tests.conftest import statistics
from tests.docs.pages import blocks

pytestmark = pytest.mark.slow  # sessions, and three reports


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    config = statistics(tensors=["activation", "weight"], stats=["min", "max", "std"])
    with InspectSession(config, model=model, log_dir="logs") as session:
        for _ in range(3):
            model(torch.randn(32, 32)).sum().backward()
            session.step()
    return tmp_path


def test_the_commands(logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks("docs/report.md", "bash", "te-precision report") for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        program, *arguments = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), capsys.readouterr().err
    assert (logs / "report.html").stat().st_size > 100


def test_the_code(logs: Path) -> None:
    (code,) = blocks("docs/report.md", "python")
    exec(code, {})
    assert (logs / "report.html").stat().st_size > 1_000_000
