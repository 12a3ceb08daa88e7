"""Wrong use of commands with --json: the error is on stderr, and stdout is empty."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from te_precision_callbacks.cli import app, main


def printing_json(command: Any, *names: str) -> Iterator[list[str]]:
    """The command, or those below it, that take ``--json``, each with an argument that does not exist."""
    for name, below in getattr(command, "commands", {}).items():
        yield from printing_json(below, *names, name)
    if any("--json" in parameter.opts for parameter in command.params):
        takes = sum(parameter.param_type_name == "argument" for parameter in command.params)
        yield [*names, *["no such thing"] * max(1, takes), "--json"]


COMMANDS = list(printing_json(typer.main.get_command(app)))


def test_the_commands_are_found() -> None:
    assert {words[0] for words in COMMANDS} >= {"check", "diagnose", "doctor", "dumps", "rules", "speed", "statistics"}


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
