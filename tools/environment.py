"""Set up the project's virtual environment with pip, and say how far that is.

    python tools/environment.py .venv demo    # what examples/byte_lm.py needs
    python tools/environment.py .venv all     # and what the tests and checks need
    python tools/environment.py .venv-newest newest "transformers<5"
    # the same in the newest versions that fit, here with an older transformers

Which packages are needed stands in pyproject.toml, as extras; in which versions, in requirements.lock, which does not
hold for ``newest``. What is set up already is left as it is; an interrupted set-up goes on where it was. It runs on the
Python that the environment is made of, and needs nothing but its standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"demo": "reference,lightning,report", "all": "dev"}
"""What can be asked for, and the extras that bring it; each holds those before it."""

NEWEST = "newest"
"""What ``all`` holds, without pins. pip looks each time what is newest."""

PINS = "requirements.lock"
NEW_PIP = "pip>=26"
_SECONDS_BETWEEN_LINES = 5.0
_LINES_OF_A_FAILURE = 30


def main(arguments: Sequence[str]) -> int:
    """Set up; the exit status is 1 where pip fails, and 2 for wrong arguments."""
    if len(arguments) < 2 or (arguments[1] != NEWEST and (arguments[1] not in EXTRAS or len(arguments) > 2)):
        name = Path(__file__).name
        print(
            f"usage: {name} FOLDER {{{','.join(EXTRAS)}}}\n       {name} FOLDER {NEWEST} [REQUIREMENT ...]",
            file=sys.stderr,
        )
        return 2
    folder, wanted, others = Path(arguments[0]).absolute(), arguments[1], arguments[2:]
    with_lock = os.open(ROOT, os.O_RDONLY)  # a second call waits until the first has finished
    try:
        fcntl.flock(with_lock, fcntl.LOCK_EX)
        if is_complete(folder, wanted):
            return 0
        return set_up(folder, wanted, others)
    finally:
        os.close(with_lock)


def set_up(folder: Path, wanted: str, others: Sequence[str] = ()) -> int:
    started = time.monotonic()
    if not _is_usable(folder):
        print(f"Setting up {folder.name}: a virtual environment of Python {sys.version.split()[0]}", flush=True)
        _make(folder)
    _stamp(folder).unlink(missing_ok=True)
    remove_half_installed(folder)
    how_long = "about a minute" if wanted != NEWEST else "some minutes: torch comes with CUDA, some 3 GB"
    print(f"Setting up {folder.name}: packages for {_purpose(wanted)}, with pip, {how_long}", flush=True)
    if wanted == NEWEST:
        packages = ["--upgrade", "--upgrade-strategy", "eager", "--editable", f".[{EXTRAS['all']}]", *others]
    else:
        packages = ["--constraint", PINS, "--editable", f".[{EXTRAS[wanted]}]"]
    status = _install(folder, packages, started)
    if status == 0:
        if wanted != NEWEST:
            _write_stamp(folder, wanted)
        print(f"Setting up {folder.name}: done in {time.monotonic() - started:.0f} s", flush=True)
    return status


def is_complete(folder: Path, wanted: str) -> bool:
    """Whether the environment holds what is wanted, from today's pins, and its Python is still there."""
    try:
        stamp = json.loads(_stamp(folder).read_text())
        return bool(stamp["made of"] == _made_of(folder) and wanted in stamp["holds"]) and _is_usable(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def remove_half_installed(folder: Path) -> None:
    """Take out what an interrupted pip has left, which pip would take for installed.

    pip writes a package's RECORD last. Where it replaces a package, it moves the old files aside, to names that begin
    with "~".
    """
    for site in folder.glob("lib/python*/site-packages"):
        unfinished = [found for found in site.glob("*.dist-info") if not (found / "RECORD").exists()]
        for found in [*unfinished, *site.glob("~*")]:
            shutil.rmtree(found)


def _make(folder: Path) -> None:
    """Make an empty environment with a new pip.

    The pip of this Python fetches it in a third of the time in which ensurepip unpacks an old pip, which reads the
    lists of all versions of a package half as fast. Where no new pip can be had, the old one does.
    """
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(_python(folder)), "--disable-pip-version-check", "install"]
    fetched = subprocess.run([*command, "--no-compile", NEW_PIP], capture_output=True, check=False)
    if fetched.returncode:
        subprocess.run([str(_python(folder)), "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)


def _install(folder: Path, packages: Sequence[str], started: float) -> int:
    """Run pip, and print a line now and then until it has ended."""
    # Python compiles at its first import what is used, a small part of what compiling everything would take.
    command = [str(_python(folder)), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *packages]
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            told = ""
            while _still_runs(process):
                how_far = progress(log.read_text(), folder)
                if how_far != told:
                    print(f"  {time.monotonic() - started:3.0f} s: {how_far}", flush=True)
                    told = how_far
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        lines = log.read_text().splitlines()
        print(*lines[-_LINES_OF_A_FAILURE:], sep="\n", file=sys.stderr)
        print(f"pip has failed; all that it said is in {log}. The next call goes on from here.", file=sys.stderr)
        return 1
    return 0


def progress(log: str, folder: Path) -> str:
    """How far pip is, from what it has printed and from what is in the environment."""
    lines = log.splitlines()
    found = [line for line in lines if line.startswith(("Collecting ", "Processing "))]
    fetched = re.findall(r"^ *Downloading ([^-\s]+-[^-\s]+)-\S+ (\(.*\))$", log, re.MULTILINE)
    installing = next((line for line in lines if line.startswith("Installing collected packages: ")), None)
    if installing is not None:
        names = {_plain(name) for name in installing.partition(": ")[2].split(", ")}
        done = {_plain(record.parent.name.split("-")[0]) for record in folder.glob("lib/*/site-packages/*/RECORD")}
        return f"{len(names & done)} of {len(names)} packages installed"
    if not found:
        return "pip looks for packages"
    last = f", the last fetched: {' '.join(fetched[-1])}" if fetched else ""
    return f"{len(found)} packages found{last}"


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_SECONDS_BETWEEN_LINES)
    except subprocess.TimeoutExpired:
        return True
    return False


def _purpose(wanted: str) -> str:
    return "the demo" if wanted == "demo" else "tests and checks"


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _stamp(folder: Path) -> Path:
    return folder / ".set-up"


def _is_usable(folder: Path) -> bool:
    """Whether a whole environment is there, of the Python that runs this."""
    code = "import sys, pip; print(sys.version)"
    try:
        shown = subprocess.run([str(_python(folder)), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return shown.returncode == 0 and shown.stdout.strip() == sys.version.strip()


def _made_of(folder: Path) -> str:
    found = hashlib.sha256(f"{folder}\n{sys.version}\n".encode())
    for name in (PINS, "pyproject.toml"):
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()


def _write_stamp(folder: Path, wanted: str) -> None:
    names = list(EXTRAS)
    holds = names[: names.index(wanted) + 1]
    unfinished = folder / ".set-up.unfinished"
    unfinished.write_text(json.dumps({"made of": _made_of(folder), "holds": holds}))
    unfinished.replace(_stamp(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
