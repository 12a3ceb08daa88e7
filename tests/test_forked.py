"""``forked.executable()`` does what ``sys.executable`` does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import executable

pytestmark = [pytest.mark.processes, pytest.mark.extended]

FOUND = """
import os, subprocess, sys
print(sys.argv, sys.path[:2], sys.stdin.read(), os.environ["GIVEN"], os.getcwd(), __name__, globals().get("__file__"))
print(subprocess.run([sys.executable, "-c", "print('a child')"], capture_output=True, text=True).stdout)
print(sorted(name for name in sys.modules if name.startswith(("te_precision_callbacks", "transformer_engine"))))
"""

SCRIPTS = {
    "finds": FOUND,
    "exits": "import sys; sys.exit(7)",
    "exits with a message": "import sys; sys.exit('the reason')",
    "raises": "def inner():\n    raise ValueError('the reason')\ninner()",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "raise KeyboardInterrupt",
    "has more to do": "import atexit, threading; atexit.register(print, 'end'); threading.Timer(0, print, 'x').start()",
    "is spawned": """
import multiprocessing
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.map(abs, [-1, -2]))
""",
}


def runs(program: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TE_PRECISION")}
    environment |= {"PYTHONPATH": str(folder / "path"), "GIVEN": "by the parent"}
    done = subprocess.run(
        [program, "-W", "ignore", *arguments],
        cwd=folder,
        env=environment,
        input="the input",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("what", [*SCRIPTS, "code", "a module"])
def test_a_script_is_run_as_python_runs_it(tmp_path: Path, what: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS.get(what, FOUND))
    called = {"code": ["-c", FOUND], "a module": ["-m", "script"]}.get(what, ["script.py"])
    status, stdout, stderr = expected = runs(sys.executable, tmp_path, *called, "an argument")
    assert status or stdout or stderr
    assert runs(executable(), tmp_path, *called, "an argument") == expected
