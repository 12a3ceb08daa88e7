"""Statistics are no longer recorded where a run reaches its limit; all else is, and the run says so."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from te_precision_callbacks.cli import app
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.run_files import Place, make_segment
from te_precision_callbacks.runs.sink import End, RecordSink, StepJob
from te_precision_callbacks.sinks.step_records import Event, Scalars
from te_precision_callbacks.statistics.series import SeriesTable
from tests.runs.making import info, records

RUN = "20261122-130144-507-9f3c21"
LIMIT = 100_000


def begin(folder: Path, *, start: int = 0) -> RecordSink:
    sink = RecordSink(folder, LIMIT)
    sink.place = Place(RUN, make_segment(folder / "precision_records" / RUN))
    sink._info = info(folder, start=start)
    return sink


def record(recording: RecordSink, iterations: range) -> None:
    table = SeriesTable()
    chance = np.random.default_rng(0)
    for iteration in iterations:
        recording.take(StepJob(records(iteration, table, list(chance.random(500))), 1.0))
        recording.take(Scalars(iteration, iteration, {"loss": 1 / (1 + iteration)}))
        recording.flush()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("rank-*/*"))


def test_at_the_limit_all_but_statistics_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = begin(tmp_path)
    record(recording, range(100))
    recording.take(Event("finding", "late", 99, "warning"))
    recording.take(End(None))
    assert LIMIT < size(tmp_path) < 1.5 * LIMIT
    run = open_run(tmp_path)
    assert run.steps["iteration"].to_pylist() == list(range(100))
    assert len(run.scalars) == 100
    recorded = np.unique(run.values()["iteration"].to_numpy())
    assert recorded.tolist() == list(range(len(recorded)))
    assert 5 < len(recorded) < 50
    assert caplog.text.count("Statistics are no longer recorded") == 1
    [event] = [row for row in run.events.to_pylist() if row["kind"] == "records_limited"]
    assert event["iteration"] == recorded[-1]
    assert "late" in run.events["text"].to_pylist()


def test_a_resumed_run_shares_the_limit(tmp_path: Path) -> None:
    first = begin(tmp_path)
    record(first, range(5))
    first.take(End(None))
    resumed = begin(tmp_path, start=5)
    record(resumed, range(5, 100))
    resumed.take(End(None))
    assert size(tmp_path) < 1.5 * LIMIT
    run = open_run(tmp_path)
    assert [segment.number for segment in run.segments] == [0, 1]
    assert 5 < len(np.unique(run.values()["iteration"].to_numpy())) < 50


def test_a_diagnosis_says_since_when_no_statistics_are_recorded(tmp_path: Path) -> None:
    recording = begin(tmp_path)
    record(recording, range(100))
    recording.take(End(None))
    output = CliRunner().invoke(app, ["diagnose", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert "have reached their limit of 100,000 bytes" in output
    assert "No problems found" not in output.splitlines()[0]
