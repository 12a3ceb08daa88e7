"""One client, run twice: without the debugger and with it.

Usage::

    outcome = run(client, source, environment, folder)
    outcome.plain.folder  # the spy's notes, see inside/spying.py
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import Environment
from tests.clients.known import Client

HERE = Path(__file__).parent
INSIDE = HERE / "inside" / "run.py"
CONFIG = HERE / "watched.yaml"
LIMIT_SECONDS = 1200
TERMINATION_SECONDS = 60  # torchrun gives its ranks 30


@dataclass(frozen=True)
class Run:
    """A client's script, run to its end.

    Attributes:
        code: its exit code; None if it ran past the limit.
        record: the folder of the spy's notes.
        logs: the folder of the debugger's logs, whether or not there are any.
        output: standard output and error together.
    """

    code: int | None
    record: Path
    logs: Path
    output: str


def run(client: Client, source: Path, environment: Environment, folder: Path, *, watched: bool) -> Run:
    """Run a client's script.

    Args:
        client: which one.
        source: its folder; it is copied, and not written to.
        environment: its environment variables.
        folder: where it runs; emptied first.
        watched: with the debugger.
    """
    shutil.rmtree(folder, ignore_errors=True)
    work, record, logs = folder / "work", folder / "record", folder / "logs"
    shutil.copytree(source, work, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    for make in client.stand_ins:
        make(work, environment.python)
    launcher = [
        str(environment.command(word)) if word in ("torchrun", "accelerate") else word for word in client.launcher
    ]
    command = [str(environment.command("te-precision")), "run", *launcher, str(INSIDE), *client.arguments]
    code, output = _done(command, work, _variables(client, environment, record, logs, watched=watched))
    (folder / "output.txt").write_text(output, encoding="utf-8")
    return Run(code, record, logs, output)


def _variables(client: Client, environment: Environment, record: Path, logs: Path, *, watched: bool) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("CLIENTS_")}
    variables |= {
        "PATH": f"{environment.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(environment.folder / "huggingface"),
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TE_PRECISION_REFERENCE_CAPABILITY": client.capability,
        "CLIENTS_RECORD": str(record),
        **client.variables,
    }
    if watched:
        variables |= {
            "CLIENTS_FRONT_DOOR": client.integration,
            "CLIENTS_CONFIG": str(CONFIG),
            "CLIENTS_LOGS": str(logs),
        }
    return variables


def _done(command: list[str], folder: Path, variables: dict[str, str]) -> tuple[int | None, str]:
    """The exit code, or None, and the output."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, _ended(process)
    except BaseException:  # Ctrl-C
        _ended(process)
        raise


def _ended(process: subprocess.Popen[str]) -> str:
    """End a run, and return its output. A launcher's ranks are in sessions apart from it: it has to end them."""
    process.terminate()
    try:
        return process.communicate(timeout=TERMINATION_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
