"""The exception that ends a process, in new Pythons: a forked process handles it before."""

import sys

import pytest

from tests.reference.processes import run

BEGIN = """
import atexit, contextlib, sys
from te_precision_callbacks.base.exits import ExitWatch, error_text
watch = ExitWatch()
watch.begin()
atexit.register(lambda: print(error_text(watch.error) if watch.error else None))
"""
EXITS = {
    "sys.exit(3)": "SystemExit: 3",
    "sys.exit()": "SystemExit",
    "sys.exit('no data')": "SystemExit: 1: no data",
    "raise SystemExit(3)": "SystemExit: 3",
    "(lambda: sys.exit(3))()": "SystemExit: 3",
    "exec('sys.exit(3)')": "SystemExit: 3",
    "with contextlib.nullcontext(): sys.exit(3)": "SystemExit: 3",
    "watch.end(); sys.exit(3)": "None",
    "pass": "None",
}


@pytest.mark.processes
@pytest.mark.parametrize("code", EXITS)
def test_the_exception_that_ends_a_process(code: str) -> None:
    ended = run([sys.executable, "-c", f"{BEGIN}\n{code}"])
    assert ended.stdout.strip() == EXITS[code], ended.stderr
    assert ended.returncode == {"sys.exit()": 0, "pass": 0, "sys.exit('no data')": 1}.get(code, 3)
