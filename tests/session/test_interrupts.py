"""Ctrl-C, SIGTERM and a fork: in each line of step() and stop(), the run's numbers and the process stay whole."""

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
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.summary import outcome_notes
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.sinks import StepRecords
from tests.conftest import Keeper, global_state, module_state, statistics
from tests.forked import executable
from tests.lightning.models import logged_lines
from tests.reference.processes import run
from tests.training import train

_CODE = (*map(str, te_precision_callbacks.__path__), str(Path(__file__).parents[2] / "features"), contextlib.__file__)
"""Where an interrupt comes: in each line of this project, and of the blocks that it makes with contextlib."""

EVERY_LINE = "EVERY_LINE" in os.environ  # in all of them, one after another, and not in a sample


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
        interrupted = False
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        if sys.exc_info()[1] is not None:
            # CPython 3.11 goes on to handle the exception of an except block if Ctrl-C came in its last line, and later
            # tests in this process would see an error in flight.
            ctypes.pythonapi.PyErr_SetExcInfo(None, None, None)
        return interrupted

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        if event == "line":
            self.count += 1
            if self.count - 1 == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def batch(step: int) -> torch.Tensor:
    return torch.full((16, 32), float(step + 1))


def largest_in_log(folder: Path) -> dict[int, float]:
    return {step: value for (name, step), value in logged_lines(folder).items() if name == "linear_activation_max"}


@pytest.mark.slow
@pytest.mark.extended
def test_ctrl_c_in_any_line_of_a_step_loses_no_step_and_takes_it_for_no_other(tmp_path: Path, keeper: Keeper) -> None:
    net = te.Linear(32, 32)
    options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], "strict": True}
    with InspectSession(statistics(), model=net, **options) as session:
        step = 0
        for at in [None, None, *range(0, 10_000, 1 if EVERY_LINE else 37)]:
            net(batch(step)).sum().backward()
            interrupted = Lines(at)(session.step)
            if session.iteration == step:
                session.step()  # Ctrl-C came before the step had begun
            step += 1
            if at is not None and not interrupted:
                break
        assert at > 100, "there were as many places as a step has lines"
    assert keeper.values("max") == largest_in_log(tmp_path) == {number: number + 1.0 for number in range(step)}


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("ended_by", ["stop", "step"])
def test_ctrl_c_in_any_line_of_the_end_leaves_nothing_patched(tmp_path: Path, ended_by: str) -> None:
    """Before stop() has begun it may be called once more."""
    net = te.Linear(32, 32)
    modules, before = module_state(net), global_state()

    def end(at: int | None, folder: Path) -> Lines:
        keeper, lines = Keeper(), Lines(at)
        session = InspectSession(statistics(), model=net, log_dir=folder, sinks=[keeper]).start()
        for step in range(2):
            net(batch(step)).sum().backward()
            if step == 0:
                session.step()
        lines(session.step if ended_by == "step" else session.stop)
        has_ended_step = session.iteration == 2
        if session.running:
            session.stop()
        assert global_state() == before, f"line {at}"
        assert module_state(net) == modules, f"line {at}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert keeper.iterations == [0, 1], f"line {at}"
        assert session.iteration == (2 if has_ended_step else 1)
        assert logged_lines(folder)["linear_activation_max", 1] == 2.0
        return lines

    whole = end(None, tmp_path / "whole").count
    assert whole > 100
    for at in range(0, whole, 1 if EVERY_LINE else 797):
        end(at, tmp_path / str(at))


TERMINATED = """
from te_precision_callbacks import reference
reference.install()
import os, signal, sys, threading, time, torch, transformer_engine.pytorch as te
from datetime import timedelta
from torch import distributed as dist
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
if how == "in a step":
    lines = []
    sys.settrace(lambda frame, event, argument: (lines.append(0), len(lines) == 100 and os.kill(os.getpid(), 15))[0])
    session.step()
if how == "in a collective":
    threading.Timer(0.2, os.kill, [os.getpid(), 15]).start()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=100))
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
@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("handled", 5, marks=pytest.mark.extended),
        ("forked", -signal.SIGTERM),
        ("in a step", -signal.SIGTERM),
        pytest.param("in a collective", -signal.SIGTERM, marks=pytest.mark.extended),
    ],
)
def test_sigterm_keeps_all_steps_and_a_fork_writes_nothing(tmp_path: Path, how: str, status: int) -> None:
    result = run([executable(whole=True), "-c", TERMINATED, how, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert result.returncode == status, result.stderr
    # After a handler of the script, the process ends by SystemExit, and the session is stopped.
    assert largest_in_log(tmp_path) == ({0: 1.0, 1: 2.0} if how == "handled" else {0: 1.0})
    stack = [path.read_text() for path in tmp_path.rglob("sigterm.txt")]
    assert len(stack) == (how != "handled")
    assert all('File "<string>", line ' in text for text in stack)
    ended = "the end of the process (exit status not known)" if how == "handled" else "SIGTERM"
    assert outcome_notes(open_run(tmp_path)) == [
        f"The run was ended by {ended} after step {int(how == 'handled')}: the steps until then were checked."
    ]
    if how == "forked":
        assert result.stdout.split() == ["None", "None", "child", str(int(signal.SIGTERM))]
        assert result.stderr.count("forked") == 1


@pytest.mark.processes
@pytest.mark.extended
def test_sigterm_of_a_forked_process_does_not_end_the_run(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        train(session, net, 2)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        (trace,) = tmp_path.rglob("sigterm.txt")
        assert not trace.read_bytes()
    assert not trace.exists()
    assert open_run(tmp_path).segments[-1].status == "ended"


KILLED = """
from te_precision_callbacks import reference
reference.install()
import os, sys, torch, transformer_engine.pytorch as te
from te_precision_callbacks import InspectSession
from tests.conftest import statistics

folder, steps = sys.argv[1:]
net = te.Linear(32, 32)
session = InspectSession(statistics(), model=net, log_dir=folder).start()
for step in range(int(steps)):
    loss = net(torch.full((16, 32), step + 1.0)).sum()
    loss.backward()
    session.log({"loss": loss})
    session.step()
os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
@pytest.mark.parametrize("steps", [1, 30])
def test_all_steps_are_on_disk_when_a_process_is_killed(tmp_path: Path, steps: int) -> None:
    killed = run([executable(whole=True), "-c", KILLED, str(tmp_path), str(steps)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert largest_in_log(tmp_path) == {step: step + 1.0 for step in range(steps)}
    recorded = open_run(tmp_path)
    assert recorded.segments[-1].status == "stopped without an end"
    assert recorded.steps["iteration"].to_pylist() == list(range(steps))
    assert list(recorded.metrics["loss"].iterations) == list(range(steps))
    values = recorded.values(recorded.select(tensor="activation", statistic="max"))
    assert values["value"].to_pylist() == [step + 1.0 for step in range(steps)]


@pytest.mark.extended
def test_a_second_ctrl_c_ends_a_wait_in_a_step_and_in_the_end(tmp_path: Path) -> None:
    class Waits(Keeper):
        """Waits for Ctrl-C, as for another rank that never comes."""

        presses = 0

        def close(self, error: BaseException | None) -> None:
            for _ in range(2):
                self.presses += 1
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second Ctrl-C has not come through")

        def write(self, records: StepRecords) -> None:
            super().write(records)
            if records.iteration == 1:
                self.close(None)

    waits, net = Waits(), te.Linear(32, 32)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[waits]).start()
    for step in range(3):
        net(batch(step)).sum().backward()
        with pytest.raises(KeyboardInterrupt) if step == 1 else contextlib.nullcontext():
            session.step()
    assert (session.iteration, waits.iterations, waits.presses) == (3, [0, 1, 2], 2)
    with pytest.raises(KeyboardInterrupt):
        session.stop()
    assert waits.presses == 4
    assert {step for _, step in logged_lines(tmp_path)} == {0, 1, 2}


ENDED = """
from te_precision_callbacks import reference
reference.install()
import os, sys, torch, transformer_engine.pytorch as te
from te_precision_callbacks import InspectSession
from tests.conftest import statistics

how, folder = sys.argv[1:]
os.environ["TE_PRECISION_QUIET"] = "0"
if how == "prompt":
    sys.ps1 = ">>> "
net = te.Linear(32, 32)
session = InspectSession(statistics(), model=net, log_dir=folder).start()
for step in range(2):
    net(torch.full((16, 32), step + 1.0)).sum().backward()
    if step == 0:
        session.step()
if how == "shape":
    with te.autocast(enabled=True):
        net(torch.ones(7, 32))
raise KeyboardInterrupt if how == "ctrl-c" else ValueError("the script's own")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "status", "ended_by"),
    [
        ("ctrl-c", -signal.SIGINT, "Ctrl-C"),
        ("prompt", 1, "the end of the process"),
        ("shape", 1, "ValueError: FP8 execution"),
    ],
)
def test_an_uncaught_exception_is_in_the_verdict_and_in_the_log(
    tmp_path: Path, how: str, status: int, ended_by: str
) -> None:
    """At an interactive prompt the last exception has not ended the process."""
    result = run([executable(whole=True), "-c", ENDED, how, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert result.returncode == status, result.stderr
    assert f"te-precision: stopped: {ended_by}" in result.stderr
    assert logged_lines(tmp_path)["linear_activation_max", 1] == 2.0
    errors = [finding.rule for finding in diagnose(tmp_path).findings if finding.severity == "error"]
    assert errors == (["failed-run"] if how == "shape" else [])
    assert ended_by in "".join(outcome_notes(open_run(tmp_path)))
    assert ("the layer 'linear' cannot run the GEMM" in result.stderr) == (how == "shape"), "also below the traceback"


def calls_of_stop(folder: Path, layers: int) -> int:
    net = torch.nn.Sequential(*(te.Linear(16, 16, bias=False) for _ in range(layers)))
    session = InspectSession(statistics(), model=net, log_dir=folder).start()
    train(session, net, 1, x=torch.ones(16, 16))
    session.flush(60.0)
    called: list[str] = []
    sys.setprofile(lambda frame, event, argument: called.append(event))
    try:
        session.stop(ValueError("ended"))
    finally:
        sys.setprofile(None)
    return called.count("call")


def test_what_a_layer_adds_to_the_end_is_bounded(tmp_path: Path) -> None:
    """At 20,000 layers 600 calls are 12 million, which take a second or two."""
    calls_of_stop(tmp_path / "first", 20)  # imports its dependencies
    few, many = (calls_of_stop(tmp_path / str(layers), layers) for layers in (20, 60))
    assert (many - few) / 40 <= 600
