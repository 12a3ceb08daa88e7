"""te-precision report on the files of a run: pages, and messages for what is no run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.cli import main
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.report.data import PageData
from tests.report.runs import drifting, write

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write(drifting(blocks=2, steps=12), folder)
    return folder


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_dir: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["te-precision", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, said.out, said.err

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


def test_what_is_no_run(report: Any, tmp_path: Path) -> None:
    (tmp_path / "file\x1b[31m.txt").write_text("no run")
    for path, message in (
        ("nowhere", "no such file"),
        (".", "no recorded run"),
        ("file\x1b[31m.txt", "no recorded run"),
    ):
        code, _, error = report(path)
        assert code == 2
        assert message in error
        assert "\x1b" not in error


def test_a_run_without_numbers(report: Any, tmp_path: Path) -> None:
    from te_precision_callbacks.runs import RunWriter

    with RunWriter.begin(tmp_path, run_id="nothing") as run:  # as of a session that has not stepped
        run.add_event("segment_started", "Debug iteration 0 is next.", iteration=0)
    code, _, error = report(str(tmp_path))
    assert code == 2
    assert "nothing was recorded" in error
    assert not (tmp_path / "report.html").exists()


def test_a_damaged_part_is_told(report: Any, tmp_path: Path) -> None:
    folder = write(drifting(blocks=1, steps=4, histograms=False), tmp_path / "logs")
    (part,) = (folder / "seg-000" / "rank-00000").glob("values-*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    code, out, _ = report(str(tmp_path / "logs"))
    assert code == 0
    assert "note:" in out
    assert part.name in out


def test_logs_of_plain_nvidia_dlfw_inspect(report: Any, tmp_path: Path) -> None:
    logs = tmp_path / "nvdlfw_inspect_statistics_logs"
    logs.mkdir()
    lines = [
        f"2026-03-01 09:30:0{step},718 - INFO - {layer}_activation_{name}"
        f" \t\t\t\t iteration={step:06d} \t\t\t\t value={value}"
        for step in range(3)
        for layer, name, value in (("h.0.fc1", "max", 1.5 + step), ("h.1.fc1", "max", 2.5), ("h.1.fc1", "own", 7.0))
    ]
    for rank in range(2):
        (logs / f"nvdlfw_inspect_globalrank-{rank}.log").write_text("\n".join(lines) + "\n")
    assert report(str(tmp_path))[0] == 0
    told = PageData.of(open_run(tmp_path), 10**6).content
    assert told["worst_layers"] == [], "no max is bad"
    assert told["verdict"]["findings"] == []
    assert {one["statistic"] for one in told["families"]} == {"max", "own"}
