"""SIGTERM: handlers of others stay as they are, and the end of a session is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession
from te_precision_callbacks.sinks import writer_thread
from tests.conftest import Keeper, statistics
from tests.lightning.models import logged_lines

# ---------------------------------------------------------------------------------- in this process: nothing may end it


@pytest.fixture
def only_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written by itself."""
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 600.0)


@pytest.fixture
def handler() -> Iterator[Callable[[int], list[Any]]]:
    """Sets a handler, as a script does, and gives the list of what it gets."""
    before: dict[int, Any] = {}

    def handle(number: int, also: Callable[[], Any] = lambda: None) -> list[Any]:
        got: list[Any] = []
        before[number] = signal.signal(number, lambda *call: got.append((call[0], also())))
        return got

    yield handle
    for number, former in before.items():
        signal.signal(number, former)


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; the test's own limit ends what never comes."""
    while not holds():
        signal.sigtimedwait([], 0.01)


def logged(folder: Path) -> set[int]:
    """The steps in the log, if there is one."""
    try:
        return {step for _, step in logged_lines(folder)}
    except FileNotFoundError:
        return set()


def trained(net: torch.nn.Module, session: InspectSession, steps: int) -> None:
    for step in range(steps):
        net(torch.full((16, 32), step + 1.0)).sum().backward()
        session.step()


def test_a_signal_that_the_script_handles_is_its_own(tmp_path: Path, handler: Callable[[int], list[Any]]) -> None:
    got = handler(signal.SIGTERM)
    own = signal.getsignal(signal.SIGTERM)
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        trained(net, session, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [(signal.SIGTERM, None)]
        assert signal.getsignal(signal.SIGTERM) is own
        trained(net, session, 1)
        assert session.flush(60.0)
    assert signal.getsignal(signal.SIGTERM) is own
    assert logged(tmp_path) == {0, 1}


def test_before_a_signal_ends_the_process_no_gpu_is_asked_and_the_verdict_is_printed(
    tmp_path: Path,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET", raising=False)
    net = te.Linear(32, 32)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]).start()
    trained(net, session, 2)
    net(torch.full((16, 32), 9.0)).sum().backward()
    assert session._run is not None
    monkeypatch.setattr(session._run._ends, "is_terminated", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    session.stop(ValueError("ended by a signal"))
    assert keeper.iterations == [0, 1]
    assert "Problems found: 1 error" in capsys.readouterr().err
    assert "The statistics of iteration 2 are not written: they are on the GPU" in caplog.text


def calls_of_stop(folder: Path, layers: int, *, hurried: bool) -> int:
    """How many functions stop() calls."""
    net = torch.nn.Sequential(*(te.Linear(16, 16, bias=False) for _ in range(layers)))
    session = InspectSession(statistics(), model=net, log_dir=folder).start()
    net(torch.ones(16, 16)).sum().backward()
    session.step()
    session.flush(60.0)
    assert session._run is not None
    assert session._run._ends is not None
    session._run._ends.is_terminated = hurried
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        session.stop(ValueError("ended"))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("hurried", "most"), [(True, 400), (False, 600)])
def test_what_a_layer_adds_to_the_end_is_bounded(tmp_path: Path, hurried: bool, most: int) -> None:
    """At 20,000 layers 600 calls are 12 million, which take a second or two."""
    calls_of_stop(tmp_path / "first", 20, hurried=hurried)  # imports what it needs
    few, many = (calls_of_stop(tmp_path / str(layers), layers, hurried=hurried) for layers in (20, 60))
    assert (many - few) / 40 <= most
