"""Runs that dump, in a separate process: python dumps_script.py CASE FOLDER [RANK]"""

# ruff: noqa: E402  # the backend is installed before what imports Transformer Engine

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.conftest import feature, statistics


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
    struct = [{"tensor": "activation"}, {"tensor": "output", "when": "nonfinite"}]
    dumped = feature("DumpTensors", ["linear"], high_precision_tensor=True, tensors_struct=struct)
    session = InspectSession({"s": dumped}, model=net, log_dir=folder).start()
    for number in range(3):
        if number == 2:
            net.bias.data[3] = torch.nan
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


def ranks(folder: Path, rank: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    net = te.Linear(32, 32)
    asked = statistics(stats=["max"]) | config(when="max > 5")
    with InspectSession(asked, model=net, log_dir=folder / "log") as session:
        for number in range(3):
            value = 1.0 + 8 * rank if number == 1 else 1.0
            net(torch.full((16, 32), value)).sum().backward()
            session.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, folder, *rank = sys.argv[1:]
    cases = {"killed": killed, "not stopped": not_stopped, "forked": forked, "ranks": ranks}
    cases[case](Path(folder), *map(int, rank))
