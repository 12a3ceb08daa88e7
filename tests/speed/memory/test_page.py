"""The memory section of docs/speed.md: its code and its command as they stand there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from tests.capability import any_capability, stand_for
from tests.docs.pages import blocks

PAGE = "docs/speed.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (models,), (use,) = (
        blocks(PAGE, "python", "# llama.py"),
        blocks(PAGE, "python", "from te_precision_callbacks.check"),
    )
    (command,), (drawn,) = blocks(PAGE, "bash", "te-precision check"), blocks(PAGE, "text", "  ")
    (tmp_path / "config.yaml").write_text("nothing: {enabled: False}\n")
    (tmp_path / "llama.py").write_text(models)
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    assert program == "te-precision"
    with any_capability():
        stand_for((9, 0))
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        output = [line.split() for line in done.output.splitlines()]
        for line in drawn.splitlines():
            assert line.split() in output, line
        del sys.modules["llama"]

        names: dict[str, Any] = {}
        exec(compile(models, "llama", "exec"), names)
        names["model"] = names["build"]()
        exec(compile(use, "use", "exec"), names)
    assert "all on the device" in capsys.readouterr().out
