"""Whether a log folder can be written to, has space, and has file locks that work."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.dumps.budget import why_full


@dataclass(frozen=True)
class LogFolder:
    """A folder for logs, which need not exist yet.

    Attributes:
        path: the folder.
        exists: whether it exists.
        why_not_writable: why nothing can be written there; empty if something can.
        why_full: why dumps find no room there; empty if they do.
        why_no_locks: why file locks do not keep processes apart there; empty if they do.
        free_bytes: the free space on its disk.
    """

    path: str
    exists: bool
    why_not_writable: str
    why_full: str
    why_no_locks: str
    free_bytes: int


def log_folder(folder: Path) -> LogFolder:
    """Write and lock a file in the folder, or where the folder would be made; nothing is left there."""
    path = folder.expanduser().absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    why_not_writable = why_no_locks = ""
    try:
        if not place.is_dir():
            raise NotADirectoryError(f"{str(place)!r} is not a folder")
        with tempfile.TemporaryDirectory(prefix=".te-precision-doctor-", dir=place) as made:
            file = Path(made, "file")
            file.write_text("written")
            why_no_locks = _why_no_locks(file)
    except OSError as error:
        why_not_writable = str(error)
    return LogFolder(
        path=str(path),
        exists=path.is_dir(),
        why_not_writable=why_not_writable,
        why_full=why_full(path) or "",
        why_no_locks=why_no_locks,
        free_bytes=shutil.disk_usage(place).free,
    )


def _why_no_locks(file: Path) -> str:
    """Lock the file as :func:`te_precision_callbacks.sinks.statistics_log.claim` does, twice."""
    with file.open("ab+") as first, file.open("ab+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"locking a file fails: {error}"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"locking a file fails: {error}"
    return "a locked file can be locked again"
