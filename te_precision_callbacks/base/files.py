"""Paths, files that can be read without waiting, and the space on a disk."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from pathlib import Path
from typing import Any

_KEPT_FREE = 1 << 30
"""The bytes that stay free on the disk; a twentieth of a small disk."""

StrPath = str | os.PathLike[str]


def regular_file(path: Path) -> Path:
    """Return the path; raises OSError for a pipe, device, socket or folder.

    Opening a pipe would wait for its writer, and a read from a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def why_full(folder: Path, nbytes: int = 0) -> str | None:
    """Return the reason for not writing this many bytes to a folder, which need not exist; None if they fit."""
    existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), Path())
    disk = shutil.disk_usage(existing)
    if disk.free - nbytes < min(_KEPT_FREE, disk.total // 20):
        return f"little space is left on the disk: {disk.free:,} of {disk.total:,} bytes are free"
    return None


class AppendedFile(io.FileIO):
    """A file that is only appended to. Writes are unbuffered, so that a forked process does not repeat them."""

    def write(self, data: Any, /) -> int:
        """Append data; raises OSError, also if the file was deleted."""
        remaining = memoryview(data).cast("B")
        count = len(remaining)
        while remaining:
            remaining = remaining[super().write(remaining) :]
        if os.fstat(self.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted while it was written", str(self.name))
        return count
