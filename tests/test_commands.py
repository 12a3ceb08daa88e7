"""Commands: their outputs equal the files in tests/golden/; wrong use with --json has its error on stderr alone."""

import difflib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

from te_precision_callbacks.cli import app, main
from tests.golden.outputs import golden, outputs
from tools.tour import alike


def printing_json(command: Any, *names: str) -> Iterator[list[str]]:
    """The command, or those below it, that take ``--json``, each with an argument that does not exist."""
    for name, below in getattr(command, "commands", {}).items():
        yield from printing_json(below, *names, name)
    if any("--json" in parameter.opts for parameter in command.params):
        takes = sum(parameter.param_type_name == "argument" for parameter in command.params)
        yield [*names, *["no such thing"] * max(1, takes), "--json"]


COMMANDS = list(printing_json(typer.main.get_command(app)))


def test_the_commands_are_found() -> None:
    assert {words[0] for words in COMMANDS} >= {"check", "diagnose", "doctor", "dumps", "rules", "statistics"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_wrong_use_prints_no_json_and_ends_with_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["te-precision", *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert "no such thing" in printed.err or "Got unexpected extra argument" in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are of a machine without a GPU")
@pytest.mark.slow
@pytest.mark.processes
def test_each_output_is_as_it_was(tmp_path: Path) -> None:
    """But for decimal numbers that differ by at most a twentieth."""
    made, kept = outputs(tmp_path), golden()
    assert made.keys() == kept.keys()
    differences = [
        line
        for name in made
        if not alike(kept[name], made[name])
        for line in difflib.ndiff(kept[name].splitlines(), made[name].splitlines())
        if not line.startswith("  ")
    ]
    assert not differences, "\n".join([*differences, "", "if this is meant: python -m tests.golden"])


def test_a_reader_that_closes_the_pipe_is_not_told_of_a_finding() -> None:
    """As in ``te-precision diagnose RUN | head``: exit code 1 would mean that a problem was found."""
    command = [sys.executable, "-m", "te_precision_callbacks", "rules"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == -signal.SIGPIPE
