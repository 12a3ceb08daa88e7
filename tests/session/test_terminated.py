"""SIGTERM and SIGUSR1, wherever the main thread is: the process ends by the signal, with what the host had on the disk;
handlers and descriptors of others stay as they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.plugins.environments import SLURMEnvironment

from te_precision_callbacks import InspectSession
from te_precision_callbacks.lightning import PrecisionDebugCallback
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import endings
from te_precision_callbacks.session.endings import Wakeup
from te_precision_callbacks.sinks import writer_thread
from tests.conftest import Keeper, statistics
from tests.forked import REPOSITORY, executable
from tests.lightning.models import Plain, loader, logged_lines, trainer

WHOLE, COMPLETE = [0, 1, 2, 3], [0, 1, 2]
ON_DISK = {
    "loader": WHOLE,
    "worker": WHOLE,
    "stop": WHOLE,
    "step": WHOLE,
    "collective": COMPLETE,
    "disk": [],
}
"""State of benchmarks/sigterm.py -> the steps whose numbers are kept: the last one was gathered, and not stepped."""


@pytest.mark.slow
def test_sigterm_ends_a_process_wherever_its_main_thread_is() -> None:
    """Also a process whose C code never lets another thread run, but that one by SIGKILL alone."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [executable(whole=True), str(REPOSITORY / "benchmarks" / "sigterm.py"), "--json"]
    started = {
        state: subprocess.Popen(
            [*command, "--states", state, "--patience", "1" if state == "gil" else "120"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for state in (*ON_DISK, "gil")
    }
    ended = {state: process.communicate(timeout=240) for state, process in started.items()}
    found = {state: json.loads(told)[0] for state, (told, _) in ended.items() if told}
    assert found.keys() == started.keys(), ended
    assert {state: row["status"] for state, row in found.items()} == {
        state: -signal.SIGKILL if state == "gil" else -signal.SIGTERM for state in found
    }
    for state, steps in ON_DISK.items():
        assert found[state]["log"] == found[state]["records"] == steps, (state, found[state]["said"])
    assert not found["step"]["said"], "a rank waits for others in Python, which handles signals"
    assert "in a call that does not return" in found["collective"]["said"]
    assert "distributed_c10d.py" in found["collective"]["said"], "where it is"
    for state in ("stop", "disk"):
        assert "stop() has not ended" in found[state]["said"]


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


@pytest.mark.usefixtures("only_asked")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_the_script_handles_is_its_own_and_what_the_host_has_is_written(
    tmp_path: Path, handler: Callable[[int], list[Any]], number: int
) -> None:
    got = handler(number)
    own = signal.getsignal(number)
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        trained(net, session, 3)
        os.kill(os.getpid(), number)
        until(lambda: logged(tmp_path) == {0, 1, 2})
        assert got == [(number, None)]
        assert signal.getsignal(number) is own
        trained(net, session, 1)
    assert signal.getsignal(number) is own
    assert len(open_run(tmp_path).steps) == 4


@pytest.mark.usefixtures("only_asked")
def test_the_handler_of_a_script_can_flush(tmp_path: Path, handler: Callable[..., list[Any]]) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        got = handler(signal.SIGUSR2, lambda: (session.flush(60.0), logged(tmp_path)))
        trained(net, session, 2)
        signal.raise_signal(signal.SIGUSR2)
        (_, (written, steps)), *_ = got
        assert written
        assert steps == {0, 1}
    assert session.flush()


def test_the_descriptor_of_somebody_else_goes_on_and_is_set_again() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    heard: list[int] = []
    handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        wakeup = Wakeup(heard.append)
        signal.raise_signal(signal.SIGUSR2)
        assert os.read(reader, 1) == bytes([signal.SIGUSR2])
        until(lambda: heard == [signal.SIGUSR2])
        wakeup.remove()
        wakeup.remove()
        assert signal.set_wakeup_fd(writer) == writer

        wakeup = Wakeup(heard.append)
        os.close(writer)
        again = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
        assert again == writer, "it has the number now"
        signal.raise_signal(signal.SIGUSR2)
        until(lambda: len(heard) == 2)
        wakeup.remove()
        assert signal.set_wakeup_fd(-1) == -1, "what was closed is not set again"
        os.close(again)
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, handler)
        os.close(reader)


def test_asyncio_hears_of_its_signals_before_and_within_a_session(tmp_path: Path) -> None:
    net = te.Linear(32, 32)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, came.set)
        session = InspectSession(statistics(), model=net, log_dir=tmp_path).start()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            await came.wait()
            came.clear()
            loop.remove_signal_handler(signal.SIGUSR2)
            loop.add_signal_handler(signal.SIGUSR2, came.set)  # the second time within the session
        session.stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert await came.wait()

    asyncio.run(main())


@pytest.mark.processes
def test_the_signal_of_a_forked_process_is_not_heard_here() -> None:
    heard: list[int] = []
    handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    wakeup = Wakeup(heard.append)
    try:
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGUSR2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        signal.raise_signal(signal.SIGUSR2)
        until(lambda: bool(heard))
        assert heard == [signal.SIGUSR2], "the child's was there first"
    finally:
        wakeup.remove()
        signal.signal(signal.SIGUSR2, handler)


def test_before_a_signal_ends_the_process_no_gpu_is_asked_and_the_summary_is_written(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = te.Linear(32, 32)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]).start()
    trained(net, session, 2)
    net(torch.full((16, 32), 9.0)).sum().backward()
    assert session._run is not None
    assert session._run._ends is not None
    monkeypatch.setattr(session._run._ends.termination, "came", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    session.stop(ValueError("ended by a signal"))
    assert keeper.iterations == [0, 1]
    assert "Problems found: 1 error" in (tmp_path / "precision_summary.txt").read_text()
    assert "The statistics of iteration 2 are not written: they are on the GPU" in caplog.text


def test_lightning_requeues_a_job_of_slurm_as_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_asked: None
) -> None:
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/requeued\n")
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    seen: list[int] = []

    class Preempted(Plain):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                until(lambda: (tmp_path / "requeued").exists())
                until(lambda: logged(tmp_path / "debug") == {0, 1})
                seen.append(batch_idx)

    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path / "debug")
    fitting = trainer(tmp_path, callbacks=[callback], plugins=[SLURMEnvironment(auto_requeue=True)])
    fitting.fit(Preempted(), loader(4))
    assert seen == [2]
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "1"]
    assert len(list(tmp_path.glob("hpc_ckpt_*.ckpt"))) == 1
    assert callback.session is not None
    assert callback.session.iteration == 4, "training has gone on"
    assert before == {number: signal.getsignal(number) for number in before}


def calls_of_stop(folder: Path, layers: int, *, hurried: bool) -> int:
    """How many functions stop() calls."""
    net = torch.nn.Sequential(*(te.Linear(16, 16, bias=False) for _ in range(layers)))
    session = InspectSession(statistics(), model=net, log_dir=folder).start()
    net(torch.ones(16, 16)).sum().backward()
    session.step()
    session.flush(60.0)
    assert session._run is not None
    assert session._run._ends is not None
    session._run._ends.termination.came = hurried
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
def test_what_a_layer_adds_to_the_end_is_bounded(
    tmp_path: Path, hurried: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 20,000 layers 600 calls are 12 million, which take a second or two."""
    monkeypatch.setattr("te_precision_callbacks.session.summary.MOST_LAYERS", 10)
    calls_of_stop(tmp_path / "first", 20, hurried=hurried)  # imports what it needs
    few, many = (calls_of_stop(tmp_path / str(layers), layers, hurried=hurried) for layers in (20, 60))
    assert (many - few) / 40 <= most


def test_the_thread_is_patient_with_a_main_thread_that_has_begun() -> None:
    assert endings.GRACE < endings.LONGEST_FLUSH < endings.LONGEST_STOP


def test_a_flush_to_a_disk_that_failed_is_not_taken_for_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path / "file") as session:
        net(torch.ones(16, 32)).sum().backward()
        session.step()
        assert not session.flush(0.5)
