"""te-precision report on the files of a run: pages, and messages for what is no run."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession
from te_precision_callbacks.cli import main
from tests.conftest import statistics
from tests.docs.pages import blocks
from tests.planted import defective

pytestmark = pytest.mark.processes


@pytest.fixture
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return defective(tmp_path_factory.mktemp("logs"), scalars={"loss": np.ones(40)})


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_dir: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["te-precision", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_a_page(report: Any, log_dir: Path, tmp_path: Path) -> None:
    code, out, _ = report(str(log_dir))
    assert code == 0
    assert re.fullmatch(r"report\.html: 2\.\d MB\n", out)
    text = (tmp_path / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h2000"), "There is no device 'h2000'"),
        (("-o", "/proc/no/report.html"), "cannot be written: there is no folder /proc/no"),
        (("-o", "new/report.html"), "cannot be written: there is no folder new"),
        (("-o", "."), ". cannot be written: it is a folder. Give the name of a file, such as report.html."),
        (("-o", ""), ". cannot be written: it is a folder."),
        (("-o", "report.json"), "this is no .json file. Name it report.html"),
    ],
)
def test_what_there_is_not(
    report: Any, log_dir: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, error = report(str(log_dir), *arguments)
    assert code == 2
    assert message in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_told(report: Any, log_dir: Path) -> None:
    (part,) = log_dir.rglob("values-*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    code, out, _ = report(str(log_dir))
    assert code == 0
    assert re.search(rf"note:.*{part.name}", out, re.DOTALL)


# ------------------------------------------------------------------------------------------------------- docs/report.md


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


@pytest.mark.slow  # three reports
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


@pytest.mark.slow
def test_the_code(logs: Path) -> None:
    (code,) = blocks("docs/report.md", "python")
    exec(code, {})
    assert (logs / "report.html").stat().st_size > 1_000_000
