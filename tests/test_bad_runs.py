"""What the commands that read recorded runs say of runs that are none, or that are damaged: never a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from te_precision_callbacks.cli import main
from te_precision_callbacks.runs import RunWriter, writing
from tests.combinations import half
from tests.runs.making import write_run

COMMANDS = ("report", "show", "compare")
Make = Callable[[Path], object]


def rank_folder(log_dir: Path) -> Path:
    (found,) = log_dir.glob("precision_records/*/seg-000/rank-00000")
    return found


def part(log_dir: Path) -> Path:
    return rank_folder(log_dir) / "values-0001.parquet"


def call(
    command: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """The exit code of a command, and all that it says, in one line."""
    other = [str(path.parent / "good")] if command == "compare" else []
    monkeypatch.setattr(sys, "argv", ["te-precision", command, str(path), *other])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(path.parent)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, " ".join((said.out + said.err).split())


# ---------------------------------------------------------------------- no run, or none with numbers


def empty(path: Path) -> None:
    RunWriter.begin(path).close("ended")


def no_run(path: Path) -> None:
    path.mkdir()


def text(path: Path) -> None:
    path.write_text("loss 0.3\n")


def foreign_file(path: Path) -> None:
    pq.write_table(pa.table({"iteration": [1], "series": [2]}), path)


def folder_of_a_foreign_file(path: Path) -> None:
    path.mkdir()
    pq.write_table(pa.table({"iteration": [1]}), path / "values-0001.parquet")


def of_a_later_version(path: Path) -> None:
    write_run(path, range(3), schema=99)


def without_a_whole_part(path: Path) -> None:
    write_run(path, range(3))
    for each in rank_folder(path).glob("*.parquet"):
        each.write_bytes(each.read_bytes()[:50])


NO_NUMBERS = {
    "report": "nothing was recorded",
    "show": "nothing was recorded",
    "compare": "has no numbers yet",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no such file or folder"),
        (no_run, "no recorded run is in this folder"),
        (text, "this file is no recorded run"),
        (foreign_file, "this file is no recorded run"),
        (folder_of_a_foreign_file, "no recorded run is in this folder"),
        (of_a_later_version, "with schema 99 of the files; this version reads schema 2 only"),
        (empty, None),
        (without_a_whole_part, None),
    ],
)
def test_what_cannot_be_read_is_wrong_use(
    command: str,
    make: Make,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "good", range(6))
    make(tmp_path / "run")
    code, said = call(command, tmp_path / "run", monkeypatch, capsys)
    assert code == 2
    assert (says or NO_NUMBERS[command]) in said
    assert not (tmp_path / "report.html").exists()
    if make is without_a_whole_part:
        assert "cannot be read, and its rows are missing" in said, "why there are none"


# ---------------------------------------------------------------------- runs of which a part is left


def mixed_versions(path: Path) -> None:
    run_id = write_run(path, range(3), versions={"torch": "2.12"})
    write_run(path, range(3, 6), run_id=run_id, versions={"torch": "2.13"})


def damaged(path: Path) -> None:
    run_id = write_run(path, range(3))
    write_run(path, range(3, 6), run_id=run_id)
    part(path).write_bytes(part(path).read_bytes()[:100])


def foreign_part(path: Path) -> None:
    damaged(path)
    pq.write_table(pa.table({"a": [1]}), part(path))


def missing(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "CLOSE_BYTES", 1)
        write_run(path, range(6))
    (rank_folder(path) / "values-0002.parquet").unlink()


def ranks_missing(path: Path) -> None:
    write_run(path, range(6), world=4, writing_ranks=[0, 1, 2, 3])


def a_segment_missing(path: Path) -> None:
    run_id = write_run(path, range(2))
    for begin in (2, 4):
        write_run(path, range(begin, begin + 2), run_id=run_id)
    shutil.rmtree(path / "precision_records" / run_id / "seg-001")


def facts_damaged(path: Path) -> None:
    write_run(path, range(6))
    (layers,) = path.glob("precision_records/*/seg-000/layers.parquet")
    layers.write_bytes(b"PAR1")


def run_file_damaged(path: Path) -> None:
    write_run(path, range(6))
    (file,) = path.glob("precision_records/*/seg-000/run.json")
    file.write_text('{"versions": ')


def run_file_of_other_types(path: Path) -> None:
    write_run(path, range(6))
    (file,) = path.glob("precision_records/*/seg-000/run.json")
    odd = {"status": 3, "versions": "2", "started_at": 5, "world": "x", "environment": [], "recipes": 1}
    file.write_text(json.dumps({**json.loads(file.read_text()), **odd, "config_text": 7, "torch_settings": None}))


def events_damaged(path: Path) -> None:
    write_run(path, range(6))
    (rank_folder(path) / "events.jsonl").write_bytes(b'\xff\xfe\n{"kind": "nonfinite"}\n[1]\n')


STILL_READ: dict[Make, str] = {
    mixed_versions: "The segments ran with several versions of torch: 2.12, 2.13.",
    damaged: "values-0001.parquet cannot be read, and its rows are missing",
    foreign_part: "values-0001.parquet cannot be read, and its rows are missing",
    missing: "files of values are missing: 2.",
    ranks_missing: "lacks the files of 3 of 4 ranks: 1, 2, 3.",
    a_segment_missing: "Segments are missing: 1.",
    facts_damaged: "layers.parquet cannot be read",
    run_file_damaged: "run.json is damaged",
    events_damaged: "3 of 3 lines cannot be read",
    run_file_of_other_types: "",
}
"""What is damaged -> what is said of it."""


@pytest.mark.parametrize(("make", "command"), half(STILL_READ, COMMANDS))
def test_what_can_still_be_read_is_shown_with_a_note(
    make: Make, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", range(6))
    make(tmp_path / "run")
    code, said = call(command, tmp_path / "run", monkeypatch, capsys)
    assert code in ((0, 1) if command == "compare" else (0,)), said
    assert STILL_READ[make] in said
    assert command != "report" or (tmp_path / "report.html").stat().st_size > 1_000_000


def test_runs_that_share_no_layer_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", range(6))
    with RunWriter.begin(tmp_path / "run") as run:
        run.add_step(0)
        run.add_values(0, np.array([run.series("head", "activation", "amax")], np.int32), np.ones(1))
    code, said = call("compare", tmp_path / "run", monkeypatch, capsys)
    assert code == 2
    assert "share no layer" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_path_is_called_does_no_harm(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call(command, tmp_path / "no\x1b[31mrun", monkeypatch, capsys)
    assert code == 2
    assert "no\\x1b[31mrun: there is no such file or folder" in said
