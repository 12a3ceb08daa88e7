"""Scripts in processes of their own that need not import everything anew: forked from one that has done it.

Importing torch, Transformer Engine and a trainer takes a process several seconds, of which a test that is about
something else has nothing. A test of what holds from a process's start on uses tests/reference/processes.py.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

TIMEOUT = 240.0  # seconds

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.forked_imports"])


@dataclass(frozen=True)
class Ended:
    """How a script ended; ``returncode`` is that of ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A script that runs beside this process."""

    def __init__(self, script: Path, arguments: Sequence[str], **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._process: ForkServerProcess = _context.Process(
            target=_run, args=(str(script), list(arguments), environment, list(map(str, self._outputs)))
        )
        self._process.start()

    def end(self) -> Ended:
        """Wait for its end; it is killed after TIMEOUT seconds."""
        self._process.join(TIMEOUT)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        stdout, stderr = (path.read_text() for path in self._outputs)
        self._folder.cleanup()
        return Ended(code, stdout, stderr)


def ranks(script: Path, arguments: Sequence[Sequence[str]]) -> list[Ended]:
    """Run a script once for each rank, side by side, with the rank's own arguments."""
    started = [Running(script, given) for given in arguments]
    return [running.end() for running in started]


def launched(script: Path, arguments: Sequence[str], *, world: int = 2) -> list[Ended]:
    """Run a script as ``torchrun`` does: each rank finds in the environment which it is, and where to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(world):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank}
        started.append(Running(script, arguments, **{name: str(value) for name, value in own.items()}))
    return [running.end() for running in started]


def _run(script: str, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    for descriptor, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
