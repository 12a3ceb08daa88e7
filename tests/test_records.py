"""Records, the sink protocol, and the statistics log."""

import errno
import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from te_precision_callbacks.sinks import (
    Row,
    RunInfo,
    StatisticsLog,
    StepRecords,
    statistics_log,
    writer_thread,
)
from te_precision_callbacks.sinks.statistics_log import LogFile, claim
from te_precision_callbacks.sinks.writer_thread import WriterThread
from tests.lightning.models import log_of
from tests.step_records import records_from_rows
from tests.training import wait_until


def records(*rows: Row, iteration: int = 3) -> StepRecords:
    return records_from_rows(iteration, iteration + 100, rows)


@contextmanager
def log_in(folder: Path, rank: int = 0, **keywords: Any) -> Iterator[StatisticsLog]:
    log = StatisticsLog(**keywords)
    log.start(RunInfo(folder, rank, 1, 0, (), {}, "a mapping"))
    yield log
    log.close(None)


def write_steps(log: StatisticsLog, steps: int, values: int = 1) -> None:
    for iteration in range(steps):
        log.write(records(*[Row("a", "activation", None, "max", 1.0)] * values, iteration=iteration))


def log_once(folder: Path, value: float) -> list[str]:
    """The values in a folder's statistics log after a run with one more, with the lines between them."""
    with log_in(folder) as log:
        log.write(records(Row("a", "activation", None, "max", value)))
    assert [path.name for path in log_of(folder, 0).parent.iterdir()] == ["nvdlfw_inspect_globalrank-0.log"]
    return [line.split(" - INFO - ")[-1].split("value=")[-1] for line in lines(folder)]


def lines(folder: Path) -> list[str]:
    path = log_of(folder, 0)
    return path.read_text().splitlines() if path.exists() else []


def test_a_rank_writes_its_local_values_only(tmp_path: Path) -> None:
    row, mine = Row("a", "activation", None, "max", 1.0), Row("", "", None, "mine", 2.0)
    path = log_of(tmp_path, 1)
    with log_in(tmp_path, rank=1, own_only=True) as log:
        log.write(records_from_rows(0, 0, [row], own=[False]))
        assert not path.exists()
        log.write(records_from_rows(1, 1, [row, mine], own=[False, True]))
        log.write(records_from_rows(2, 2, [row], own=[True], local=True))
    (first, second) = (line.split(" - INFO - ")[1].split() for line in path.read_text().splitlines())
    assert first == ["mine", "iteration=000001", "value=2.0"]
    assert second == ["a_activation_max", "iteration=000002", "value=1.0", "rank=1"]


def test_the_log_has_every_digit_and_no_exponent(tmp_path: Path) -> None:
    for value in [0.1, 3e-6, 1e-30, -4.25, 1e22, 130799.6953, math.inf, -math.inf, math.nan, 0.0]:
        with log_in(tmp_path / str(value), rank=2) as log:
            log.write(records(Row("net.fc1", "activation", None, "max", value), Row("", "", None, "my_number", 2.0)))
        first, second = log_of(tmp_path / str(value), 2).read_text().splitlines()
        pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - INFO - (\S+) \t\t\t\t iteration=000003 \t\t\t\t value=(\S+)"
        name, number = re.fullmatch(pattern, first).groups()
        assert name == "net.fc1_activation_max"
        assert "e" not in number.lower().replace("infinity", "")
        assert float(number) == pytest.approx(value, rel=0, abs=0, nan_ok=True)
        assert "my_number" in second


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_log_of_an_earlier_run_is_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    begins = f"Here another run begins, of process {os.getpid()}."
    log_once(tmp_path, 1.0)
    assert log_once(tmp_path, 2.0) == ["1.0", begins, "2.0"]
    path = log_of(tmp_path, 0)
    path.write_text(path.read_text()[:-4])  # killed while it wrote
    assert log_once(tmp_path, 3.0) == ["1.0", begins, "", begins, "3.0"]


def test_a_log_that_another_run_is_writing_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank-0.log"
    with claim(path) as first, claim(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert [path.read_text(), path.with_name("rank-0.log.1").read_text()] == ["first", "second"]
    assert caplog.messages == [f"Another process is writing {path}; this process writes rank-0.log.1 instead."]


@pytest.mark.extended
def test_a_step_that_ctrl_c_broke_off_is_written_once_behind_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_once(tmp_path, 1.0)
    step = records(Row("a", "activation", None, "max", 2.0), Row("b", "activation", None, "max", 3.0))
    handed_over = WriterThread.put

    def interrupted(*arguments: Any) -> bool:
        handed_over(*arguments)
        raise KeyboardInterrupt

    with log_in(tmp_path) as log:
        with monkeypatch.context() as patch:
            patch.setattr(WriterThread, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.write(step)
        log.write(step)
    assert [line.split("value=")[-1] for line in lines(tmp_path) if "value=" in line] == ["1.0", "2.0", "3.0"]


def test_a_step_is_in_the_log_soon_without_anybody_closing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    with log_in(tmp_path) as log:
        for iteration in range(3):
            log.write(records(Row("a", "activation", None, "max", 1.0), iteration=iteration))
            wait_until(lambda written=iteration + 1: len(lines(tmp_path)) == written)


def test_a_slow_disk_drops_steps_and_reports_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training's thread does not wait: the disk takes nothing before all steps were handed over."""
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(statistics_log, "MAX_QUEUED", 10)
    may_write = threading.Event()
    slowed(monkeypatch, lambda: may_write.wait(10))
    with log_in(tmp_path) as log:
        write_steps(log, 50, 5)
        may_write.set()
    assert len(lines(tmp_path)) == 15, "after the third step, more than 10 wait"
    first, last = caplog.messages
    assert first.startswith(
        "The disk is slower than the training: 15 values are waiting for the statistics log, so the 5 "
    )
    assert last.startswith("235 values of 47 steps are missing in the statistics log")


def slowed(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    append = LogFile.append
    monkeypatch.setattr(LogFile, "append", lambda file, text: (wait(), append(file, text)))


@pytest.mark.extended
def test_the_end_waits_for_a_disk_that_is_slow_but_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "LONGEST_STILL", 0.3)
    slowed(monkeypatch, lambda: time.sleep(0.1))
    with log_in(tmp_path) as log:
        write_steps(log, 10)
    assert len(lines(tmp_path)) == 10


def test_a_log_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with log_in(tmp_path, limit=20_000) as log:
        write_steps(log, 300, 7)
    (path,) = log_of(tmp_path, 0).parent.iterdir()
    content = path.read_text()
    assert 19_000 < len(content) <= 20_000
    assert content.endswith("\n")
    iterations = [int(line.split("iteration=")[1][:6]) for line in content.splitlines()]
    assert iterations == [iteration for iteration in range(300) for _ in range(7)][: len(iterations)]
    (message,) = caplog.messages
    assert message.startswith(f"{path} has reached its limit of 20,000 bytes and is closed. The records continue.")
    assert "statistics_log='rank0, 4GiB' or" in message
