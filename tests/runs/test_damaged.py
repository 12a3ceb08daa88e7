"""Damaged recordings: each part of one is read, or left out with a note, and no reader takes much memory."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.runs import NotARunError, RunError, RunWriter, UnknownSubjectError, open_run, parts
from te_precision_callbacks.runs.bounds import MOST_APPENDED, MOST_PART
from te_precision_callbacks.runs.parts import SealedPart, read_part
from te_precision_callbacks.runs.run_files import part_files
from te_precision_callbacks.runs.tables import VALUES
from te_precision_callbacks.runs.thinning import thin
from te_precision_callbacks.views.compare import compare
from te_precision_callbacks.views.show.view import look
from tests.properties import examples, randoms
from tests.reference.processes import answers
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
    assert not read_all(whole / "sealed")
    noted = {}
    for base, damages in (("sealed", corpus.SEALED), ("running", corpus.RUNNING)):
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
    for name in ("events deep", "events no time", "events the last time", f"events iteration {2**62}",
                 f"events iteration 1{'0' * 23}", "events iteration 1e999"):  # fmt: skip
        assert any("1 of " in note and "lines cannot be read" in note for note in noted[name]), name
    for name in (f"steps iteration {2**63 - 1}", "values iteration -1", f"values series {2**62}", "scalars name null"):
        assert any("damaged" in note or "cannot be read" in note for note in noted[name]), name
    for name in ("events half a pair", "events no zone", "run.json half a pair", "steps wall_time null"):
        assert not noted[name], "it can be read"


@pytest.fixture(scope="module")
def files(whole: Path) -> list[tuple[Path, Path]]:
    """The files of the run in both forms, each with the log folder that it is in."""
    found = []
    for base in (whole / "sealed", whole / "running"):
        found += [(base, path) for path in sorted(base.glob("precision_records/**/*")) if path.is_file()]
    return found


@given(draw=randoms())
@examples(40, shrink=False)
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
        if "its schema is" not in str(error):  # the number of a later version
            raise
    shutil.rmtree(copy)


def test_what_turns_out_to_be_damaged_when_it_is_read_is_left_out_with_a_note(whole: Path, tmp_path: Path) -> None:
    """As a page of the one column that opening a run does not read."""
    shutil.copytree(whole / "sealed", tmp_path / "run")
    path = corpus.file_of(tmp_path / "run", "values")
    corpus.damage_page(path, "segment")
    run = open_run(tmp_path / "run")
    assert run.notes == run.unread == ()
    assert len(run.values()) == 0
    assert len(run.vectors()) > 0
    (note,) = run.notes
    assert note.startswith(f"{path} cannot be read, and its rows are missing: ")
    assert run.unread == run.notes


READS = """
import os, resource, sys
from te_precision_callbacks.cli import main

answer = {{}}
for name in sorted(os.listdir({folder!r})):
    path = os.path.join({folder!r}, name)
    others = [["compare", path, {good!r}], ["report", path, "-o", "report.html"]]  # which read all that show does
    for command in others if "values" in name else [["show", path]]:
        sys.argv = ["te-precision", *command]
        try:
            main()
        except SystemExit as ended:
            assert ended.code in (None, 0, 1, 2), (name, command, ended.code)
    # The peak of this program: getrusage also has that of the process which has started it.
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    answer[name] = int(peak) / 2**20
sys.stdout.flush()
"""


@pytest.mark.slow
def test_readers_take_less_than_a_gigabyte(whole: Path, tmp_path: Path) -> None:
    """Of files that say that they are large, one after the other in one process."""
    for name, damage in corpus.LARGE.items():
        corpus.damaged(whole / "sealed", name, damage, tmp_path / "large")
    code = READS.format(folder=str(tmp_path / "large"), good=str(whole / "sealed"))
    largest = answers(code, cwd=tmp_path, fresh=True, COLUMNS="200")
    assert len(largest) == len(corpus.LARGE)
    assert max(largest.values()) < 1.0, largest


def test_a_damaged_series_does_no_harm_when_parts_are_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, range(40))
    corpus.column("values", "series", corpus.filled(2**31 - 1), every=False)(tmp_path)
    (file,) = (file for file in part_files(corpus.rank(tmp_path))[0] if file.table == "values")
    for _ in thin([SealedPart(file, file.path.stat().st_size)]):
        pass
    run = open_run(tmp_path)
    assert run.thinned
    assert run.values()["iteration"].to_pylist() == [0, 1, 10, 20, 30, 39, 0, 10, 20, 30, 39]


def test_no_more_is_appended_at_once_than_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_APPENDED + (64 << 20) < MOST_PART
    monkeypatch.setattr("te_precision_callbacks.runs.tails.MOST_APPENDED", 2000)
    with RunWriter.begin(tmp_path) as writer:
        series = np.array([writer.series(f"layer{n}", "weight", "amax") for n in range(300)], np.int32)
        writer.add_step(0)
        writer.add_values(0, series, np.arange(300.0))
        writer.flush()
        with pa.memory_map(str(corpus.file_of(tmp_path, "values"))) as source:
            sizes = [batch.num_rows for batch in pa.ipc.open_stream(source)]
    assert len(sizes) > 5
    assert sum(sizes) == 300
    assert open_run(tmp_path).values()["value"].to_pylist() == np.arange(300.0).tolist()


def test_a_part_of_more_rows_than_any_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(40))
    path = corpus.file_of(tmp_path, "values")
    monkeypatch.setattr(parts, "MOST_PART", 40 * 60)
    with pytest.raises(ValueError, match=r"it has 80 rows, which would take [\d,]+ bytes; no part has more than 2,400"):
        read_part(path, VALUES.names, VALUES)
    corpus.unseal(tmp_path)
    with pytest.raises(ValueError, match=r"it has \d+ rows, which would take"):
        read_part(path.with_suffix(".arrows"), VALUES.names, VALUES)


def test_rows_beyond_the_last_step_are_noted_once_nobody_writes(tmp_path: Path) -> None:
    """While a run is written, values may be there before the reader has seen their step."""
    writer = RunWriter.begin(tmp_path)
    series = np.array([writer.series("fc1", "weight", "amax")], np.int32)
    histogram = writer.series("fc1", "weight", "exponent_histogram")
    for iteration in range(1200):
        if iteration < 1100:
            writer.add_step(iteration)
        writer.add_values(iteration, series, np.ones(1))
        writer.add_vector(iteration, histogram, [1.0])
    writer.flush()
    run = open_run(tmp_path)
    assert (run.segments[0].status, run.notes, len(run.values())) == ("running", (), 1100)
    writer.close()
    run = open_run(tmp_path)
    assert (len(run.values()), len(run.vectors())) == (1100, 1100)
    assert run.notes == tuple(
        f"Segment 0 has iteration 1,099 as its last recorded step: 100 {what} beyond are left out."
        for what in ("values", "histograms")
    )
    corpus.file_of(tmp_path, "steps").unlink()
    assert "Segment 0 has no recorded step: 1,200 values beyond are left out." in open_run(tmp_path).notes


CUTS = """
import os
from pathlib import Path
import numpy, pyarrow.ipc
from te_precision_callbacks.runs import RunWriter, open_run
writer = RunWriter.begin("logs")
series = numpy.array([writer.series(f"layer{n}", "weight", "amax") for n in range(300)], numpy.int32)
for iteration in range(20):
    writer.add_step(iteration)
    writer.add_values(iteration, series, numpy.arange(300.0))
writer.flush()
tail, = writer.own.glob("values-*.arrows")
whole, opened = tail.read_bytes(), pyarrow.ipc.open_stream

def cut(*arguments, **keywords):
    stream = opened(*arguments, **keywords)
    if "value" in stream.schema.names and "flags" in stream.schema.names:
        os.truncate(tail, 0)
    return stream

pyarrow.ipc.open_stream = cut
series = len(open_run("logs").series)
tail.write_bytes(whole)
writer.close()
run = open_run("logs")
answer = [series, len(run.values()), run.segments[0].status]
"""


@pytest.mark.processes
def test_a_tail_that_is_cut_while_it_is_read_ends_no_process(tmp_path: Path) -> None:
    """Neither that of a reader, nor the training, which reads its own tails when it seals them."""
    assert answers(CUTS, cwd=tmp_path, fresh=True) == [300, 6000, "ended"]


def test_a_tail_that_was_cut_while_it_was_written_is_no_part(tmp_path: Path) -> None:
    writer = RunWriter.begin(tmp_path)
    writer.add_step(0)
    writer.flush()
    os.truncate(corpus.file_of(tmp_path, "steps"), 100)
    with pytest.raises(OSError, match=r"steps-000001.arrows was changed while it was written: it has 100 of [\d,]+"):
        writer.close()
    assert any("not recorded to its end" in note for note in open_run(tmp_path).notes)


def test_plain_logs_may_be_damaged_too(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_precision_callbacks.runs.bounds._LONGEST_LINE", 10_000)
    monkeypatch.setattr("te_precision_callbacks.runs.bounds._PIECE", 4000)
    shutil.copytree(whole / "sealed", tmp_path / "plain", ignore=shutil.ignore_patterns("precision_records"))
    clean = open_run(tmp_path / "plain")
    (log,) = tmp_path.glob("plain/nvdlfw_inspect_statistics_logs/*")
    (events,) = tmp_path.glob("plain/nvdlfw_inspect_logs/*")
    lines = log.read_bytes().splitlines(keepends=True)
    odd = [lines[0].replace(b"iteration=000000", b"iteration=" + str(number).encode()) for number in (10**23, 2**62)]
    log.write_bytes(b"".join([*lines[:5], *odd, b"x" * 50_000 + b"\n", b"\xff\n", *lines[5:]]))
    events.unlink()
    os.mkfifo(events)
    run = open_run(tmp_path / "plain")
    assert run.values().drop_columns("series").equals(clean.values().drop_columns("series"))
    assert any("4 lines are no statistics" in note for note in run.notes)
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(NotARunError, match="hold no statistic"):
        open_run(tmp_path / "plain")


def test_an_error_of_what_a_damaged_run_lacks_names_what_cannot_be_read(tmp_path: Path) -> None:
    write_run(tmp_path / "good", range(3))
    run_id = write_run(tmp_path / "bad", range(3))
    (part,) = (tmp_path / "bad").rglob("values-*")
    write_run(tmp_path / "bad", range(3, 6), run_id=run_id, statistic="std")
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(PrecisionDebugError, match=part.name):
        look(open_run(tmp_path / "bad"), ["amax"])
    compared = compare(open_run(tmp_path / "bad"), open_run(tmp_path / "good"))  # of the loss, which both have
    assert any(part.name in note for note in compared.notes)
