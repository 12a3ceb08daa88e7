"""Records, the sink protocol, and the statistics log."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest

from te_precision_callbacks.records import MetricSelection, Row, RunInfo, Sink, StatisticsLog, StepRecords
from te_precision_callbacks.records.statistics_log import claim


def records(*rows: Row, iteration: int = 3) -> StepRecords:
    return StepRecords.from_rows(iteration, iteration + 100, rows)


def run_info(log_dir: Path, rank: int = 0) -> RunInfo:
    return RunInfo(log_dir, rank, 1, 0, (), {}, "a mapping")


def test_rows_go_into_columns_and_come_back() -> None:
    rows = [Row("a", "activation", None, "max", 1.5), Row("b", "weight", "fprop", "min", -2.0)]
    step = records(*rows)
    assert list(step) == rows
    assert len(step) == 2
    assert step.layers == ("a", "b")
    assert step.values.typecode == "d"


@pytest.mark.parametrize("value", [0.1, 3e-6, 1e-30, -4.25, 1e22, 130799.6953, math.inf, -math.inf, math.nan, 0.0])
def test_the_log_has_every_digit_and_no_exponent(tmp_path: Path, value: float) -> None:
    log = StatisticsLog()
    log.start(run_info(tmp_path, rank=2))
    log.write(records(Row("net.fc1", "activation", None, "max", value), Row("", "", None, "my_number", 2.0)))
    path = tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-2.log"
    first, second = path.read_text().splitlines()
    log.close(None)
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - (\S+) \t\t\t\t iteration=000003 \t\t\t\t value=(\S+)"
    match = re.fullmatch(pattern, first)
    assert match
    assert match[1] == "net.fc1_activation_max"
    assert "e" not in match[2].lower().replace("infinity", "")
    assert float(match[2]) == value or (math.isnan(value) and math.isnan(float(match[2])))
    assert "my_number" in second


@pytest.mark.parametrize(("overwrite", "expected"), [(None, 1), ("1", 1), ("0", 2)])
def test_a_log_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: str | None, expected: int
) -> None:
    """It is kept beside the new one; where upstream's variable says what to do, that is done."""
    if overwrite is not None:
        monkeypatch.setenv("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE", overwrite)
    for _ in range(2):
        log = StatisticsLog()
        log.start(run_info(tmp_path))
        log.write(records(Row("a", "activation", None, "max", 1.0)))
        log.close(None)
    folder = tmp_path / "nvdlfw_inspect_statistics_logs"
    assert len((folder / "nvdlfw_inspect_globalrank-0.log").read_text().splitlines()) == expected
    assert (folder / "nvdlfw_inspect_globalrank-0.log.1").exists() == (overwrite is None)


def test_a_rank_whose_numbers_another_one_writes_writes_its_own(tmp_path: Path) -> None:
    log = StatisticsLog(own_only=True)
    log.start(run_info(tmp_path, rank=1))
    row, mine = Row("a", "activation", None, "max", 1.0), Row("", "", None, "mine", 2.0)
    path = tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-1.log"
    log.write(StepRecords.from_rows(0, 0, [row], own=[False]))
    assert not path.exists()
    log.write(StepRecords.from_rows(1, 1, [row, mine], own=[False, True]))
    log.write(StepRecords.from_rows(2, 2, [row], own=[True], local=True))
    log.close(None)
    (first, second) = (line.split(" - INFO - ")[1].split() for line in path.read_text().splitlines())
    assert first == ["mine", "iteration=000001", "value=2.0"]
    assert second == ["a_activation_max", "iteration=000002", "value=1.0", "rank=1"]


def test_numbers_of_one_rank_are_no_points_of_the_reduced_series() -> None:
    local = StepRecords.from_rows(
        0,
        0,
        [Row("a", "activation", None, "max", 1.0)],
        vectors={("a", "activation", "exponent_histogram"): (0.0,) * 256},
        local=True,
    )
    select = MetricSelection("te")
    assert list(select(local)) == ["te.local.a/activation/max"]
    assert list(select.histograms(local)) == ["te.local.a/activation/exponent_histogram"]
    assert list(MetricSelection("")(local)) == ["local.a/activation/max"]


def test_processes_that_start_together_lose_no_file(tmp_path: Path) -> None:
    """Each names its file's owner in it; threads stand for processes, which do the same system calls."""
    for trial in range(20):
        path = tmp_path / str(trial) / "rank-0.log"
        path.parent.mkdir()
        path.write_text("earlier")
        together = threading.Barrier(8)

        def start(owner: int, path: Path = path, together: threading.Barrier = together) -> None:
            together.wait()
            with claim(path) as file:
                file.write(str(owner))

        threads = [threading.Thread(target=start, args=(owner,)) for owner in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = sorted(kept.read_text() for kept in path.parent.iterdir())
        assert found == [*map(str, range(8)), "earlier"]


def test_a_sink_defines_what_it_needs(tmp_path: Path) -> None:
    class Counts(Sink):
        numbers = 0

        def write(self, records: StepRecords) -> None:
            self.numbers += len(records)

    sink = Counts()
    sink.start(run_info(tmp_path))
    sink.write(records(Row("a", "activation", None, "max", 1.0)))
    sink.close(None)
    assert sink.numbers == 1
