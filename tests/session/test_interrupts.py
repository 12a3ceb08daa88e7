"""Ctrl-C, SIGTERM and a fork: in each line of step() and stop(), the run's numbers and the process stay whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

import te_precision_callbacks
from te_precision_callbacks.session import InspectSession, endings
from tests.conftest import Keeper, global_state, module_state, statistics
from tests.forked import executable
from tests.lightning.models import logged_lines
from tests.reference.processes import run

_CODE = (*map(str, te_precision_callbacks.__path__), str(Path(__file__).parents[2] / "features"), contextlib.__file__)
"""Where an interrupt comes: in each line of this project, and of the blocks that it makes with contextlib."""

EVERY_LINE = "EVERY_LINE" in os.environ
"""Whether it comes in all of them, one after another, and not in a sample."""


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler; in a process that a shell has put into the background Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Lines:
    """Counts the lines that a call runs, and has Ctrl-C come before one of them.

    Args:
        at: the number of that line; None: no Ctrl-C.
    """

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at

    def __call__(self, call: Callable[[], Any]) -> bool:
        """Whether the call was interrupted."""
        interrupted = self._is_interrupted(call)
        if sys.exc_info()[1] is not None:
            # CPython 3.11 goes on to handle the exception of an except block in whose last line Ctrl-C came, and later
            # tests in this process would see an error in flight.
            ctypes.pythonapi.PyErr_SetExcInfo(None, None, None)
        assert sys.exc_info() == (None, None, None)
        return interrupted

    def _is_interrupted(self, call: Callable[[], Any]) -> bool:
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        if event == "line":
            if self.count == self._at:
                self.count += 1
                signal.raise_signal(signal.SIGINT)
            self.count += 1
        return self._trace


def batch(step: int) -> torch.Tensor:
    return torch.full((16, 32), float(step + 1))


def once(iterations: list[int]) -> list[int]:
    """Without repetitions of a step whose write was interrupted on the way back."""
    return [number for place, number in enumerate(iterations) if iterations[place - 1 : place] != [number]]


@pytest.mark.slow
def test_ctrl_c_in_any_line_of_a_step_loses_no_step_and_takes_it_for_no_other(tmp_path: Path, keeper: Keeper) -> None:
    net = te.Linear(32, 32)
    options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], "strict": True}
    with InspectSession(statistics(), model=net, **options) as session:
        step = 0
        for at in [None, None, *range(0, 10_000, 1 if EVERY_LINE else 17)]:
            net(batch(step)).sum().backward()
            lines = Lines(at)
            interrupted = lines(session.step)
            if session.iteration == step:
                session.step()  # Ctrl-C came before the step had begun
            step += 1
            if at is not None and not interrupted:
                break
        assert at is not None
        assert at > 100, "there were as many places as a step has lines"
    assert once(keeper.iterations) == list(range(step))
    assert keeper.values("max") == {number: number + 1.0 for number in range(step)}
    assert {key[1]: value for key, value in logged_lines(tmp_path).items() if key[0] == "linear_activation_max"} == {
        number: number + 1.0 for number in range(step)
    }


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["stop", "step"])
def test_ctrl_c_in_any_line_of_the_end_leaves_nothing_patched(tmp_path: Path, ended_by: str) -> None:
    """Before stop() has begun it may be called once more. Ctrl-C in the last step comes before a whole stop()."""
    net = te.Linear(32, 32)
    modules, before = module_state(net), global_state()

    def end(at: int | None, folder: Path) -> Lines:
        keeper, lines = Keeper(), Lines(at)
        session = InspectSession(statistics(), model=net, log_dir=folder, sinks=[keeper]).start()
        for step in range(2):
            net(batch(step)).sum().backward()
            if step == 0:
                session.step()
        interrupted = lines(session.step if ended_by == "step" else session.stop)
        run = session._run
        begun = session.iteration == 2 or (run is not None and run._collector.ending is not None)
        if session.running:
            session.stop()
        assert global_state() == before, f"line {at}"
        assert module_state(net) == modules, f"line {at}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if interrupted and ended_by == "stop":
            return lines  # what Ctrl-C ends there is what has not been written
        assert once(keeper.iterations) == [0, 1], f"line {at}"
        assert session.iteration == (2 if ended_by == "step" and begun else 1)
        assert logged_lines(folder)["linear_activation_max", 1] == 2.0
        return lines

    whole = end(None, tmp_path / "whole").count
    assert whole > 100
    for at in range(0, whole, 1 if EVERY_LINE else 401):
        end(at, tmp_path / str(at))


TERMINATED = """
from te_precision_callbacks import reference
reference.install()
import os, signal, sys, time, torch, transformer_engine.pytorch as te
from te_precision_callbacks import InspectSession
from tests.conftest import statistics

how, folder = sys.argv[1:]
net = te.Linear(32, 32)
if how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
session = InspectSession(statistics(), model=net, log_dir=folder).start()
for step in range(2):
    net(torch.full((16, 32), step + 1.0)).sum().backward()
    if step == 0:
        session.step()
if how == "forked":
    child = os.fork()
    if child == 0:
        net(torch.full((16, 32), 9.0)).sum().backward()
        print(session.step(), session.step(), flush=True)
        session.stop()
        os.kill(os.getpid(), signal.SIGTERM)
    print("child", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("how", "status"), [("handled", 5), ("forked", -signal.SIGTERM)])
def test_sigterm_keeps_what_was_gathered_and_a_fork_writes_nothing(tmp_path: Path, how: str, status: int) -> None:
    command = [executable(whole=True), "-c", TERMINATED, how, str(tmp_path)]
    result = run([*command], cwd=Path(__file__).parents[2])
    assert result.returncode == status, result.stderr
    lines = logged_lines(tmp_path)
    largest = {step: value for (name, step), value in lines.items() if name == "linear_activation_max"}
    assert largest == {0: 1.0, 1: 2.0}, "a handler of the script's ends it by SystemExit, which stops the session too"
    if how == "forked":
        assert result.stdout.split() == ["None", "None", "child", str(int(signal.SIGTERM))]
        assert result.stderr.count("forked") == 1


@pytest.mark.processes
def test_an_uncaught_ctrl_c_ends_the_process_by_its_signal() -> None:
    """As without a session; a text that runs in between, as in an import, would let Python exit with 1."""
    script = (
        "import collections, importlib.util as util;"  # the module alone, since the session imports torch
        f" spec = util.spec_from_file_location('endings', {endings.__file__!r});"
        " loaded = util.module_from_spec(spec); spec.loader.exec_module(loaded);"
        " loaded.Uncaught(lambda error: collections.namedtuple('Imported', 'late')); raise KeyboardInterrupt"
    )
    assert run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == -signal.SIGINT


@pytest.mark.parametrize("prompt", [False, True])
def test_an_exception_that_nobody_catches_ends_the_session_before_it_is_shown(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, prompt: bool
) -> None:
    """At an interactive prompt the session goes on, as the process does."""
    shown: list[tuple[bool, BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append((session.running, error)))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False) if prompt else monkeypatch.delattr(sys, "ps1", raising=False)
    before = sys.excepthook
    net = te.Linear(32, 32)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]).start()
    net(batch(0)).sum().backward()
    error = ValueError("the script's own")
    sys.excepthook(ValueError, error, None)
    assert shown == [(prompt, error)]
    session.stop()
    assert sys.excepthook is before
    assert keeper.closed == [None if prompt else error]
    assert keeper.values("max") == {0: 1.0}
