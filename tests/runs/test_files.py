"""Content of a run's files, whatever happens to the process, the disk or the files."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.options import record_limit
from te_precision_callbacks.runs import (
    NotARunError,
    RecordedRun,
    RunError,
    open_run,
    writing,
)
from te_precision_callbacks.runs.run_files import DEFAULT_LIMIT, Place, new_run_id
from te_precision_callbacks.runs.sink import RecordingError, RecordSink
from te_precision_callbacks.runs.tables import LOCAL, STEP0
from te_precision_callbacks.sinks import writer_thread
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.series import SeriesTable
from tests.forked import REPOSITORY, executable
from tests.full_disk import files_up_to
from tests.runs.making import RunWriter, info, records, write_run
from tests.training import wait_until


def rank_folder(folder: Path, segment: int = 0) -> Path:
    (result,) = folder.glob(f"precision_records/*/seg-{segment:03d}/rank-00000")
    return result


# ---------------------------------------------------------------------- reading the written files


def test_a_run_reads_as_it_was_written(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, range(5), integration="mine", world=1)
    run = open_run(tmp_path)
    assert (run.run_id, run.source, run.notes) == (run_id, "te-precision-callbacks", ())
    (segment,) = run.segments
    assert (segment.status, segment.first_iteration, segment.facts["integration"]) == ("ended", 0, "mine")
    grid = run.grid("amax", "activation")
    assert grid.layers == ["net.1", "net.0"], "in the order of execution"
    assert grid.values.tolist() == [[1, 11, 21, 31, 41], [0, 10, 20, 30, 40]]
    assert run.scalars["value"].to_pylist() == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert grid.iterations.tolist() == run.steps["iteration"].to_pylist() == list(range(5))
    assert run.select(layer="net.1") == [1]
    row = run.series.to_pylist()[1]
    assert (row["count"], row["first"], row["last"]) == (5, 0, 4)


def write_steps(run: RunWriter, iterations: range, layers: int = 1) -> None:
    series = np.array([run.series(f"layer{n}", "weight", "amax") for n in range(layers)], np.int32)
    for iteration in iterations:
        run.add_step(iteration)
        run.add_values(iteration, series, iteration + np.arange(layers, dtype=float))
        run.flush()


def test_closed_files_are_sorted_and_an_open_one_is_read_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "CLOSE_BYTES", 3000)
    run = RunWriter.begin(tmp_path)
    write_steps(run, range(40), layers=3)
    parts = sorted(path.name for path in rank_folder(tmp_path).glob("values*"))
    assert len(parts) > 3
    assert [name for name in parts if name.endswith(".arrow")] in ([], parts[-1:]), (
        "one open file at most, the last one"
    )
    for part in rank_folder(tmp_path).glob("values*.parquet"):
        table = pq.read_table(part).select(["series", "iteration"])
        assert table == table.sort_by([("series", "ascending"), ("iteration", "ascending")])
    read = open_run(tmp_path)
    assert read.segments[0].status == "running"
    assert len(read.values()) == 120
    assert read.values([1])["value"].to_pylist() == [1.0 + iteration for iteration in range(40)]
    run.close()


def test_histograms_are_sparse_and_scopes_and_ranks_are_kept(tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path) as run:
        run.add_step(0)
        run.add_vector(0, run.series("fc", "weight", "exponent_histogram", scope="pp1", rank=3), [0.0, 2.0, 0.0, 5.0])
    read = open_run(tmp_path)
    assert read.vectors().to_pylist() == [
        {"segment": 0, "iteration": 0, "series": 0, "bin": [1, 3], "count": [2.0, 5.0]}
    ]
    assert read.select(rank=3, scope="pp1") == [0]
    assert read.select(rank=None) == []


# ---------------------------------------------------------------------- segments


def test_a_run_that_is_resumed_three_times_reads_as_one(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, range(10))
    for segment, first in ((1, 5), (2, 8), (3, 8)):
        assert write_run(tmp_path, range(first, first + 4), run_id=run_id, scale=10.0**segment) == run_id
    run = open_run(tmp_path)
    assert [segment.number for segment in run.segments] == [0, 1, 2, 3]
    assert run.steps["iteration"].to_pylist() == run.scalars["iteration"].to_pylist() == list(range(12))
    first = run.values(run.select(layer="net.0"))
    assert first["segment"].to_pylist() == [0] * 5 + [1] * 3 + [3] * 4
    assert first["value"].to_pylist() == [*(10.0 * i for i in range(5)), *(100.0 * i for i in range(5, 8)),
                                          *(10_000.0 * i for i in range(8, 12))]  # fmt: skip
    assert run.series["count"].to_pylist() == [12, 12]
    spans = [(row["since"], row["until"]) for row in run.layers.to_pylist() if row["layer"] == "net.0"]
    assert spans == [(0, 4), (5, 7), (8, None)], "segment 2 holds for no iteration"


def test_a_resumed_run_replaces_what_was_recorded_from_its_first_step_on(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, range(10))
    write_run(tmp_path, range(5, 7), run_id=run_id, scale=10.0)
    RunWriter.begin(tmp_path, run_id=run_id, first_iteration=3).close()  # it has failed before its first step
    run = open_run(tmp_path)
    assert run.grid("amax", "activation").values[1].tolist() == [0, 10, 20, 30, 40, 500, 600]
    assert run.steps["iteration"].to_pylist() == run.scalars["iteration"].to_pylist() == list(range(7))


# ---------------------------------------------------------------------- folders without a run, or with a part of one


NO_RUNS = [
    (lambda path: None, "there is no such file or folder"),
    (Path.mkdir, "no recorded run in this folder"),
    (lambda path: (path / "precision_records").mkdir(parents=True), "no recorded run in this folder"),
    (lambda path: (path / "nvdlfw_inspect_statistics_logs").mkdir(parents=True), "no recorded run in this"),
    (lambda path: path.write_text("x"), "this file is not a recorded run"),
]


def test_a_path_that_is_no_run(tmp_path: Path) -> None:
    for number, (make, said) in enumerate(NO_RUNS):
        make(tmp_path / str(number))
        with pytest.raises(NotARunError, match=said):
            open_run(tmp_path / str(number))


def test_a_run_in_which_nothing_has_happened_yet(tmp_path: Path) -> None:
    RunWriter.begin(tmp_path)
    run = open_run(tmp_path)
    assert len(run.values()) == len(run.series) == len(run.steps) == len(run.layers) == 0
    assert run.segments[0].status == "running"
    assert run.grid("amax", "activation").values.shape == (0, 0)


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, range(2), schema=1, versions={"te-precision-callbacks": "0.0.7"})
    said = r"recorded by te-precision-callbacks 0\.0\.7, with schema 1; this version reads only schema 4"
    with pytest.raises(RunError, match=said):
        open_run(tmp_path)


def test_missing_ranks_segments_and_run_files_are_noted(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, range(2), world=3, writing_ranks=[0, 1, 2])
    write_run(tmp_path, range(2, 3), run_id=run_id)
    write_run(tmp_path, range(3, 4), run_id=run_id)
    folder = tmp_path / "precision_records" / run_id
    shutil.rmtree(folder / "seg-001")
    (folder / "seg-002" / "run.json").write_text('{"schema"')
    notes = open_run(tmp_path).notes
    assert any("run.json is damaged" in note for note in notes)
    assert "Segments are missing: 1." in notes
    assert "Segment 0 lacks the files of 2 of 3 ranks: 1, 2." in notes
    (folder / "seg-002" / "run.json").unlink()
    assert any("run.json is missing" in note for note in open_run(tmp_path).notes)


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_file_of_an_ended_run_is_noted(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CLOSE_BYTES", 1)
    run = RunWriter.begin(tmp_path)
    for iteration in range(2):
        write_steps(run, range(iteration, iteration + 1))
        run.flush()
    run.close()
    assert open_run(tmp_path).notes == ()
    (rank_folder(tmp_path) / f"values-000{number}.parquet").unlink()
    assert open_run(tmp_path).notes == (f"{rank_folder(tmp_path)}: files of values are missing: {number}.",)
    with pytest.raises(RunError, match=f"files of values are missing: {number}"):
        open_run(tmp_path).require_undamaged()


def test_missing_facts_of_an_ended_run_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    path = rank_folder(tmp_path).parent / "layers.parquet"
    path.unlink()
    assert open_run(tmp_path).notes == (f"{path} is missing.",)


def test_a_rank_that_was_killed_after_the_end_of_rank_0(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, range(2), world=3, writing_ranks=[0, 1, 2])
    run_file = tmp_path / "precision_records" / run_id / "seg-000" / "run.json"
    other = RunWriter(run_file.parent.parent, 0, 2)
    write_steps(other, range(2))
    assert open_run(tmp_path).segments[0].status == "ended", "another rank may be closing its files"
    run_file.write_text(run_file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    segment = open_run(tmp_path).segments[0]
    assert (segment.status, segment.who_stopped) == ("stopped without an end", "rank 2")
    other.close()
    assert open_run(tmp_path).segments[0].status == "ended"


def test_events_are_read_in_order(tmp_path: Path) -> None:
    run = RecordSink(tmp_path)
    run.place = Place(new_run_id(), 0)
    run._info = info(tmp_path)
    run.take(Event("finding", "second \ud800", 2, wall_time=3.0))
    run.flush()
    run.take(Event("dump_written", "first", 1, layer="fc", data={"a": 1}, wall_time=4.0))
    run.take(Event("finding", "third", 2, wall_time=5.0))
    run.flush()
    events = open_run(tmp_path).events.to_pylist()
    assert [(event["kind"], event["text"], event["layer"]) for event in events] == [
        ("dump_written", "first", "fc"),
        ("finding", "second \\ud800", None),
        ("finding", "third", None),
    ]
    assert (json.loads(events[0]["data"]), events[1]["wall_time"].timestamp()) == ({"a": 1}, 3.0)


# ---------------------------------------------------------------------- processes


@pytest.mark.processes
@pytest.mark.extended
def test_a_killed_process_leaves_a_run_that_has_lost_little(tmp_path: Path) -> None:
    chance, lost = random.Random(0), []
    for number in range(5):
        folder = tmp_path / str(number)
        command = [executable(whole=True), "-m", "tests.runs.making", str(folder)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        wait_until(lambda folder=folder: any(folder.rglob("steps-*")))
        time.sleep(chance.uniform(0.1, 0.4))
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        handed_over = [line.split() for line in process.communicate()[0].split("\n")[:-1]]
        run = open_run(folder)
        assert run.notes == ()
        assert run.segments[0].status in ("stopped without an end", "running")
        iterations = run.steps["iteration"].to_pylist()
        assert iterations == list(range(len(iterations)))
        values = run.grid("amax", "weight")
        assert values.iterations.tolist() == iterations[: len(values.iterations)]
        assert len(iterations) - len(values.iterations) <= 1000  # those between the flush of steps and of values
        assert np.all(values.values == values.iterations)
        lost += [killed - float(moment) for iteration, moment in handed_over if int(iteration) >= len(iterations)]
    assert max(lost, default=0.0) < 1.0, "the sink writes every 50 ms here, every 2 s otherwise"


def test_a_run_is_read_while_it_is_written_and_a_file_is_closed(tmp_path: Path) -> None:
    run = RunWriter.begin(tmp_path)
    write_steps(run, range(3))
    read = open_run(tmp_path)
    write_steps(run, range(3, 4))
    run.close()
    assert read.values()["value"].to_pylist() == [0.0, 1.0, 2.0], "what was there when it was opened, from the new file"
    assert open_run(tmp_path).values()["value"].to_pylist() == [0.0, 1.0, 2.0, 3.0]


def test_an_open_file_that_ends_anywhere(tmp_path: Path) -> None:
    """It is read to its last whole batch, wherever a killed process has left it."""
    run = RunWriter.begin(tmp_path)
    ends = []
    tail = rank_folder(tmp_path) / "values-0001.arrow"
    for iteration in range(3):
        write_steps(run, range(iteration, iteration + 1))
        ends.append(tail.stat().st_size)
    whole = tail.read_bytes()
    for size in range(0, len(whole) + 1, 61):
        tail.write_bytes(whole[:size])
        read = open_run(tmp_path)
        assert read.notes == ()
        assert read.values()["value"].to_pylist() == [float(n) for n, end in enumerate(ends) if end <= size]


def test_a_run_is_running_while_its_process_lives_however_silent_it_is(tmp_path: Path) -> None:
    writer = RunWriter.begin(tmp_path)
    for path in (writer.folder / "run.json", writer.folder):
        os.utime(path, (0, 0))
    assert open_run(tmp_path).segments[0].status == "running"
    writer.put_run(pid=2**22 + 1)
    assert open_run(tmp_path).segments[0].status == "stopped without an end"


# ---------------------------------------------------------------------- the sink


@pytest.mark.processes
def test_recording_imports_pandas_at_its_start_and_reading_no_torch(tmp_path: Path) -> None:
    """pyarrow.array imports pandas where it is installed: not in the middle of a training."""
    code = f"""
import sys
from pathlib import Path
from te_precision_callbacks.runs.run_files import time_text
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.sinks.step_records import Scalars
from te_precision_callbacks.statistics.series import SeriesTable
from tests.runs.making import info, records

folder = Path({str(tmp_path)!r})
sink = RecordSink(folder)
sink.start(info(folder))
at_start = set(sys.modules)
sink.write(records(0, SeriesTable(), [1.0]))
sink.scalars(Scalars(0, 0, {{"loss": 1.0}}))
sink.close(None)
assert "pandas" not in sys.modules.keys() - at_start

import te_precision_callbacks.views.report.page, te_precision_callbacks.views.show.view
from te_precision_callbacks.runs import open_run

assert len(open_run(folder).values()) == 1
heavy = ("torch", "transformer_engine", "nvdlfw_inspect")
assert not [name for name in sys.modules if name.partition(".")[0] in heavy]
print(time_text(sink._made_at), end="")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    segment = open_run(tmp_path).segments[0]
    assert segment.status == "ended"
    assert segment.started_at == done.stdout, "when the session began, not when the thread could write"


def test_a_full_disk_ends_the_recording_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    table, sink = SeriesTable(), RecordSink(tmp_path)
    sink.start(info(tmp_path))
    sink.write(records(0, table, [1.0] * 100))
    wait_until(lambda: any(tmp_path.rglob("values-*")))
    with files_up_to(60_000):
        with pytest.raises(RecordingError, match=r"cannot be written.*what was recorded remains readable") as failed:
            for iteration in range(1, 2000):
                sink.write(records(iteration, table, [1.0] * 100))
                time.sleep(0.001)
        sink.close(failed.value)
    run = open_run(tmp_path)
    (note,) = run.notes
    assert "The end of segment 0 is not recorded: [Errno 27] File too large" in note
    assert len(run.values()) >= 100
    facts = json.loads((rank_folder(tmp_path).parent / "run.json").read_text())
    assert run.segments[0].status == facts["status"] == "running", "training goes on"


def test_how_a_run_has_ended_is_said_on_a_full_disk_too(tmp_path: Path) -> None:
    """A folder where a new file would be: no room for one."""
    writer = RunWriter.begin(tmp_path)
    writer.add_step(0)
    (writer.folder / f".run.json.{os.getpid()}.incomplete").mkdir()
    with pytest.raises(IsADirectoryError):
        writer.close("ended")
    run = open_run(tmp_path)
    (segment,) = run.segments
    assert (segment.status, bool(segment.ended_at), len(run.steps)) == ("ended", True, 1)
    (note,) = run.notes
    assert "The end of segment 0 is not recorded: [Errno 21] Is a directory" in note


def test_a_loop_that_goes_back_begins_a_segment(tmp_path: Path) -> None:
    with sink_in(tmp_path) as write:
        for iteration, value in ((0, 1.0), (1, 2.0), (2, 3.0), (1, 20.0), (2, 30.0)):
            write(iteration, [value])
    run = open_run(tmp_path)
    assert [segment.first_iteration for segment in run.segments] == [0, 1]
    assert run.values()["value"].to_pylist() == [1.0, 20.0, 30.0]


@contextlib.contextmanager
def sink_in(folder: Path, error: BaseException | None = None) -> Iterator[Callable[..., None]]:
    table, sink = SeriesTable(), RecordSink(folder)
    sink.start(info(folder))
    yield lambda iteration, values, **keywords: sink.write(records(iteration, table, values, **keywords))
    sink.close(error)


def test_what_is_written_again_after_an_interruption_is_there_once(tmp_path: Path) -> None:
    table, sink = SeriesTable(), RecordSink(tmp_path)
    sink.start(info(tmp_path))
    step = records(0, table, [1.0])
    for _ in range(2):
        sink.write(step)
    for _ in range(2):
        sink.close(None)
    assert len(open_run(tmp_path).values()) == 1


def test_local_and_unscaled_values_are_flagged(tmp_path: Path) -> None:
    with sink_in(tmp_path, ValueError("bad batch")) as write:
        write(0, [1.0, 2.0], unscaled=frozenset({"layer1"}))
        write(1, [1.0, 2.0], local=True)
    run = open_run(tmp_path)
    assert run.values()["flags"].to_pylist() == [0, LOCAL, STEP0, LOCAL]
    assert run.segments[0].status == "failed"
    assert run.events["text"].to_pylist()[-1] == "ValueError: bad batch"


def test_other_ranks_write_only_what_is_theirs(tmp_path: Path) -> None:
    """Rank 1, which does not reduce with rank 0, waits for the segment that rank 0 begins."""
    table = SeriesTable()
    sinks = [RecordSink(tmp_path) for _ in range(2)]
    sinks[1].writes_reduced = False
    sinks[0].keys = sinks[1].keys = dist.HashStore()
    for rank, sink in enumerate(sinks):
        sink.start(info(tmp_path, rank=rank, world=2))
    for iteration in range(2):
        for rank, sink in enumerate(sinks):
            sink.write(records(iteration, table, [1.0, 5.0 + rank], own=[False, True]))
    for sink in sinks:
        sink.close(None)
    run = open_run(tmp_path)
    first = [run.values([number])["value"][0].as_py() for number in range(len(run.series))]
    assert {(row["layer"], row["rank"]): first[row["series"]] for row in run.series.to_pylist()} == {
        ("layer0", None): 1.0,
        ("layer1", 0): 5.0,
        ("layer1", 1): 6.0,
    }
    assert run.steps["iteration"].to_pylist() == [0, 1]
    assert run.grid("amax", "weight", rank=1).values.tolist() == [[6.0, 6.0]]


LIMITS = [
    ("on", DEFAULT_LIMIT),
    (True, DEFAULT_LIMIT),
    ("off", 0),
    (False, 0),
    ("64GiB", 64 << 30),
    ("1MiB", 1 << 20),
    ("2097152", 2 << 20),
    (2097152, 2 << 20),
]


def test_the_option() -> None:
    for given, limit in LIMITS:
        assert record_limit(given) == limit


def test_another_option() -> None:
    for given in ["maybe", 3.5, None, "0GB", 0, "10", 10, "64kB", "1023KiB"]:
        with pytest.raises(OptionError, match=rf"records= must be .* a size of at least 1MiB, .* not {given!r}\."):
            record_limit(given)


@pytest.mark.processes
@pytest.mark.extended
def test_a_run_in_another_pid_namespace_is_running(tmp_path: Path) -> None:
    """It has the host's name, and a process id that belongs to another process here."""
    code = """
import sys
from tests.runs.making import RunWriter
RunWriter.begin(sys.argv[1])
print("begun", flush=True)
sys.stdin.read()
"""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    process = subprocess.Popen([*command, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               cwd=REPOSITORY)  # fmt: skip
    try:
        if process.stdout.readline() != "begun\n":
            pytest.skip("this machine lets no user make a PID namespace")
        assert open_run(tmp_path).segments[0].status == "running"
    finally:
        process.stdin.close()
        process.wait()


STEPS = 12


def file_of(log_dir: Path, name: str) -> Path:
    (path,) = log_dir.glob(f"precision_records/*/seg-000/**/{name}*")
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def damaged(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + bytes(len(data) - len(data) // 3))


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def of_other_types(path: Path) -> None:
    pq.write_table(pa.table({name: ["x"] for name in pq.read_schema(path).names}), path)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [("values", damaged), ("values", foreign), ("values", of_other_types), ("values", cut), ("steps", cut),
     ("scalars", cut), ("layers", cut)],
)  # fmt: skip
def test_a_closed_file_that_cannot_be_read_is_left_out_with_a_note(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    run_id = write_run(tmp_path, range(5))
    write_run(tmp_path, range(5, STEPS), run_id=run_id)
    path = file_of(tmp_path, name)
    spoil(path)
    run = read_all(tmp_path)
    (note,) = run.notes
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert run.steps["iteration"].to_pylist() == list(range(5 if name == "steps" else 0, STEPS))
    assert [*run.grid("amax", "activation").iterations] == list(range(5 if name == "values" else 0, STEPS))


def read_all(log_dir: Path) -> RecordedRun:
    run = open_run(log_dir)
    run.values(), run.vectors(), run.ordered_layers, run.events.to_pylist(), run.steps.to_pylist()
    return run


@pytest.mark.parametrize("change", [lambda data: data[:20], lambda data: b"", lambda data: b"[1]"])
def test_a_run_without_readable_facts_is_read_with_a_note(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_run(tmp_path, range(STEPS))
    path = file_of(tmp_path, "run.json")
    path.write_bytes(change(path.read_bytes()))
    run = read_all(tmp_path)
    assert any(f"{path} is damaged" in note for note in run.unread)
    assert len(run.values()) == 2 * STEPS


def test_what_turns_out_to_be_damaged_when_it_is_read_is_left_out_with_a_note(tmp_path: Path) -> None:
    """As a page of the one column that opening a run does not read."""
    write_run(tmp_path, range(STEPS))
    path = file_of(tmp_path, "values")
    with pq.ParquetFile(path) as file:
        column = file.metadata.row_group(0).column(file.schema_arrow.get_field_index("segment"))
    with path.open("r+b") as opened:
        opened.seek(column.data_page_offset)
        opened.write(b"\xff" * 8)
    run = open_run(tmp_path)
    assert run.notes == run.unread == ()
    assert len(run.values()) == 0
    (note,) = run.notes
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert run.unread == run.notes


def test_values_are_there_without_the_files_of_steps(tmp_path: Path) -> None:
    write_run(tmp_path, range(STEPS))
    for name in ("steps", "scalars"):
        file_of(tmp_path, name).unlink()
    assert open_run(tmp_path).grid("amax", "activation").iterations.tolist() == list(range(STEPS))


def test_an_open_file_that_was_cut_while_it_was_written_is_not_closed(tmp_path: Path) -> None:
    writer = RunWriter.begin(tmp_path)
    writer.add_step(0)
    writer.flush()
    os.truncate(file_of(tmp_path, "steps"), 100)
    with pytest.raises(OSError, match=r"steps-0001.arrow changed during writing: it has 100 of [\d,]+"):
        writer.close()
    assert any("is not recorded" in note for note in open_run(tmp_path).notes)
