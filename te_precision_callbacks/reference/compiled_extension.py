"""Whether the compiled Transformer Engine can be used on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

COMPILED_MODULE = "transformer_engine_torch"
"""The module of Transformer Engine's compiled extension."""

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""What launchers tell each of the processes that they start on a machine."""

_HOLDS_FOR = 600.0
"""The seconds for which an answer holds: all processes of a launch begin in them."""


def why_unavailable() -> str | None:
    """None if the compiled Transformer Engine can be imported, else its error.

    The import is tried in a separate process: a failed import would leave parts behind, and a package without its
    compiled part raises RuntimeError instead of ImportError. Of the processes that a launcher has started on a machine,
    one tries, and the others take its answer.
    """
    with contextlib.suppress(OSError), _shared() as file:
        if file is not None:
            return _asked_once(file)
    return _tried()


def _tried() -> str | None:
    code = "import transformer_engine.pytorch"
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the import ended with status {done.returncode}"


@contextlib.contextmanager
def _shared() -> Iterator[IO[str] | None]:
    """The file of the processes of one launch on this machine, which have one parent, locked; None where this process
    is of no launch."""
    if not any(os.environ.get(name) for name in _LOCAL_RANKS):
        yield None
        return
    folder = Path(tempfile.gettempdir()) / f"te-precision-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        yield None
        return
    own = [os.uname().nodename, os.getppid(), sys.executable, os.environ.get("PYTHONPATH")]
    launch = hashlib.sha256(json.dumps(own).encode())
    with (folder / f"compiled-{launch.hexdigest()[:16]}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield file


def _asked_once(file: IO[str]) -> str | None:
    """The answer in a file, or a new one, which is left there."""
    if time.time() - os.fstat(file.fileno()).st_mtime < _HOLDS_FOR:
        file.seek(0)
        with contextlib.suppress(ValueError):
            told = json.load(file)["unavailable"]
            return None if told is None else str(told)
    found = _tried()
    with contextlib.suppress(OSError):  # a full disk: the next one tries too
        file.truncate(0)
        file.write(json.dumps({"unavailable": found}))
        file.flush()
    return found
