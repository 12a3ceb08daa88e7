"""Time from SIGTERM to the end of a process with a session, and the steps on disk.

python benchmarks/sigterm.py                    # the table of docs/session.md; --states step, --json
python benchmarks/sigterm.py --without-session  # the same scripts without a session

Each state is a process that trains one layer for a few steps (the last one is gathered and not stepped), and then stays
in the state until SIGTERM ends it. After ``--patience`` seconds it gets SIGKILL instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

STEPS = 3
"""The steps that are complete; one more is gathered."""

LONG = 600
"""Seconds that no state lasts."""

STATES = {
    "idle": "between two steps, asleep",
    "collective": "in an all-reduce of the training that a rank never joins",
    "step": "in session.step(), waiting for a rank",
    "stop": "in session.stop(), in a sink that never closes",
    "disk": "asleep; every write of the log and the records hangs",
    "loader": "waiting for a worker of a DataLoader",
    "worker": "asleep, while a forked worker gets a SIGTERM of its own first",
    "gil": "in C code that never lets another thread run",
}


# --------------------------------------------------------------------------------------------- the process of a state


class _NeverCloses:
    """A sink that waits in C++ when it is closed."""

    def start(self, run: Any) -> None:
        """Nothing."""

    def write(self, records: Any) -> None:
        """Nothing."""

    def close(self, error: BaseException | None) -> None:
        """Wait."""
        _wait_for_a_key()


class _Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(LONG)
        return index


def _wait_for_a_key() -> None:
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LONG)
    )
    store.get("never")


def _hang_the_disk() -> None:
    """Let the threads that write wait in the kernel, as on a server of files that does not answer."""
    from te_precision_callbacks.runs.run_files import AppendedFile
    from te_precision_callbacks.sinks.log_file import LogFile

    silent, _ = os.pipe()
    LogFile.append = lambda self, text: os.read(silent, 1)  # type: ignore[assignment,method-assign]
    AppendedFile.write = lambda self, data: len(os.read(silent, 1))  # type: ignore[method-assign]


def _peer(state: str, folder: Path) -> Callable[[], None] | None:
    """Fork a second rank in states that need it; return, in rank 1, its action after training."""
    if state not in ("collective", "step"):
        return None
    until, held = os.pipe()
    rank = 0 if os.fork() else 1
    os.close(held if rank else until)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=LONG)
    )

    def stay() -> None:
        os.read(until, 1)  # until rank 0 has ended
        os._exit(0)

    return stay if rank else None


def be(state: str, folder: Path, *, observed: bool) -> None:
    """Train, print "ready", and stay in a state."""
    from te_precision_callbacks import reference

    reference.install_where_needed()
    import transformer_engine.pytorch as te

    from te_precision_callbacks import InspectSession

    if state == "disk":
        _hang_the_disk()
    stay = _peer(state, folder)
    net = te.Linear(32, 32)
    session: InspectSession | None = None
    statistics = {
        "enabled": True,
        "layers": {"layer_types": ["linear"]},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"], "freq": 1}
        },
    }
    if observed:
        sinks: list[Any] = [_NeverCloses()] if state == "stop" else []
        session = InspectSession({"statistics": statistics}, model=net, log_dir=folder, sinks=sinks).start()
    for step in range(STEPS + 1):
        net(torch.full((16, 32), step + 1.0)).sum().backward()
        if session is not None and step < STEPS:
            session.step()
            if step == 0:  # the files are there, and what writes them is imported
                session.flush(0.1 if state == "disk" else LONG)
    if stay is not None:
        stay()
    if state == "worker":
        _end_a_worker()
    if state == "loader":
        batches = iter(torch.utils.data.DataLoader(_Slow(), num_workers=1))
    print("ready", flush=True)
    match state:
        case "collective":
            torch.distributed.all_reduce(torch.ones(1))
        case "step" if session is not None:
            session.step()
        case "step":
            torch.distributed.all_reduce(torch.ones(1))
        case "stop" if session is not None:
            session.stop()
        case "loader":
            next(batches)
        case "gil":
            import ctypes

            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time waits for ever, whatever signals come
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    time.sleep(LONG)


def _end_a_worker() -> None:
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b".")
        time.sleep(LONG)
    os.read(begun, 1)  # Python forgets a signal that comes while it forks
    os.kill(child, signal.SIGTERM)
    if os.WTERMSIG(os.waitpid(child, 0)[1]) != signal.SIGTERM:
        raise RuntimeError("the worker was not ended by its signal")
    time.sleep(0.5)  # whoever took the worker's signal for one of this process has ended it by now


# ------------------------------------------------------------------------------------------------------ what is seen


def measure(state: str, folder: Path, *, observed: bool, patience: float, before: float) -> dict[str, Any]:
    """Start a state, send SIGTERM, and read the files.

    Args:
        state: of :data:`STATES`.
        folder: for the session's files.
        observed: whether there is a session.
        patience: seconds until SIGKILL.
        before: the seconds from the start of the state to the signal: fewer than pass before the log is written by
            itself.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--be", state, "--folder", str(folder)]
    command += [] if observed else ["--without-session"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
        ready = process.stdout.readline() if process.stdout is not None else ""
        time.sleep(before)
        begun = time.perf_counter()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        killer = threading.Timer(patience, process.kill)
        killer.start()
        status = process.wait()
        seconds = time.perf_counter() - begun
        killer.cancel()
        said.seek(0)
        errors = said.read()
    if ready.strip() != "ready":
        raise RuntimeError(f"the state {state!r} was not reached: {errors}")
    return {
        "state": state,
        "seconds": seconds,
        "status": status,
        "log": sorted(set(_logged(folder))),
        "records": _recorded(folder),
        "said": errors,
    }


def _logged(folder: Path) -> Iterator[int]:
    for file in folder.glob("nvdlfw_inspect_statistics_logs/*rank-0.log"):
        for line in file.read_text().splitlines():
            if "iteration=" in line:
                yield int(line.partition("iteration=")[2].split()[0])


def _recorded(folder: Path) -> list[int]:
    from te_precision_callbacks.runs import RunError, open_run
    from te_precision_callbacks.runs.run_files import FOLDER

    with contextlib.suppress(RunError):
        return sorted(set(open_run(folder / FOLDER).values().column("iteration").to_pylist()))
    return []


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--without-session", action="store_true")
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--before", type=float, default=0.2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--be", choices=STATES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    observed = not given.without_session
    if given.be:
        be(given.be, given.folder, observed=observed)
        return
    rows = []
    for state in given.states:
        print(f"{state}: {STATES[state]}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(state, Path(folder), observed=observed, patience=given.patience, before=given.before))
    if given.json:
        print(json.dumps(rows))
        return
    print("| state | seconds | exit status | steps in the log | in the records |\n|---|---|---|---|---|")
    for row in rows:
        log, records = (" ".join(map(str, row[key])) or "none" for key in ("log", "records"))
        print(f"| {STATES[row['state']]} | {row['seconds']:.2f} | {row['status']} | {log} | {records} |")


if __name__ == "__main__":
    main()
