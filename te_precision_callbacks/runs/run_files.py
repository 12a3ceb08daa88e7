"""File names of a run, atomic writes, append-only files, and default limits of ``records=``.

    <log_dir>/precision_records/<run_id>/seg-000/run.json
                                         seg-000/layers.parquet, gemms.parquet, ...
                                         seg-000/rank-00000/values-0001.parquet, values-0002.arrow, ...
                                         seg-000/rank-00000/steps-0001.parquet, events-0001.parquet, ...
                                         seg-000/rank-00000/sigterm.txt

A rank appends to the Arrow stream ``<table>-<number>.arrow``, and closes it as ``<table>-<number>.parquet``, which
replaces it as soon as it exists.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, NamedTuple

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.te.environment import LAUNCH_VARIABLE

FOLDER = "precision_records"

RUN_FILE = "run.json"
OPEN = ".arrow"
CLOSED = ".parquet"

SEGMENT_NAME = re.compile(r"seg-(\d{3,9})")
RANK_NAME = re.compile(r"rank-(\d{5,9})")
_DATA_NAME = re.compile(r"([a-z]+)-(\d{4,18})\.(?:parquet|arrow)")

SILENT_SECONDS = 60.0
"""Seconds without a change of its files after which a process on another host counts as dead."""

_INCOMPLETE = ".incomplete"

MOST_LISTED = 8


def new_run_id() -> str:
    """Return a unique name that sorts by start time (UTC), such as ``20261122-130144-507-9f3c21``."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def segment_name(number: int) -> str:
    return f"seg-{number:03d}"


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def segments_of(run: Path) -> dict[int, Path]:
    return _numbered(run, SEGMENT_NAME)


def ranks_of(segment: Path) -> dict[int, Path]:
    return _numbered(segment, RANK_NAME)


def _numbered(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    folders = {}
    for entry in sorted(folder.iterdir()):
        match = name.fullmatch(entry.name)
        if match and entry.is_dir():
            folders[int(match[1])] = entry
    return dict(sorted(folders.items()))


def make_segment(run: Path) -> int:
    """Create the folder of a run's next segment, and return its number; safe with concurrent processes."""
    run.mkdir(parents=True, exist_ok=True)
    number = max(segments_of(run), default=-1) + 1
    while True:
        try:
            (run / segment_name(number)).mkdir()
            return number
        except FileExistsError:
            number += 1


class Place(NamedTuple):
    """The segment of a run that a process records."""

    run_id: str
    segment: int


class DataFile(NamedTuple):
    """A file of a rank's table."""

    table: str
    number: int
    path: Path


def data_files(folder: Path) -> list[DataFile]:
    """Return a rank's files, without open files that were replaced by closed ones."""
    files: dict[tuple[str, int], DataFile] = {}
    for entry in sorted(folder.iterdir()):  # *.arrow before *.parquet
        match = _DATA_NAME.fullmatch(entry.name)
        if match is not None:
            table, number = match[1], int(match[2])
            files[table, number] = DataFile(table, number, entry)
    return list(files.values())


_LARGEST_JSON = 1 << 28
"""Largest size of run.json in bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises OSError, or ValueError for a damaged file."""
    if regular_file(path).stat().st_size > _LARGEST_JSON:
        raise ValueError(f"larger than {_LARGEST_JSON >> 20} MiB")
    try:
        facts = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError("not a JSON object")
    return facts


def gaps(numbers: Iterable[int], first: int = 0, end: int = -1) -> str:
    """Format the numbers that are missing from ``first`` to the largest one, or until ``end``."""
    missing = []
    expected = first
    for number in sorted({*numbers, end}):
        if number > expected:
            missing.append(f"{expected} to {number - 1}".removesuffix(f" to {expected}"))
        expected = max(expected, number + 1)
    return some_of(missing, MOST_LISTED)


# ---------------------------------------------------------------------- writing


def replace_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: flush a temporary file to the disk, and rename it; raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{_INCOMPLETE}")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file in place without growing it, which works on a full disk; raises OSError."""
    with open(path, "r+b") as file:
        room = os.fstat(file.fileno()).st_size
        if len(data) > room:
            raise OSError(errno.ENOSPC, "no space is left", str(path))
        file.write(data.ljust(room))
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- processes


def process_now() -> dict[str, str | int]:
    """Identify this process by host, process ID with namespace, and start time in ticks since boot; and its launch."""
    pid = os.getpid()
    process: dict[str, str | int] = {
        "host": socket.gethostname(),
        "pid": pid,
        "pid_namespace": _pid_namespace(),
        "pid_started": _started(pid) or 0,
    }
    return {**process, "launch": os.environ.get(LAUNCH_VARIABLE) or " ".join(map(str, process.values()))}


def _pid_namespace() -> str:
    """Return boot id and PID namespace; empty if ``/proc`` does not show them.

    Containers that share the host's network also have its host name, but separate process IDs.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is of another namespace
            return ""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


SIGTERM_FILE = "sigterm.txt"
"""The stack of the main thread at the SIGTERM that ended the process; empty, or missing, otherwise."""


def trace_sigterm(folder: Path) -> None:
    """Let SIGTERM write the main thread's stack to a file before it ends the process, unless the script handles it.

    The signal is handled in C, so it also ends a process that is blocked in a call, where no Python code can run.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        file = open(folder / SIGTERM_FILE, "wb")  # noqa: SIM115  # faulthandler keeps it
        faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)


def untrace_sigterm(folder: Path | None = None) -> None:
    """Undo :func:`trace_sigterm`; without ``folder``, in a forked process: its SIGTERM does not end the run."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)
    if folder is not None:
        (folder / SIGTERM_FILE).unlink(missing_ok=True)


os.register_at_fork(after_in_child=untrace_sigterm)


def ended_by_sigterm(folder: Path) -> float | None:
    """Return when SIGTERM ended the process of a rank, in seconds since the epoch; None if it did not."""
    with contextlib.suppress(OSError):
        facts = (folder / SIGTERM_FILE).stat()
        if facts.st_size:
            return facts.st_mtime
    return None


def is_gone(run_file: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether the process of a segment is gone, by the process table, or by its unchanged files."""
    namespace = facts.get("pid_namespace")
    pid = facts.get("pid")
    if namespace and namespace == _pid_namespace() and isinstance(pid, int):
        return _started(pid) != facts.get("pid_started")
    if run_file.exists():
        return is_silent(run_file)
    return is_silent(run_file.parent)


def is_silent(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > SILENT_SECONDS
    except OSError:
        return True


def _started(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return int(fields[19])


def time_text(seconds: float | None = None) -> str:
    if seconds is None:
        seconds = time.time()
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


DEFAULT_LIMIT = 16 << 30
"""Default limit in bytes: about 10^9 values per rank."""

LEAST_LIMIT = 1 << 20
"""Minimum value of ``records=`` in bytes."""
