"""Runs of several gloo ranks, each in a process that is forked from this one: python files_script.py FOLDER

FOLDER/<case>/<rank>.txt has a line for each file or folder that a rank makes in the log folder, and for each fsync, as
the interpreter itself and a replaced ``os.fsync`` see them. The log folder is FOLDER/<case>/run.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "normal": (4, {}),
    "default": (2, {"config": None}),
    "sigterm": (2, {}),
    "failure": (4, {}),
    "all": (2, {"statistics_log": "all"}),
}


def main(folder: Path) -> None:
    for case, (world, keywords) in CASES.items():
        (folder / case).mkdir()
        children = [os.fork() or in_child(case, rank, world, folder / case, keywords) for rank in range(world)]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (folder / case / "ended.txt").write_text(repr(ended))


def in_child(*arguments: Any) -> NoReturn:
    try:
        run(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run(case: str, rank: int, world: int, folder: Path, keywords: dict[str, Any]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world
    )
    net, log_dir = te.Linear(32, 32), folder / "run"
    optimizer = torch.optim.AdamW(net.parameters())
    count(log_dir, folder / f"{rank}.txt")
    with contextlib.suppress(ValueError):
        with InspectSession(**{"config": statistics(), **keywords}, model=net, log_dir=log_dir) as session:
            for _ in range(2):
                net(torch.ones(16, 32)).sum().backward()
                if case == "default":
                    optimizer.step()
                session.step()
            net(torch.ones(16, 32)).sum().backward()  # the remainder
            torch.distributed.barrier()
            if case == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            if case == "failure" and rank == 1:
                raise ValueError("bad batch")
    torch.distributed.barrier()


def count(log_dir: Path, into: Path) -> None:
    """Count from now on what this process makes in a folder, and its calls of fsync."""
    counted, fsync = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.fsync

    def see(event: str, arguments: Sequence[Any]) -> None:
        makes = event == "os.mkdir" or (event == "open" and arguments[2] & os.O_CREAT)
        if makes and str(arguments[0]).startswith(f"{log_dir}{os.sep}") and not os.path.exists(arguments[0]):
            os.write(counted, f"{Path(str(arguments[0])).relative_to(log_dir)}\n".encode())

    def counting(descriptor: int) -> None:
        os.write(counted, b"fsync\n")
        fsync(descriptor)

    sys.addaudithook(see)
    os.fsync = counting


if __name__ == "__main__":
    main(Path(sys.argv[1]))
