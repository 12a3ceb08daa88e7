"""Names of a run's files, and files that appear whole or not at all.

    <log_dir>/precision_records/<run_id>/seg-000/run.json
                                         seg-000/layers.parquet, gemms.parquet, ...
                                         seg-000/rank-00000/values-0001.parquet, values-0002.arrow, ...
                                         seg-000/rank-00000/events.jsonl

A rank appends record batches to ``<table>-<number>.arrow``, a stream of Arrow, and closes it as
``<table>-<number>.parquet``. A file with fewer steps, ``<table>-<first>-<last>-every<interval>.parquet``, replaces
closed files as soon as it appears, even if these were not deleted yet (``runs/size_limit.py``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, NamedTuple

from te_precision_callbacks.base.opening import own_file
from te_precision_callbacks.runs.input_files import read_json

FOLDER = "precision_records"
"""The folder of a log folder that has its runs."""

RUN_FILE, EVENTS_FILE = "run.json", "events.jsonl"
OPEN, CLOSED = ".arrow", ".parquet"

SEGMENT_NAME = re.compile(r"seg-(\d{3,9})")
RANK_NAME = re.compile(r"rank-(\d{5,9})")
_DATA_NAME = re.compile(r"([a-z]+)-(\d{4,18})(?:-(\d{4,18})-every(\d{1,18}))?\.(?:parquet|arrow)")

SILENT_SECONDS = 60.0
"""The seconds without a sign of life after which a process that cannot be seen from here counts as gone."""

_INCOMPLETE = ".incomplete"

_MOST_GAPS = 8
"""The gaps between numbers that are named."""


def new_run_id() -> str:
    """Return a name for a run, such as ``20261122-130144-507-9f3c21``: by the time in UTC, and unique.

    Names sort as the runs began; of two short runs in one folder, both may begin in one second.
    """
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def segment_name(number: int) -> str:
    """``seg-000``."""
    return f"seg-{number:03d}"


def rank_name(rank: int) -> str:
    """``rank-00000``."""
    return f"rank-{rank:05d}"


def segments_of(run: Path) -> dict[int, Path]:
    """The segments of a run's folder, by number, in order."""
    return _numbered(run, SEGMENT_NAME)


def ranks_of(segment: Path) -> dict[int, Path]:
    """The folders of ranks of a segment, by rank, in order."""
    return _numbered(segment, RANK_NAME)


def _numbered(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    found = ((name.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir())
    return dict(sorted((int(match[1]), entry) for match, entry in found if match is not None))


def make_segment(run: Path) -> int:
    """Make the folder of a run's next segment, which no other process makes too, and return its number.

    Raises:
        OSError: it cannot be made.
    """
    run.mkdir(parents=True, exist_ok=True)
    number = max(segments_of(run), default=-1) + 1
    while True:
        try:
            (run / segment_name(number)).mkdir()
            return number
        except FileExistsError:
            number += 1


class DataFile(NamedTuple):
    """A file of a table of a rank.

    Attributes:
        table: the name of the table.
        first, last: its number, or the numbers of the files that it replaces.
        interval: 1 if it has all steps, 2 for every second step, ...
        path: the file.
    """

    table: str
    first: int
    last: int
    interval: int
    path: Path

    @property
    def is_open(self) -> bool:
        """Whether rows may still be appended."""
        return self.path.suffix == OPEN


def data_files(folder: Path) -> tuple[list[DataFile], list[DataFile]]:
    """The data files in a rank's folder, in order, and the files that others of them replace."""
    found = []
    for entry in folder.iterdir():
        match = _DATA_NAME.fullmatch(entry.name)
        if match is not None:
            table, first, last, interval = match.groups()
            found.append(DataFile(table, int(first), int(last or first), int(interval or 1), entry))
    files: list[DataFile] = []
    replaced: list[DataFile] = []
    for file in sorted(found, key=lambda file: (file.table, file.first, -file.last, -file.interval, file.is_open)):
        before = files[-1] if files and files[-1].table == file.table else None
        (files if before is None or file.last > before.last else replaced).append(file)
    return files, replaced


def gaps(found: Iterable[tuple[int, int]], first: int) -> str:
    """The numbers that are missing from ascending spans, as a text; empty if none is missing.

    Args:
        found: first and last number of each span.
        first: the first number that should be there.
    """
    missing, expected = [], first
    for begin, end in found:
        if begin > expected:
            missing.append(str(expected) if begin == expected + 1 else f"{expected} to {begin - 1}")
        expected = max(expected, end + 1)
    return ", ".join(missing[:_MOST_GAPS]) + (" ..." if len(missing) > _MOST_GAPS else "")


# ---------------------------------------------------------------------- writing


def replace_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place, flush it to the disk, and rename it.

    Raises:
        OSError: it cannot be written. A file that was there is unchanged.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}{_INCOMPLETE}")
    try:
        with open(beside, "wb", opener=own_file) as file:
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
    """Write over a file that has room for the data, where a full disk takes no new file.

    Raises:
        OSError: it cannot be written, or has less room.
    """
    with open(path, "r+b", opener=own_file) as file:
        room = os.fstat(file.fileno()).st_size
        if len(data) > room:
            raise OSError(errno.ENOSPC, "it has no room", str(path))
        file.write(data.ljust(room))
        file.flush()
        os.fsync(file.fileno())


def is_incomplete(path: Path) -> bool:
    """Return whether a process was killed while it wrote this file beside its place."""
    return path.name.startswith(".") and path.name.endswith(_INCOMPLETE)


class AppendedFile(io.FileIO):
    """A file that grows. Writes are unbuffered, so that a forked process has nothing to write once more."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Open a file at its end; with ``new`` there must be no such file."""
        super().__init__(path, "x" if new else "a", opener=own_file)

    def write(self, data: Any, /) -> int:
        """Append all of the data.

        Raises:
            OSError: they cannot be written, or the file was deleted meanwhile.
        """
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            left = left[super().write(left) :]
        if os.fstat(self.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted while it was written", str(self.name))
        return count


# ---------------------------------------------------------------------- processes


def process_now() -> dict[str, str | int]:
    """Identify this process: host, process id with its namespace, and start in ticks since the boot of the host."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "pid_namespace": _pid_namespace(),
        "pid_started": _started(pid) or 0,
    }


def _pid_namespace() -> str:
    """Boot and namespace in which this process's id is unique; empty if ``/proc`` does not show it.

    Containers with the network of their host share its name, but not its process ids.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is of another namespace
            return ""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def has_ended(run_file: Path, facts: Mapping[str, Any] | None = None) -> bool:
    """Return whether the process of a segment has ended: by its end in run.json, else by the process if it can be seen
    from here, else by the time since its last sign of life.

    Args:
        run_file: the segment's run.json.
        facts: its content; None: it is read.
    """
    if facts is None:
        try:
            facts = read_json(run_file)
        except (OSError, ValueError):
            facts = {}
    namespace, pid = facts.get("pid_namespace"), facts.get("pid")
    if facts.get("status") in ("ended", "failed"):
        return True
    if namespace and namespace == _pid_namespace() and isinstance(pid, int):
        return _started(pid) != facts.get("pid_started")
    return is_silent(run_file if run_file.exists() else run_file.parent)


def is_silent(path: Path) -> bool:
    """Return whether a file or folder is gone, or has not changed for :data:`SILENT_SECONDS`."""
    try:
        return time.time() - path.stat().st_mtime > SILENT_SECONDS
    except OSError:
        return True


def _started(pid: int) -> int | None:
    """When a process has started; None if it does not live, or if the system has no such record."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def time_text(seconds: float | None = None) -> str:
    """A time in ISO 8601, UTC: now, or so many seconds since the epoch."""
    seconds = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
