"""Python processes for the tests of what holds for a whole process.

They are forked from a process with the libraries imported, but not Transformer Engine or this project, unless a test
is about that: then they are ``fresh``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.forked import executable

REPOSITORY = Path(__file__).parents[2]


def run(command: list[str], *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in an environment without the variables of the test process's reference backend."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TE_PRECISION_REFERENCE")}
    clean["PYTHONPATH"] = str(REPOSITORY)
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=240, check=False)


def python(
    code: str, *, cwd: Path | None = None, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    return run([sys.executable if fresh else executable(), "-W", "ignore", "-c", dedent(code)], cwd=cwd, **environment)


def answers(code: str, *, cwd: Path | None = None, fresh: bool = False, **environment: str) -> Any:
    """Run ``code``, which ends well, and return its variable ``answer``."""
    done = python(dedent(code) + "\nimport json; print(json.dumps(answer))", cwd=cwd, fresh=fresh, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def te_precision(
    *arguments: str, cwd: Path | None = None, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable if fresh else executable(), "-W", "ignore", "-m", "te_precision_callbacks", *arguments]
    return run(command, cwd=cwd, **environment)
