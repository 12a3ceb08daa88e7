"""Pages on one task each: their code and its output."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.runs import open_run
from tests.docs.pages import blocks


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGUSR1)
    yield tmp_path
    signal.signal(signal.SIGUSR1, before)
    for name in ("my_models", "train"):
        sys.modules.pop(name, None)


def command(line: str) -> tuple[int, str]:
    """Return the exit code and the output of a line of the page, on a wide terminal."""
    program, *arguments = shlex.split(line)
    assert program == "te-precision"
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def is_shown(page: str, printed: str, start: int = 0) -> None:
    """What is printed begins as the lines of the page do, from the block that is number ``start``."""
    result = lines(printed)
    for shown in lines(blocks(page, "text")[start]):
        assert any(line.startswith(shown) for line in result), shown


@pytest.mark.slow
def test_a_loss_that_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/diverging.md"
    script, again = blocks(page, "python")
    watch, fix = blocks(page, "yaml")
    Path("watch.yaml").write_text(watch)
    Path("fix.yaml").write_text(fix)
    Path("train.py").write_text(script)
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    is_shown(page, capsys.readouterr().out, 1)
    exec(compile(again, "again", "exec"), {})
    results, parted, losses, fixed = (command(block.strip()) for block in blocks(page, "bash"))
    assert [code for code, _ in (results, parted, losses, fixed)] == [1, 1, 0, 0]
    is_shown(page, results[1])
    for where in ("0 embed gradient", r"\d+ head activation", r"\d+ hidden gradient", r"\d+ loss"):
        for text in (parted[1], blocks(page, "text")[2]):
            assert any(re.match(where, line) for line in lines(text)), "later steps and digits may vary"
    rows = [
        [line for line in lines(text) if re.match(r"\w+ (activation|gradient) [\d.]+ ", line)]
        for text in (losses[1], blocks(page, "text")[3])
    ]
    assert rows[0][0].startswith("embed activation 98.4")
    assert [line.split()[:2] for line in rows[0]] == [line.split()[:2] for line in rows[1]], "digits may vary"
    assert fixed[1].startswith("B has no finding that A has not.")
    assert "Nowhere beyond the noise floor for as long." in fixed[1]
    assert "Below 0.25 % of FP8 against BF16" in fixed[1]


def test_a_layer_in_high_precision(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/high-precision.md"
    models, script = blocks(page, "python")
    config, at_the_end = blocks(page, "yaml")
    Path("config.yaml").write_text(at_the_end)
    Path("my_models.py").write_text(models)
    (check,) = blocks(page, "bash")
    code, printed = command(check)
    assert code == 0
    is_shown(page, printed, 3)
    Path("config.yaml").write_text(config)
    code, printed = command(check)
    assert code == 0
    is_shown(page, printed)
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    is_shown(page, capsys.readouterr().out, 2)
    Path("config.yaml").write_text(config.replace("[head]", "[haed]"))
    code, printed = command(check)
    assert code == 1
    assert "".join(blocks(page, "text")[1].split()) in "".join(printed.split())


def test_fp8_is_not_faster() -> None:
    page = "docs/fp8-not-faster.md"
    [model] = blocks(page, "python", "# my_models.py")
    config, patch = blocks(page, "yaml")
    Path("my_models.py").write_text(model)
    Path("config.yaml").write_text(config)
    (check,) = blocks(page, "bash")
    code, printed = command(check)
    assert code == 0, printed
    for number in range(2):
        is_shown(page, printed, number)
    config_lines = [" ".join(line.split()) for line in patch.splitlines()[1:]]
    advised = [line for line in lines(printed.partition("keep router in BF16")[2]) if line]
    begin = advised.index(config_lines[0])
    assert advised[begin : begin + len(config_lines)] == config_lines
    Path("patch.yaml").write_text(patch)
    assert command(check.replace("config.yaml", "patch.yaml").partition(" --device")[0])[0] == 0


def test_a_job_that_is_preempted_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = blocks("docs/resuming.md", "python", "# train.py")
    preempted = script.replace("session.step()", "session.step(), session.iteration == 3 and signal.raise_signal(10)")
    for code, steps in ((preempted, 3), (script.replace("10_000", "6"), 6)):
        names: dict[str, Any] = {}
        exec(compile(code, "train.py", "exec"), names)
        assert names["session"].iteration == steps
        if steps == 3:
            assert capsys.readouterr().out == "3 None\n"
    (shown,) = blocks("docs/resuming.md", "text", "10000")
    expected = shown.replace("10000", "6").replace("4200", "3")
    without_names = [re.sub(r"run [\w-]+", "", text) for text in (expected, capsys.readouterr().out)]
    assert without_names[0] == without_names[1]
    run = open_run("run")
    assert [segment.status for segment in run.segments] == ["ended", "ended"]
    assert run.curves["loss"].iterations.tolist() == [0, 1, 2, 3, 4, 5]
