"""The names of a run's files, and files that appear whole or not at all.

    <log_dir>/precision_records/<run_id>/seg-000/run.json
                                         seg-000/layers.parquet, gemms.parquet, ...
                                         seg-000/rank-00000/values-000001.parquet, values-000002.arrows, ...
                                         seg-000/rank-00000/events.jsonl

A part is sealed as ``<table>-<number>.parquet``. Until then it is ``<table>-<number>.arrows``, a stream of Arrow, its
*tail*, to which rows are appended. A part that was thinned (``runs/thinning.py``) has the numbers of the first and the
last part that it replaces: ``<table>-<number>-<number>.parquet``. It is in their place as soon as it is there: what a
wider part replaces does not count, whether it was removed already or not.
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
from te_precision_callbacks.runs.bounds import read_json

FOLDER = "precision_records"
"""The folder of a log folder that has its runs."""

RUN_FILE, EVENTS_FILE = "run.json", "events.jsonl"
SEALED, TAIL = ".parquet", ".arrows"

SEGMENT_NAME = re.compile(r"seg-(\d{3,9})")
RANK_NAME = re.compile(r"rank-(\d{5,9})")
PART_NAME = re.compile(r"([a-z]+)-(\d{6,18})(?:-(\d{6,18}))?\.(parquet|arrows)")

SILENT_SECONDS = 60.0
"""The seconds without a sign of life after which a process that cannot be seen from here counts as killed."""

_INCOMPLETE = ".incomplete"

_MOST_GAPS = 8
"""The stretches of missing numbers that are named."""


def new_run_id() -> str:
    """A name for a run, such as ``20261122-130144-507-9f3c21``: by the time in UTC, to the millisecond, and unique.

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


def part_stem(table: str, number: int, last: int | None = None) -> str:
    """``values-000001``; of a thinned part ``values-000001-000010``."""
    return f"{table}-{number:06d}" + ("" if last is None else f"-{last:06d}")


class PartFile(NamedTuple):
    """The file of a part.

    Attributes:
        table: the name of the table.
        first, last: the numbers of the parts that it replaces; its own number if it replaces none.
        thinned: whether it replaces parts.
        path: the file.
    """

    table: str
    first: int
    last: int
    thinned: bool
    path: Path

    @property
    def order(self) -> tuple[str, int, int, bool, bool]:
        """Sorts files by table and number, and each before those that it replaces."""
        return self.table, self.first, -self.last, not self.thinned, self.path.suffix != SEALED


def segments_of(run: Path) -> dict[int, Path]:
    """The segments of a run's folder, by number, in order."""
    return _numbered(run, SEGMENT_NAME)


def ranks_of(segment: Path) -> dict[int, Path]:
    """The folders of ranks of a segment, by rank, in order."""
    return _numbered(segment, RANK_NAME)


def _numbered(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    found = ((name.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir())
    return dict(sorted((int(match[1]), entry) for match, entry in found if match is not None))


def make_segment(run: Path) -> tuple[int, Path]:
    """Make the next segment of a run, one that no other process makes too.

    Raises:
        OSError: it cannot be made.
    """
    run.mkdir(parents=True, exist_ok=True)
    number = max(segments_of(run), default=-1) + 1
    while True:
        folder = run / segment_name(number)
        try:
            folder.mkdir()
            return number, folder
        except FileExistsError:
            number += 1


def replace_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place, bring it to the disk, and rename it.

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
    """Write over a file that has room for it, where a disk takes no new one.

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


class AppendedFile(io.RawIOBase):
    """A new file, or the end of one, whose writes are in the file, whole, when they return.

    Nothing is buffered, so that a process that was forked meanwhile has nothing to write once more.

    Args:
        path: the file.
        new: whether there must be no such file.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        super().__init__()
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0)
        self._descriptor = own_file(str(path), flags)
        self.nbytes = os.fstat(self._descriptor).st_size
        """The size of the file."""

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append all of the data.

        Raises:
            OSError: they cannot be written, or the file was deleted meanwhile.
        """
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            written = os.write(self._descriptor, left)
            self.nbytes += written
            left = left[written:]
        return count

    def require_there(self) -> None:
        """Raise FileNotFoundError if the file was deleted meanwhile."""
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted while it was written", str(self._path))

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def part_files(folder: Path) -> tuple[list[PartFile], list[PartFile]]:
    """The parts in a rank's folder, in order, and the files that others of them replace."""
    found = []
    for entry in folder.iterdir():
        match = PART_NAME.fullmatch(entry.name)
        if match is not None:
            table, first, last, _ = match.groups()
            found.append(PartFile(table, int(first), int(last or first), last is not None, entry))
    parts: list[PartFile] = []
    replaced: list[PartFile] = []
    for file in sorted(found, key=lambda file: file.order):
        before = parts[-1] if parts and parts[-1].table == file.table else None
        (parts if before is None or file.last > before.last else replaced).append(file)
    return parts, replaced


def missing_numbers(found: Iterable[int], first: int) -> str:
    """The whole numbers from the first to the last that are not there, in words; empty if all are.

    Args:
        found: the numbers that are there.
        first: the first one that there should be.
    """
    return missing_stretches(((number, number) for number in sorted(set(found))), first)


def missing_stretches(found: Iterable[tuple[int, int]], first: int) -> str:
    """The same of stretches of numbers, first and last of each, in order."""
    gaps, expected = [], first
    for begin, end in found:
        if begin > expected:
            gaps.append(str(expected) if begin == expected + 1 else f"{expected} to {begin - 1}")
        expected = max(expected, end + 1)
    return ", ".join(gaps[:_MOST_GAPS]) + (" ..." if len(gaps) > _MOST_GAPS else "")


def parts_of(folder: Path, table: str) -> list[PartFile]:
    """The parts of a table in a rank's folder, in order: of each number the sealed part, or else its tail."""
    return [file for file in part_files(folder)[0] if file.table == table]


def is_incomplete(path: Path) -> bool:
    """Whether a process was killed while it wrote this file beside its place."""
    return path.name.startswith(".") and path.name.endswith(_INCOMPLETE)


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


def is_beginning(segment: Path) -> bool:
    """Return whether rank 0 has made the folder of a segment, and not written anything into it yet."""
    return not any(segment.glob(f"{rank_name(0)}/*")) and not is_silent(segment)


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
