"""The last steps are recorded on SIGUSR1, on a full disk too, and within their size."""

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.flight.rows import StepRow, TensorSlot
from te_precision_callbacks.flight.steps import KEPT_STEPS, LastSteps
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.summary import last_steps, outcome_notes
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session.checks import LEFT_FOR_PROBLEMS, MOST_RECORDS
from te_precision_callbacks.sinks import writer_thread
from tests.conftest import statistics
from tests.full_disk import files_up_to
from tests.runs.making import RunWriter
from tests.training import train


@pytest.fixture(autouse=True)
def no_handler() -> Any:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGUSR1, before)


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [row for row in open_run(folder).events.to_pylist() if row["kind"] == "last_steps"]


@pytest.fixture
def model() -> torch.nn.Module:
    return te.Linear(32, 32)


@pytest.fixture
def session(tmp_path: Path, model: torch.nn.Module) -> InspectSession:
    return InspectSession(statistics(), model=model, log_dir=tmp_path)


def test_sigusr1_between_steps_and_in_a_step(
    session: InspectSession, model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values on the host are in the files without another step: a process group that hangs is seen while it hangs."""
    with session:
        train(session, model, 3)
        signal.raise_signal(signal.SIGUSR1)
        assert session.flush(30)
        assert [row["iteration"] for row in recorded(tmp_path)] == [3]
        collector: Any = session._run._collector  # type: ignore[union-attr]
        reduce = collector.reduce
        monkeypatch.setattr(collector, "reduce", lambda *step: (signal.raise_signal(signal.SIGUSR1), reduce(*step)))
        train(session, model, 1)
        monkeypatch.undo()
        train(session, model, 2)
    rows = recorded(tmp_path)
    assert [(row["iteration"], row["text"]) for row in rows] == [
        (3, "The last 3 steps before: SIGUSR1 was received."),
        (4, "The last 5 steps before: SIGUSR1 was received."),
        (5, "The last 6 steps before: the end of the run."),
    ]


def test_a_handler_of_the_script_stays(
    session: InspectSession, model: torch.nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls = []
    with session:
        signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))  # as Lightning does, before step 1
        own = signal.getsignal(signal.SIGUSR1)
        train(session, model, 2)
        signal.raise_signal(signal.SIGUSR1)
        train(session, model, 1)
    assert calls == [signal.SIGUSR1]
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is own
    assert [row["text"] for row in recorded(tmp_path)] == ["The last 3 steps before: the end of the run."]
    assert caplog.text.count("SIGUSR1 has another handler") == 1


@pytest.mark.extended
def test_a_later_handler_of_the_script_stays(session: InspectSession, model: torch.nn.Module) -> None:
    with session:
        train(session, model, 1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is signal.SIG_IGN


@pytest.mark.extended
def test_a_session_in_another_thread_sets_no_handler(
    session: InspectSession, model: torch.nn.Module, tmp_path: Path
) -> None:
    def work() -> Any:
        with session:
            train(session, model, 2)
            return signal.getsignal(signal.SIGUSR1)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == signal.SIG_DFL
    assert len(recorded(tmp_path)) == 1


@pytest.mark.extended
def test_many_requests_leave_room_for_the_error(
    session: InspectSession, model: torch.nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError), session:
        for _ in range(2 * MOST_RECORDS):
            train(session, model, 1)
            signal.raise_signal(signal.SIGUSR1)
        raise RuntimeError("the script's own")
    texts = [row["text"].partition(": ")[2] for row in recorded(tmp_path)]
    asked = MOST_RECORDS - LEFT_FOR_PROBLEMS - 1  # and one for the end
    assert texts == ["SIGUSR1 was received."] * asked + ["the run was ended by RuntimeError."]
    data = last_steps(open_run(tmp_path))
    assert data is not None
    assert data["text"].endswith("RuntimeError."), "the problem, not the first request"


@pytest.mark.extended
@pytest.mark.skipif(os.geteuid() != 0, reason="limits the size of files for the whole process")
def test_a_full_disk_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    model = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(40)))
    with InspectSession({}, model=model, log_dir=tmp_path, statistics_log="off") as session:
        train(session, model, 2)
        assert session.flush(30)
        with files_up_to(1 << 13):
            signal.raise_signal(signal.SIGUSR1)
            assert not session.flush(1)
            train(session, model, 2)
        train(session, model, 2)
        assert session.iteration == 6
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = [text for text in told if "precision_records" in text]
    assert "is no longer recorded; what was recorded remains readable" in said
    assert "Training continues" in said
    assert not [record for record in caplog.records if record.exc_info], "a traceback explains nothing here"
    run = open_run(tmp_path)
    (note,) = outcome_notes(run)
    assert "File too large" in note
    assert "free space" in note
    assert "File too large" in diagnose(run).summary
    assert "default_statistics" not in diagnose(run).summary


@pytest.mark.extended
def test_the_size_for_500_layers(tmp_path: Path) -> None:
    slots = [TensorSlot(f"decoder.layers.{layer // 4}.mlp.{layer}", tensor)
             for layer in range(500) for tensor in ("weight", "activation", "gradient", "dgrad", "wgrad")]  # fmt: skip
    steps = LastSteps(slots)
    draw = np.random.default_rng(0)
    with RunWriter.begin(tmp_path) as run:
        for record in range(MOST_RECORDS):
            for step in range(KEPT_STEPS):
                magnitudes = np.exp2(draw.normal(0, 8, len(slots))).astype(np.float32)
                steps.add(StepRow(record * KEPT_STEPS + step, range(len(slots)), magnitudes=magnitudes))
            run.add_event("last_steps", "", iteration=0, data=steps.as_json())
            run.flush()
        most = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 1_000_000 < size <= most < 20_000_000, (size, most)
