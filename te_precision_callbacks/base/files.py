"""Paths, and files that can be read without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

StrPath = str | os.PathLike[str]


def regular_file(path: Path) -> Path:
    """Return the path; raises OSError for a pipe, device, socket or folder.

    Opening a pipe would wait for its writer, and a read from a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path
