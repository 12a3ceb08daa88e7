"""Recordings with files that a kill, a full disk or a bad sector has damaged: what is left is read, with a note."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from te_precision_callbacks.runs import RecordedRun, open_run
from tests.runs.making import RunWriter, write_run

STEPS = 12


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    write_run(tmp_path, range(STEPS))
    return tmp_path


def file_of(log_dir: Path, name: str) -> Path:
    (path,) = log_dir.glob(f"precision_records/*/seg-000/**/{name}*")
    return path


def read_all(log_dir: Path) -> RecordedRun:
    run = open_run(log_dir)
    run.values(), run.vectors(), run.ordered_layers, run.events.to_pylist(), run.steps.to_pylist()
    return run


def damage_page(path: Path, name: str) -> None:
    """Damage the first page of a column of a closed file."""
    with pq.ParquetFile(path) as file:
        column = file.metadata.row_group(0).column(file.schema_arrow.get_field_index(name))
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(data)


@pytest.mark.parametrize("change", [lambda data: data[:20], lambda data: b"", lambda data: b"[1]"])
def test_a_run_without_readable_facts_is_read_with_a_note(recorded: Path, change: Callable[[bytes], bytes]) -> None:
    path = file_of(recorded, "run.json")
    path.write_bytes(change(path.read_bytes()))
    run = read_all(recorded)
    assert any(f"{path} is damaged" in note for note in run.unread)
    assert len(run.values()) == 2 * STEPS


@pytest.mark.parametrize("name", ["steps", "scalars", "layers"])
def test_a_closed_file_that_is_cut_is_left_out_with_a_note(recorded: Path, name: str) -> None:
    path = file_of(recorded, name)
    os.truncate(path, path.stat().st_size - 20)
    run = read_all(recorded)
    (note,) = run.unread
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert len(run.values()) == 2 * STEPS


def test_what_turns_out_to_be_damaged_when_it_is_read_is_left_out_with_a_note(recorded: Path) -> None:
    """As a page of the one column that opening a run does not read."""
    path = file_of(recorded, "values")
    damage_page(path, "segment")
    run = open_run(recorded)
    assert run.notes == run.unread == ()
    assert len(run.values()) == 0
    (note,) = run.notes
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert run.unread == run.notes


def test_values_are_there_without_the_files_of_steps(recorded: Path) -> None:
    for name in ("steps", "scalars"):
        file_of(recorded, name).unlink()
    assert open_run(recorded).grid("amax", "activation").iterations.tolist() == list(range(STEPS))


def test_an_open_file_that_was_cut_while_it_was_written_is_not_closed(tmp_path: Path) -> None:
    writer = RunWriter.begin(tmp_path)
    writer.add_step(0)
    writer.flush()
    os.truncate(file_of(tmp_path, "steps"), 100)
    with pytest.raises(OSError, match=r"steps-0001.arrow was changed while it was written: it has 100 of [\d,]+"):
        writer.close()
    assert any("not recorded to its end" in note for note in open_run(tmp_path).notes)
