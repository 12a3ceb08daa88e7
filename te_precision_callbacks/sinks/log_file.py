"""An append-only, locked text file with a size limit, for use in one thread.

If another process is writing the file, ``<name>.1`` is used. At the limit, the log ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.files import AppendedFile

logger = logging.getLogger(__name__)

_CHUNK = 1 << 22
"""Buffer size in bytes."""


class LogFileError(PrecisionDebugError, OSError): ...


def claim(path: Path) -> AppendedFile:
    """Open a file for appending, unbuffered, and lock it.

    If another running process has locked it, ``<name>.1``, ``<name>.2`` and so on are tried. On a file system without
    locks, every file counts as free.
    """
    for count in itertools.count():
        name = path.name + (f".{count}" if count else "")
        file = AppendedFile(path.with_name(name), "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError as error:
            logger.info("%s: %s. If two runs write into the folder at once, their lines are mixed.", path, error)
        if count:
            logger.warning("Another process is writing %s; this process writes %s instead.", path, name)
        break
    return file


def time_now() -> str:
    now = datetime.now()
    return f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"


LogJob = Callable[[], Iterable[str]]
"""Returns texts of whole lines; called in the log's thread."""


class LogFile:
    """A log file. Not thread-safe.

    Args:
        path: the file, which is created with its folder at the first write.
        limit: maximum size in bytes; 0 for no limit.
        advice: a sentence on how to raise the limit, or empty.
    """

    def __init__(self, path: Path, limit: int, advice: str) -> None:
        self._path = path
        self._limit = limit
        self._advice = advice
        self._file: AppendedFile | None = None
        self._size = 0
        self._is_full = False
        self._lines = bytearray()

    def take(self, job: LogJob) -> bool:
        for text in job():
            self.append(text)
        return True

    def append(self, text: str) -> None:
        self._lines += text.encode(errors="backslashreplace")
        if len(self._lines) >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write the lines; raises LogFileError."""
        data = bytes(self._lines)
        self._lines = bytearray()
        if not data or self._is_full:
            return
        try:
            file = self._current()
            if self._limit and self._size + len(data) > self._limit:
                data = data[: data.rfind(b"\n", 0, max(0, self._limit - self._size)) + 1]
                self._is_full = True
                logger.warning(
                    "%s has reached its limit of %s bytes and is closed. %s",
                    file.name,
                    f"{self._limit:,}",
                    self._advice,
                )
            self._size += file.write(data)
        except OSError as error:
            raise LogFileError(
                f"{self._path} cannot be written: {error}. The run continues without this log. Set log_dir= to a disk"
                " with free space that supports appending."
            ) from error

    def _current(self) -> AppendedFile:
        """Return the open file; on opening an existing file, mark the start of the new part."""
        if self._file is not None:
            return self._file
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = claim(self._path)
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        if self._size:
            mark = f"{time_now()} - INFO - Here another run begins, of process {os.getpid()}.\n".encode()
            if os.pread(file.fileno(), 1, self._size - 1) != b"\n":  # the earlier process was killed while writing
                mark = b"\n" + mark
            self._size += file.write(mark)
        return file

    def leave(self) -> None:
        if self._file is not None:
            file = self._file
            self._file = None
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            file.close()
