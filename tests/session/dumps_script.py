"""Runs that dump, in a separate process: python dumps_script.py CASE FOLDER"""

# ruff: noqa: E402  # the backend is installed before what imports Transformer Engine

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.conftest import feature


def config(**options: Any) -> dict[str, Any]:
    return {"s": feature("DumpTensors", ["linear"], tensors=["activation"], high_precision_tensor=True, **options)}


def killed(folder: Path) -> None:
    net = te.Linear(64, 64)

    def kill() -> None:
        while len(list(folder.rglob("*.safetensors"))) < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with InspectSession(config(), model=net, log_dir=folder) as session:
        for number in range(10_000):
            net(torch.full((1 << 14, 64), float(number)))
            session.step()


def not_stopped(folder: Path) -> None:
    net = te.Linear(64, 64)
    dumped = feature("DumpTensors", ["linear"], high_precision_tensor=True, tensors=["activation", "output"])
    session = InspectSession({"s": dumped}, model=net, log_dir=folder).start()
    for number in range(3):
        net(torch.full((1 << 12, 64), float(number)))
        if number < 2:
            session.step()


def forked(folder: Path) -> None:
    """A child inherits the session, with a writer and logs that are its parent's; it runs the model and ends well."""
    net = te.Linear(64, 64)
    with InspectSession(config(), model=net, log_dir=folder) as session:
        net(torch.full((1 << 14, 64), 1.0))
        child = os.fork()
        if child == 0:
            net(torch.full((16, 64), 2.0))
            session.stop()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        net(torch.full((16, 64), 3.0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, folder = sys.argv[1:]
    cases = {"killed": killed, "not stopped": not_stopped, "forked": forked}
    cases[case](Path(folder))
