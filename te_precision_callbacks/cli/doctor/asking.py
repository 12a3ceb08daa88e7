"""Calls a function in another Python process, in which an import may fail, crash or hang.

ask(torch_version, os.environ)  # "2.13.0"
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

_SECONDS = 180.0
"""After this time a process counts as hanging."""


class NoAnswerError(Exception):
    """The process ended without an answer; the message says how."""


def ask(function: Callable[[], Any], environment: Mapping[str, str]) -> Any:
    """What the function of a module returns in a process with this environment, as JSON gives it back.

    Raises:
        NoAnswerError: the process failed, crashed or hung.
    """
    name = function.__name__
    code = f"from {function.__module__} import {name}; import json; print(json.dumps({name}()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"the process had not ended after {_SECONDS:.0f} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise NoAnswerError(lines[-1] if lines else f"the process ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])  # the lines before are what imports have printed
