"""docs/comparing.md, and `show` in docs/report.md: their code and commands as they stand there."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from tests.compare.recorded import append, layers, record
from tests.docs.pages import blocks
from tests.runs.making import RunWriter


def curves(seed: int, factor: float = 1.0) -> dict[tuple[str, str, str], np.ndarray]:
    draw = np.random.default_rng(seed)
    results = {}
    for layer in layers(6):
        for statistic in ("cur_amax", "underflows%"):
            results[layer, "weight", statistic] = np.exp(draw.normal(0, 0.1, 60))
    results[layers(6)[3], "weight", "cur_amax"][30:] *= factor
    return results


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("bf16"), curves(0), order=layers(6), te_backend="compiled")
    record(Path("bf16_again"), curves(1), order=layers(6))
    record(Path("fp8"), curves(2, 2.0**12), order=layers(6), te_backend="reference")
    record(Path("logs"), curves(2))
    with RunWriter.begin("logs") as run:
        append(run, curves(3))
    with RunWriter.begin("run", world=2) as run:
        append(run, curves(0), rank=0)
        append(run, curves(1, 2.0**12), rank=1)


def test_the_commands() -> None:
    codes = []
    for page, begin in (("docs/comparing.md", ""), ("docs/report.md", "te-precision show")):
        for command in "".join(blocks(page, "bash", begin)).splitlines():
            program, *arguments = shlex.split(command)
            assert program == "te-precision"
            recorded = iter(sorted(path.name for path in Path("logs/precision_records").iterdir()))
            for place in (number for number, argument in enumerate(arguments) if argument == "--run"):
                arguments[place + 1] = next(recorded)  # in place of the page's example
            result = CliRunner().invoke(cli.app, arguments)
            assert result.output
            codes.append(result.exit_code)
    assert codes == [1, 0, 1, 0, 0, 0, 0]


def test_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks("docs/comparing.md", "python"):
        exec(compile(code, "docs/comparing.md", "exec"), {})
    assert Path("compare.html").stat().st_size > 1_000_000
    assert capsys.readouterr().out.splitlines() == [
        "30 layers.3.fc weight made here cur_amax",
        "te_backend compiled reference",
    ]
