"""Set up the project's virtual environment, and show the progress.

    python tools/environment.py .venv demo    # what examples/byte_lm.py needs
    python tools/environment.py .venv all     # and what the tests and checks need
    python tools/environment.py .venv-newest newest "transformers<5"
    # the same in the newest versions that fit, here with an older transformers

The needed packages are in pyproject.toml, as extras; their versions in requirements.lock, which does not
hold for ``newest``. uv installs them, with pip's settings, in a third of pip's time; where uv cannot, pip does. What
exists already stays; an interrupted set-up goes on where it was. It runs on the Python that the
environment is made of, and needs nothing but its standard library.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"demo": "reference,lightning,report", "all": "dev"}
"""What can be asked for, and the extras that bring it; each holds those before it."""

NEWEST = "newest"
"""What ``all`` holds, without pins. What is newest is looked up each time."""

PINS = "requirements.lock"
INSTALLERS = ("pip>=26", "uv")

OPTIONS_OF_UV: Mapping[str, str] = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES_OF_UV: Mapping[str, Sequence[str]] = {
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""pip's settings, and what uv has for them: it reads none of pip's files and variables."""

GOES_ON = "The next call goes on from here."
_SECONDS_BETWEEN_LINES = 5.0
_LINES_OF_A_FAILURE = 30


def main(arguments: Sequence[str]) -> int:
    """Set up; the exit status is 1 where pip fails too, and 2 for wrong arguments."""
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
        try:
            fcntl.flock(with_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Setting up {folder.name}: waiting for another call that does it", flush=True)
            fcntl.flock(with_lock, fcntl.LOCK_EX)
        if is_complete(folder, wanted):
            return 0
        return set_up(folder, wanted, others)
    except KeyboardInterrupt:
        print(f"Setting up {folder.name}: interrupted. {GOES_ON}", file=sys.stderr)
        return 130
    finally:
        os.close(with_lock)


def set_up(folder: Path, wanted: str, others: Sequence[str] = ()) -> int:
    started = time.monotonic()
    if not _is_usable(folder):
        print(f"Setting up {folder.name}: a virtual environment of Python {sys.version.split()[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    _stamp(folder).unlink(missing_ok=True)
    remove_half_installed(folder)
    how_long = "about half a minute" if wanted != NEWEST else "some minutes: torch comes with CUDA, some 3 GB"
    print(f"Setting up {folder.name}: packages for {_purpose(wanted)}, {how_long}", flush=True)
    versions, extras = (["--upgrade"], "all") if wanted == NEWEST else (["--constraint", PINS], wanted)
    status = _install(folder, [*versions, "--editable", f".[{EXTRAS[extras]}]", *others], started)
    if status == 0:
        if wanted != NEWEST:
            _write_stamp(folder, wanted)
        print(f"Setting up {folder.name}: done in {time.monotonic() - started:.0f} s", flush=True)
    return status


def is_complete(folder: Path, wanted: str) -> bool:
    """Return whether the environment holds ``wanted``, from today's pins, and its Python is still there."""
    try:
        stamp = json.loads(_stamp(folder).read_text())
        return bool(stamp["made of"] == _made_of(folder) and wanted in stamp["holds"]) and _is_usable(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def remove_half_installed(folder: Path) -> None:
    """Remove remains of an interrupted installer, which would be taken for installed.

    They write a package's RECORD last. Where pip replaces a package, it moves the old files aside, to names that begin
    with "~".
    """
    for site in folder.glob("lib/python*/site-packages"):
        unfinished = [path for path in site.glob("*.dist-info") if not (path / "RECORD").exists()]
        for item in [*unfinished, *site.glob("~*")]:
            shutil.rmtree(item)


def _fetch_installers(folder: Path) -> bool:
    """Install a new pip and uv in the environment, with the pip of this Python; return whether uv is there.

    Without a connection, the pip of this Python is used.
    """
    if _has(folder, "uv"):
        return True
    command = [sys.executable, "-m", "pip", "--python", str(_python(folder)), "--disable-pip-version-check", "install"]
    fetched = subprocess.run([*command, "--no-compile", *INSTALLERS], capture_output=True, check=False, env=_for_pip())
    if fetched.returncode:
        print("uv cannot be fetched, so pip installs, which takes longer.", file=sys.stderr, flush=True)
        if not _has(folder, "pip"):
            subprocess.run([str(_python(folder)), "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    return fetched.returncode == 0


def _for_pip() -> dict[str, str]:
    """The variables for pip: whatever its settings are, it installs into the environment, and is not silent."""
    return {**os.environ, "PIP_USER": "0", "PIP_QUIET": "0"}


def _install(folder: Path, packages: Sequence[str], started: float) -> int:
    """Have uv install packages, or pip where uv is not or fails; the exit status."""
    python = str(_python(folder))
    if _fetch_installers(folder):
        options, variables = settings_of_uv(_settings_of_pip(folder))
        command = [python, "-m", "uv", "pip", "install", "--python", python, *options, *packages]
        if _run(folder, "uv", command, {**variables, **os.environ}, started) == 0:
            return 0
        print("pip goes on in its place.", file=sys.stderr, flush=True)
    # Python compiles modules at their first import, in a small part of the time for all.
    command = [python, "-m", "pip", "install", "--no-compile", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--upgrade-strategy", "eager"] if "--upgrade" in packages else []
    status = _run(folder, "pip", [*command, *packages], _for_pip(), started)
    if status:
        print(GOES_ON, file=sys.stderr)
    return status


def settings_of_uv(of_pip: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """pip's settings as options and variables of uv.

    On its own uv takes a package from the first index that has it in any version. Here it looks at all of them, as pip
    does, and trusts the certificates that the system trusts.
    """
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in OPTIONS_OF_UV.items():
        options += [part for value in of_pip.get(name, "").split() for part in (option, value)]
    if of_pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    variables = {item: of_pip[name] for name, several in VARIABLES_OF_UV.items() if name in of_pip for item in several}
    return options, {"UV_SYSTEM_CERTS": "true", **variables}


def _settings_of_pip(folder: Path) -> dict[str, str]:
    """The settings of ``pip install``, from its files and variables."""
    command = [str(_python(folder)), "-m", "pip", "config", "list"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=_for_pip()).stdout
    results: dict[str, dict[str, str]] = {}
    for line in shown.splitlines():
        key, is_setting, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if is_setting:
            with contextlib.suppress(ValueError, SyntaxError):  # a warning of pip's
                results.setdefault(section, {})[name] = str(ast.literal_eval(value))
    return {**results.get("global", {}), **results.get("install", {}), **results.get(":env:", {})}


def _run(folder: Path, name: str, command: Sequence[str], variables: Mapping[str, str], started: float) -> int:
    """Run an installer, and print a line now and then until it has ended; the exit status."""
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            stated = ""
            while _still_runs(process):
                how_far = progress(log.read_text())
                if how_far != stated:
                    print(f"  {time.monotonic() - started:3.0f} s: {how_far}", flush=True)
                    stated = how_far
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        print(*log.read_text().splitlines()[-_LINES_OF_A_FAILURE:], sep="\n", file=sys.stderr)
        print(f"{name} has failed; all that it said is in {log}.", file=sys.stderr)
    return int(process.returncode != 0)


def progress(log: str) -> str:
    """Progress of an installer: its last output, in at most a line."""
    lines = [line for line in log.splitlines() if line.strip() and not line.lower().startswith("warning")]
    return textwrap.shorten(lines[-1], 100, placeholder=" ...") if lines else "it looks for packages"


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_SECONDS_BETWEEN_LINES)
    except subprocess.TimeoutExpired:
        return True
    return False


def _purpose(wanted: str) -> str:
    return "the demo" if wanted == "demo" else "tests and checks"


def _has(folder: Path, module: str) -> bool:
    code = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(_python(folder)), "-c", code], check=False).returncode == 0


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _stamp(folder: Path) -> Path:
    return folder / ".set-up"


def _is_usable(folder: Path) -> bool:
    """Return whether an environment of the running Python is there."""
    code = "import sys; print(sys.version)"
    try:
        shown = subprocess.run([str(_python(folder)), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return shown.returncode == 0 and shown.stdout.strip() == sys.version.strip()


def _made_of(folder: Path) -> str:
    result = hashlib.sha256(f"{folder}\n{sys.version}\n".encode())
    for name in (PINS, "pyproject.toml"):
        result.update((ROOT / name).read_bytes())
    return result.hexdigest()


def _write_stamp(folder: Path, wanted: str) -> None:
    names = list(EXTRAS)
    holds = names[: names.index(wanted) + 1]
    unfinished = folder / ".set-up.unfinished"
    unfinished.write_text(json.dumps({"made of": _made_of(folder), "holds": holds}))
    unfinished.replace(_stamp(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
