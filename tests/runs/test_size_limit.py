"""Old steps are thinned where a run reaches its limit. What must be left is found here from all that was recorded."""

import contextlib
import math
import os
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from te_precision_callbacks.runs import RecordedRun, RunError, open_run, reading, size_limit
from te_precision_callbacks.runs.recording import Recording, StepJob
from te_precision_callbacks.runs.run_files import Place, make_segment
from te_precision_callbacks.runs.tables import EXTREME, STEP0, VALUES
from te_precision_callbacks.sinks.step_records import Scalars, StepRecords
from te_precision_callbacks.statistics.series import SeriesTable
from tests.runs.making import info, records

RUN = "20261122-130144-507-9f3c21"
SERIES = 40

Truth = dict[int, dict[int, float]]  # series -> iteration -> value


def begin(folder: Path, limit: int, *, start: int = 0) -> Recording:
    place = Place(RUN, make_segment(folder / "precision_records" / RUN))
    run = info(folder, start=start)
    return Recording(folder / "precision_records", place, run, writes_reduced=True, limit=limit, begun=0.0)


def value(series: int, iteration: int) -> float:
    if iteration == 777 + series:
        return 1e6 + series
    if iteration == 1234 and series % 4 == 0:
        return math.nan if series % 8 else math.inf
    return math.sin(iteration / 50 + series) + ((iteration * 7919 + series * 104729) % 1000) / 1000


def record(
    recording: Recording,
    iterations: Iterable[int],
    truth: Truth,
    *,
    every: int = 1,
    watch: Callable[[], object] = lambda: None,
    keywords: Callable[[int], dict[str, Any]] = lambda iteration: {},
) -> None:
    """Steps with a value of series n in each (1 + n % 3)-th iteration that is a multiple of ``every``."""
    table = SeriesTable()
    for name in range(SERIES):
        table.intern(f"layer{name}", "weight", "amax")
    for iteration in iterations:
        due = [n for n in range(SERIES) if iteration % (every * (1 + n % 3)) == 0]
        values = array("d", [value(n, iteration) for n in due])
        step = StepRecords(
            iteration, iteration, table, np.array(due, np.int32), values, own=[False] * len(due), **keywords(iteration)
        )
        recording.take(StepJob(step, 1.0 * iteration, 0.1))
        recording.take(Scalars(iteration, iteration, {"loss": 1 / (1 + iteration)}))
        if iteration % 20 == 19:
            recording.flush()
            watch()
        for n, number in zip(due, values, strict=True):
            truth.setdefault(n, {})[iteration] = number
    recording.flush()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def layer_numbers(run: RecordedRun) -> dict[int, int]:
    return {number: int(layer.removeprefix("layer")) for number, layer in enumerate(run.series["layer"].to_pylist())}


def check(run: RecordedRun, truth: Truth) -> int:
    """Compare the remaining records with all recorded ones; return the first iteration of the unthinned steps."""
    assert all(item.table == "values" for item in run.thinned)
    table = run.values()
    name_of = layer_numbers(run)
    columns = (table[name].to_pylist() for name in ("series", "iteration", "value", "flags"))
    rows = [(name_of[number], *others) for number, *others in zip(*columns, strict=True)]
    assert len({row[:2] for row in rows}) == len(rows), "no number is there twice"
    np.testing.assert_array_equal([row[2] for row in rows], [truth[row[0]][row[1]] for row in rows])
    left: dict[int, dict[int, int]] = {name: {} for name in truth}
    for name, iteration, _, flags in rows:
        left[name][iteration] = flags
    missing = [iteration for name, values in truth.items() for iteration in values if iteration not in left[name]]
    whole_from = max(missing, default=-1) + 1
    begins = [item.first for item in run.thinned] + [whole_from]
    assert begins == sorted(begins)
    for item, end in zip(run.thinned, begins[1:], strict=True):
        for name, values in truth.items():
            own, step = left[name], int(np.gcd.reduce(np.diff(sorted(values))))
            here = [iteration for iteration in values if item.first <= iteration < end]
            regular = {iteration for iteration in here if iteration in own and not own[iteration] & EXTREME}
            wanted = {iteration for iteration in here if iteration // step % item.every == 0}
            assert wanted <= regular
            assert len(regular - wanted) <= 1, "the only step of a series in its file"
    for name, values in truth.items():
        odd = [iteration for iteration, number in values.items() if not math.isfinite(number)]
        finite = [iteration for iteration in values if iteration not in odd]
        lowest, highest = min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)
        assert {lowest, highest, *odd[:1]} <= left[name].keys()
    return whole_from


def test_recent_steps_are_whole_and_the_interval_of_old_ones_doubles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit, truth = 300_000, {}
    recording, sizes = begin(tmp_path, limit), []
    record(recording, range(3000), truth, watch=lambda: sizes.append(size(tmp_path)))
    recording.end(None)
    assert max(sizes) <= limit
    run = open_run(tmp_path)
    whole_from = check(run, truth)
    intervals = [item.every for item in run.thinned]
    assert intervals == sorted(intervals, reverse=True)
    assert {2, 4, 8} & {*intervals}
    assert 200 < 3000 - whole_from < 1800, "recent steps, and not a handful"
    for number, name in layer_numbers(run).items():
        if 777 + name in truth[name]:
            assert 1e6 + name in run.values([number])["value"].to_pylist(), "what happened long ago is there"
    assert run.steps["iteration"].to_pylist() == list(range(3000))
    assert len(run.scalars) == 3000, "the loss is kept whole"
    (note,) = run.notes
    assert note.startswith("The limit of records= was reached: of the statistics in iterations 0 to ")
    assert f" one step in {min(intervals)} to {max(intervals)} is kept, and the lowest and highest value" in note
    assert caplog.text.count("have reached their limit of 300,000 bytes") == 1
    assert run.events["kind"].to_pylist().count("records_thinned") == 1


def test_the_first_step_of_delayed_scaling_is_kept_and_is_no_extreme(tmp_path: Path) -> None:
    truth: Truth = {}
    recording, at = begin(tmp_path, 200_000), 777 + 6
    unscaled = {"unscaled": frozenset({"layer6"})}
    record(recording, range(2000), truth, keywords=lambda iteration: unscaled if iteration == at else {})
    recording.end(None)
    run = open_run(tmp_path)
    table = run.values(run.select(layer="layer6")).to_pylist()
    (first,) = [row for row in table if row["flags"] & STEP0]
    assert (first["iteration"], first["value"], first["flags"]) == (at, 1e6 + 6, STEP0)
    until = run.thinned[1].first
    ordinary = {iteration: number for iteration, number in truth[6].items() if number < 100 and iteration < until}
    assert max(ordinary, key=ordinary.__getitem__) in [row["iteration"] for row in table]


def test_histograms_are_thinned_too(tmp_path: Path) -> None:
    recording, chance = begin(tmp_path, 200_000), np.random.default_rng(0)
    table = SeriesTable()
    series = table.intern("layer0", "weight", "exponent_histogram")
    for iteration in range(3000):
        counts = {series: chance.integers(1, 1000, 64).astype(float)}
        step = StepRecords(iteration, iteration, table, np.zeros(0, np.int32), array("d"), histograms=counts, own=[])
        recording.take(StepJob(step, 1.0, 0.1))
        if iteration % 20 == 19:
            recording.flush()
            assert size(tmp_path) <= 200_000
    recording.end(None)
    run = open_run(tmp_path)
    left = run.vectors()["iteration"].to_pylist()
    assert {item.table for item in run.thinned} == {"vectors"}
    ends = [item.first for item in run.thinned[1:]] + [run.thinned[-1].last + 1]
    for item, end in zip(run.thinned, ends, strict=True):
        inside = [iteration for iteration in left if item.first <= iteration < end]
        assert inside == [iteration for iteration in range(item.first, end) if iteration % item.every == 0]
    assert left[-100:] == [*range(2900, 3000)]
    assert run.notes[-1].startswith("The limit of records= was reached: of the histograms in iterations ")
    assert "value of each series" not in run.notes[-1]


def test_what_is_too_much_even_thinned_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit has room for a few numbers of each series only."""
    recording, chance = begin(tmp_path, 60_000), np.random.default_rng(0)
    table = SeriesTable()
    for iteration in range(60):
        recording.take(StepJob(records(iteration, table, list(chance.random(2000))), 1.0, 0.1))
        recording.flush()
    recording.end(None)
    run = open_run(tmp_path)
    assert run.steps["iteration"].to_pylist() == list(range(60))
    assert 0 < len(np.unique(run.values()["iteration"].to_numpy())) < 60
    assert caplog.text.count("Statistics are no longer recorded") == 1
    assert run.events["kind"].to_pylist().count("records_limited") == 1


def test_a_resumed_run_shares_the_limit_and_its_past_is_thinned_first(tmp_path: Path) -> None:
    """Also the open file of a process that was killed."""
    limit, truth = 400_000, {}
    killed = begin(tmp_path, limit)
    record(killed, range(1300), truth)
    killed.writer.leave()
    assert size(tmp_path) > limit / 2
    (tail,) = tmp_path.glob("**/seg-000/**/values-*.arrow")
    left_over = tail.with_name(".values-0001-0004-every2.parquet.1.incomplete")
    left_over.write_bytes(b"x" * 1000)
    with mock.patch.object(size_limit, "has_ended", return_value=True):
        resumed = begin(tmp_path, limit, start=1300)
        record(resumed, range(1300, 3000), truth)
    assert size(tmp_path) <= limit
    resumed.end(None)
    assert not tail.exists()
    assert not left_over.exists()
    run = open_run(tmp_path)
    assert 1300 < check(run, truth) < 3000
    assert [segment.number for segment in run.segments] == [0, 1]
    assert not [note for note in run.notes if "missing" in note]


def test_a_part_that_is_damaged_stays_and_the_others_are_thinned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording, truth = begin(tmp_path, 300_000), {}
    record(recording, range(300), truth)
    first = min(tmp_path.glob("**/values-*.parquet"))
    first.write_bytes(b"PAR1" + bytes(first.stat().st_size))
    record(recording, range(300, 2500), truth)
    recording.end(None)
    assert first.exists()
    assert caplog.text.count("cannot be downsampled and remain") == 1
    assert size(tmp_path) <= 300_000
    run = open_run(tmp_path)
    assert [note for note in run.notes if f"{first} cannot be read" in note]
    assert run.thinned


def test_which_rows_are_kept() -> None:
    """Every second step of a schedule; the lowest, the highest and the first non-finite value; the first step of
    delayed scaling, which is not an extreme; nothing that a later segment has run again."""
    iterations = [3, 13, 23, 33, 43, 53, 63, 73, 83]
    values = [9.0, 1.0, 5.0, -1.0, 5.0, math.inf, math.nan, 7.0, 99.0]
    columns = {"iteration": iterations, "value": values, "flags": [STEP0, *[0] * 8]}
    others = {name: [{"segment": 0, "series": 4}.get(name)] * 9 for name in VALUES.names}
    once = size_limit.downsample(pa.table(others | columns, VALUES), 80)
    assert dict(zip(once["iteration"].to_pylist(), once["flags"].to_pylist(), strict=True)) == {
        3: STEP0,
        23: 0,
        33: EXTREME,
        43: 0,
        53: EXTREME,
        63: 0,
        73: EXTREME,
    }
    assert size_limit.downsample(once, 80)["iteration"].to_pylist() == [3, 33, 43, 53, 73]


# ---------------------------------------------------------------------- a kill, and readers meanwhile


class _Dead(BaseException):
    """The process was killed: later calls have no effect."""


class _Killed:
    def __init__(self, after: int) -> None:
        self.left, self.done = after, 0

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        for module, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (Path, "unlink"), (Path, "open")):
            self._patches.enter_context(mock.patch.object(module, name, self._counted(getattr(module, name))))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            if self.done == self.left:
                raise _Dead
            self.done += 1
            return function(*arguments, **keywords)

        return counted


def fill(folder: Path, limit: int, truth: Truth, steps: int = 900) -> Recording:
    """A run just before thinning begins."""
    recording = begin(folder, limit)
    with mock.patch.object(size_limit.SizeLimit, "keep"):
        record(recording, range(steps), truth)
    return recording


@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_each_number_once(tmp_path: Path) -> None:
    truth: Truth = {}
    limit, whole = 30_000, tmp_path / "whole"
    fill(whole, limit, truth, 300).writer.leave()
    states = set()
    for after in range(0, 10_000, 3):
        folder = tmp_path / str(after)
        shutil.copytree(whole, folder)
        with mock.patch.object(size_limit, "has_ended", return_value=True), _Killed(after) as kill:
            with contextlib.suppress(_Dead):
                recording = begin(folder, limit, start=300)
                recording.flush()
        if kill.done < after:
            break
        run = open_run(folder)
        check(run, truth)
        assert not [note for note in run.notes if ("missing" in note and "run.json" not in note) or "cannot" in note]
        states.add(run.thinned)
        with mock.patch.object(size_limit, "has_ended", return_value=True):
            again = begin(folder, limit, start=300)
            record(again, range(300, 310), truth)
            again.end(None)
        assert not [*folder.glob("**/rank-*/.*.incomplete")]
        check(open_run(folder), truth)
        truth = {name: {at: number for at, number in numbers.items() if at < 300} for name, numbers in truth.items()}
        shutil.rmtree(folder)
    assert after > 30
    assert {item.every for state in states for item in state} >= {2, 4}


def test_a_run_that_is_thinned_after_it_was_opened_is_to_be_read_again(tmp_path: Path) -> None:
    recording = fill(tmp_path, 200_000, {})
    opened = open_run(tmp_path)
    recording.flush()
    assert open_run(tmp_path).thinned
    with pytest.raises(RunError, match=r"was replaced while it was read .* Try again\.$"):
        opened.values()
    recording.writer.leave()


def test_a_run_is_listed_while_it_is_thinned(tmp_path: Path) -> None:
    """The parts vanish between the listing and the reading."""
    truth: Truth = {}
    recording = fill(tmp_path, 200_000, truth)
    thinned, listed = [], reading.data_files

    def data_files(folder: Path) -> Any:
        result = listed(folder)
        if not thinned and sys._getframe(2).f_code.co_name == "_rows":
            thinned.append(True)
            recording.flush()
        return result

    with mock.patch.object(reading, "data_files", data_files):
        run = open_run(tmp_path)
    assert run.thinned
    assert run.notes == open_run(tmp_path).notes
    check(run, truth)
    recording.writer.leave()
