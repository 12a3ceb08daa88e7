"""Records, the statistics log, and what of a step goes to a trainer's loggers."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import pytest

from te_precision_callbacks import PrecisionDebugError
from te_precision_callbacks.records import MetricSelection, Row, RunInfo, StatisticsLog, StepRecords, metric_name
from te_precision_callbacks.records.metrics import MOST_METRICS
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
    assert list(select(local)) == ["te/local/a/activation/max"]
    assert list(select.histograms(local)) == ["te/local/a/activation/exponent_histogram"]
    assert list(MetricSelection("")(local)) == ["local/a/activation/max"]


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


def test_metric_names() -> None:
    assert metric_name("te", Row("net.fc1", "weight", None, "max", 0.0)) == "te/net.fc1/weight/max"
    assert metric_name("te", Row("net.fc1", "weight", "dgrad", "max", 0.0)) == "te/net.fc1/weight/dgrad/max"
    assert metric_name("debug", Row("", "", None, "my_number", 0.0)) == "debug/my_number"


def test_up_to_the_limit_everything_is_logged() -> None:
    rows = [Row(f"layer.{index}", "activation", None, "max", float(index)) for index in range(MOST_METRICS)]
    assert len(MetricSelection()(records(*rows))) == MOST_METRICS


def test_above_the_limit_the_worst_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        Row(f"layer.{index}", "activation", None, statistic, sign * float(index))
        for index in range(1500)
        for statistic, sign in (("underflows%", 1.0), ("min", -1.0), ("sqnr", 1.0))
    ]
    rows[0] = rows[0]._replace(value=math.nan)
    select = MetricSelection()
    metrics = select(records(*rows))
    assert len(metrics) == 3 * (50 + 3)
    assert "te/layer.0/activation/underflows%" in metrics, "what is not finite is the worst"
    assert "te/layer.1499/activation/underflows%" in metrics
    assert "te/layer.1450/activation/underflows%" not in metrics, "49 others beside the one that is not finite"
    assert "te/layer.1499/activation/min" in metrics, "the lowest minimum"
    assert "te/layer.0/activation/sqnr" in metrics, "the lowest ratio of signal to noise"
    assert metrics["te/all/activation/min/min"] == -1499.0
    assert metrics["te/all/activation/min/median"] == -749.5
    assert metrics["te/all/activation/underflows%/max"] == 1499.0
    select(records(*rows))
    assert caplog.text.count("log_filter") == 1, "said once"


def test_a_filter_decides_instead_of_the_limit() -> None:
    rows = [Row(f"layer.{index}", "activation", None, "max", 1.0) for index in range(3 * MOST_METRICS)]
    assert len(MetricSelection(log_filter="*")(records(*rows))) == 3 * MOST_METRICS
    assert list(MetricSelection(log_filter=["*/layer.7/*", "nothing"])(records(*rows))) == ["te/layer.7/activation/max"]
    assert list(MetricSelection(log_filter=lambda name: "layer.8/" in name)(records(*rows))) == [
        "te/layer.8/activation/max"
    ]
    with pytest.raises(PrecisionDebugError, match="log_filter takes patterns"):
        MetricSelection(log_filter=3)  # type: ignore[arg-type]
