"""Damaged recordings: each part of one is read, or left out with a note, and no reader takes much memory."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given

from te_precision_callbacks.runs import RunError, RunWriter, UnknownSubjectError, open_run
from tests.properties import examples, randoms
from tests.runs import corpus
from tests.runs.making import write_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    corpus.record(folder)
    return folder


def read_all(log_dir: Path) -> list[str]:
    """Read all that a run has, and return its notes."""
    run = open_run(log_dir)
    run.values()
    run.vectors()
    with contextlib.suppress(UnknownSubjectError):
        run.grid("cur_amax", "activation")
    run.ordered_layers, run.events.to_pylist(), run.steps.to_pylist(), run.gemms.to_pylist()
    return list(run.notes)


def test_what_is_damaged_is_left_out_with_a_note(whole: Path, tmp_path: Path) -> None:
    """All damages of the corpus, of a run that has ended, and of one whose process was killed."""
    assert not read_all(whole / "closed")
    noted = {}
    for base, damages in (("closed", corpus.CLOSED), ("running", corpus.RUNNING)):
        for name, damage in damages.items():
            copy = corpus.damaged(whole / base, name, damage, tmp_path)
            try:
                noted[name] = read_all(copy)
            except Exception as error:
                error.add_note(f"{base}: {name}")
                raise
            shutil.rmtree(copy)
    for name in ("run.json deep", "run.json cut", "a pipe run.json"):
        assert any("run.json is damaged" in note for note in noted[name]), name
    for name in ("events cut", "events kind null", "events wall_time -1", f"steps iteration {2**62}",
                 "values iteration -1", f"values series {2**62}", "scalars name null"):  # fmt: skip
        assert any("damaged" in note or "cannot be read" in note for note in noted[name]), name
    for name in ("events layer null", "run.json half a pair", "steps wall_time null"):
        assert not noted[name], "it can be read"


@pytest.fixture(scope="module")
def files(whole: Path) -> list[tuple[Path, Path]]:
    """The files of the run in both forms, each with the log folder that it is in."""
    found = []
    for base in (whole / "closed", whole / "running"):
        found += [(base, path) for path in sorted(base.glob("precision_records/**/*")) if path.is_file()]
    return found


@given(draw=randoms())
@examples(20, shrink=False)
def test_any_bytes_may_be_damaged(
    draw: random.Random, files: list[tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base, path = draw.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        at = draw.randrange(len(data) or 1)
        match draw.choice(["bit", "byte", "cut", "twice", "gone", "zeros"]):
            case "bit" if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case "byte" if data:
                data[at % len(data)] = draw.randrange(256)
            case "cut":
                del data[at:]
            case "twice":
                data[at:at] = data[at : at + draw.randrange(1, 64)]
            case "gone":
                del data[at : at + draw.randrange(1, 64)]
            case _:
                data[at : at + 16] = bytes(16)
    copy = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(base, copy)
    (copy / path.relative_to(base)).write_bytes(data)
    try:
        read_all(copy)
    except RunError as error:
        if "reads schema" not in str(error):  # the number of another version
            raise
    shutil.rmtree(copy)


def test_what_turns_out_to_be_damaged_when_it_is_read_is_left_out_with_a_note(whole: Path, tmp_path: Path) -> None:
    """As a page of the one column that opening a run does not read."""
    shutil.copytree(whole / "closed", tmp_path / "run")
    path = corpus.file_of(tmp_path / "run", "values")
    corpus.damage_page(path, "segment")
    run = open_run(tmp_path / "run")
    assert run.notes == run.unread == ()
    assert len(run.values()) == 0
    assert len(run.vectors()) > 0
    (note,) = run.notes
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert run.unread == run.notes


def test_values_are_there_without_the_files_of_steps(tmp_path: Path) -> None:
    write_run(tmp_path, range(4))
    for name in ("steps", "scalars"):
        corpus.file_of(tmp_path, name).unlink()
    assert open_run(tmp_path).grid("amax", "activation").iterations.tolist() == [0, 1, 2, 3]


def test_an_open_file_that_was_cut_while_it_was_written_is_not_closed(tmp_path: Path) -> None:
    writer = RunWriter.begin(tmp_path)
    writer.add_step(0)
    writer.flush()
    os.truncate(corpus.file_of(tmp_path, "steps"), 100)
    with pytest.raises(OSError, match=r"steps-0001.arrow was changed while it was written: it has 100 of [\d,]+"):
        writer.close()
    assert any("not recorded to its end" in note for note in open_run(tmp_path).notes)
