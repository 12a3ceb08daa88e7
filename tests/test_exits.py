"""The exception that ends a process, in new Pythons: a forked process handles it before."""

import re
import sys

import pytest

from tests.reference.processes import run

BEGIN = """
import atexit, contextlib, sys, threading
from te_precision_callbacks.base.exits import ExitWatch, error_text
watch = ExitWatch()
watch.begin()
atexit.register(lambda: print(error_text(watch.error) if watch.error else None))
"""
EXITS = {
    "sys.exit(3)": "SystemExit: 3",
    "sys.exit()": "SystemExit",
    "sys.exit('no data')": "SystemExit: 1: no data",
    "sys.exit('0')": "SystemExit: 1: 0",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise SystemExit(True)": "SystemExit: 1",
    "raise SystemExit(256)": "SystemExit",
    "raise SystemExit(None)": "SystemExit",
    "raise SystemExit(False)": "SystemExit",
    "(lambda: sys.exit(3))()": "SystemExit: 3",
    "exec('sys.exit(3)')": "SystemExit: 3",
    "with contextlib.nullcontext(): sys.exit(3)": "SystemExit: 3",
    "threading.Thread(target=sys.exit, args=(3,)).start()": "None",
    "with contextlib.suppress(SystemExit): sys.exit(3)": "None",
    "watch.end(); sys.exit(3)": "None",
    "pass": "None",
}


@pytest.mark.processes
@pytest.mark.parametrize("code", EXITS)
def test_the_exception_that_ends_a_process(code: str) -> None:
    ended = run([sys.executable, "-c", f"{BEGIN}\n{code}"])
    assert ended.stdout.strip() == EXITS[code], ended.stderr
    if code.startswith("watch.end()"):
        assert ended.returncode == 3
    else:
        status = re.match(r"SystemExit: (\d)", EXITS[code])
        assert ended.returncode == (int(status[1]) if status else 0)
