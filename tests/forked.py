"""Processes that start in a tenth of a second: forked from a process with all imports.

Importing torch, Transformer Engine and a trainer takes a process up to ten seconds, useless to a test of
something else. A test of what holds from a process's start on, such as the order of imports, uses
``sys.executable``.
"""

import atexit
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

TIMEOUT = 240.0  # seconds
REPOSITORY = Path(__file__).parents[1]

SHARED = "TESTS_FORKED"
"""Holds the id of the process that runs the tests, and a folder; the workers of pytest-xdist inherit it."""

if SHARED not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="forked-")
    atexit.register(_folder.cleanup)
    os.environ[SHARED] = f"{os.getpid()}:{_folder.name}"

_servers: list[subprocess.Popen[bytes]] = []


def executable(*, whole: bool = False) -> str:
    """A program that is called as ``sys.executable`` is, and starts in a tenth of a second.

    Script, ``-c`` or ``-m``, environment, folder, open files, signals and exit status are as there; ``sitecustomize``
    is imported; and ``sys.executable`` is this program, so that its own child processes are forked too.

    Args:
        whole: besides the libraries of tests/forking/libraries.py, Transformer Engine on the reference backend and this
            project are imported; else the process begins without them.
    """
    owner, _, folder = os.environ[SHARED].partition(":")
    name = "whole" if whole else "libraries"
    program = Path(folder, f"python-{name}")
    server = [executable() if whole else sys.executable, "-m", "tests.forking.server"]
    with FileLock(f"{program}.lock"):
        if not program.exists():
            environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT_VARIABLE}
            # Without OpenMP's threads, which a forked process would not have.
            environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
            with Path(f"{program}.log").open("w") as log, socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{program}.socket")
                listener.listen(128)  # who comes before all is imported waits
                process = subprocess.Popen(
                    [*server, owner, str(program), str(listener.fileno()), f"tests.forking.{name}"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
                _servers.append(process)  # it runs on: Python warns of a process that is forgotten
            client = [sys.executable, "-IS", str(REPOSITORY / "tests" / "forking" / "client.py"), str(program)]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
            program.chmod(0o700)
    return str(program)


@dataclass(frozen=True)
class Ended:
    """Result of a script; ``returncode`` as in ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A script in another process, with the imports of ``executable``."""

    def __init__(self, script: Path, arguments: Sequence[str], *, whole: bool = True, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        environment.pop(ENVIRONMENT_VARIABLE, None)  # it has the backend
        with self._outputs[0].open("w") as stdout, self._outputs[1].open("w") as stderr:
            self._process = subprocess.Popen(
                [executable(whole=whole), str(script), *arguments], env=environment, stdout=stdout, stderr=stderr
            )

    def end(self, timeout: float = TIMEOUT) -> Ended:
        """Wait for the script to end; kill it after the timeout."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        stdout, stderr = (path.read_text() for path in self._outputs)
        self._folder.cleanup()
        return Ended(code, stdout, stderr)


def ranks(script: Path, arguments: Sequence[Sequence[str]], timeout: float = TIMEOUT) -> list[Ended]:
    """Run a script once for each rank, side by side, with the rank's own arguments; each until the timeout."""
    started = [Running(script, given) for given in arguments]
    return [running.end(timeout) for running in started]


def launched(script: Path, arguments: Sequence[str], *, world: int = 2, whole: bool = True) -> list[Ended]:
    """Run a script as ``torchrun`` does: each rank finds in the environment which it is, and where to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(world):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank}
        own_variables = {name: str(value) for name, value in own.items()}
        started.append(Running(script, arguments, whole=whole, **own_variables))
    return [running.end() for running in started]
