"""``diagnose`` of a folder with several runs, and the commands that a summary prints."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.base.terminal import shell_command
from te_precision_callbacks.runs import list_runs
from te_precision_callbacks.runs.run_files import RUN_FILE
from te_precision_callbacks.session import InspectSession
from tests import training


def train(folder: Path, *, fails: bool = False, quiet: bool = True) -> None:
    torch.manual_seed(0)
    net = te.Linear(32, 32)
    session = InspectSession(model=net, log_dir=folder, quiet=quiet).start()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    training.train(session, net, 11, optimizer, around=lambda _: te.autocast(), logs=True)
    session.stop(ValueError("bad batch") if fails else None)


def diagnose(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["diagnose", *map(str, arguments)])


def of_another_launch(folder: Path, run: str) -> None:
    (path,) = (folder / "precision_records" / run).glob(f"seg-*/{RUN_FILE}")
    path.write_text(json.dumps({**json.loads(path.read_text()), "launch": run}))


def test_the_runs_of_a_launch_are_checked_together(tmp_path: Path) -> None:
    for fails in (True, False, True, False):
        train(tmp_path, fails=fails)
    runs = list_runs(tmp_path)
    result = diagnose(tmp_path)
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert text.count("Problems found") == text.count("No problems found") == 2
    assert all(f"{run}: " in text for run in runs)
    seen = json.loads(diagnose(tmp_path, "--json").stdout)
    assert [run["run"] for run in seen["runs"]] == list(runs)
    assert [run["healthy"] for run in seen["runs"]] == [False, True, False, True]
    assert (seen["state"], seen["severity"], seen["healthy"]) == ("problems found", "error", False)
    assert diagnose(tmp_path, "--run", runs[1]).exit_code == 0
    assert diagnose(tmp_path / "precision_records" / runs[3]).exit_code == 0


def test_runs_of_earlier_launches_are_checked_with_all(tmp_path: Path) -> None:
    for fails in (True, False, False):
        train(tmp_path, fails=fails)
    first, second, third = list_runs(tmp_path)
    of_another_launch(tmp_path, first)
    result = diagnose(tmp_path)
    assert result.exit_code == 0
    assert "2 runs of the last launch; it has 3 runs" in " ".join(result.stdout.split())
    assert diagnose(tmp_path, "--all").exit_code == 1
    of_another_launch(tmp_path, second)
    result = diagnose(tmp_path)
    assert result.exit_code == 0
    assert f"The latest is read: {third}" in " ".join(result.stdout.split())
    assert isinstance(diagnose(tmp_path, "--all", "--run", first).exception, cli.PrecisionDebugError)


@pytest.mark.parametrize("name", ["run", "it's a run", "a/../run", "line\nbreak", "\x1b[31mred", "e\udcff"])
def test_the_command_of_a_summary_opens_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("TE_PRECISION_QUIET", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    train(Path(name), fails=True, quiet=False)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  what to do: ")]
    command = line.removeprefix("  what to do: te-precision diagnose ")
    pasted = subprocess.run(["bash", "-c", f"cd {command} && pwd -P"], capture_output=True, check=True)
    (run,) = list_runs(Path(name))
    assert pasted.stdout == f"{tmp_path / name / 'precision_records' / run}\n".replace("/a/..", "").encode(
        errors="surrogateescape"
    )


def test_words_of_a_command_are_quoted() -> None:
    words = ["plain", "two words", "it's", "$HOME", "back\\slash\n'", "tab\t"]
    command = shell_command("printf", "%s\\0", *words)
    assert subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout == (
        "".join(f"{word}\0" for word in words).encode()
    )
