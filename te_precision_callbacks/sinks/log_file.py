"""A log as a text file that one process appends to, within a limit; for the thread that writes it.

If another process is writing the file, ``<name>.1`` is written. At half of the limit the file is renamed to
``<name>.old``, in place of the older half, and a new file begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.opening import own_file

logger = logging.getLogger(__name__)

OLDER_HALF = ".old"
"""Comes after the name of a log, in the name of its older half."""

_CHUNK = 1 << 22
"""The bytes that are written at once."""


class LogFileError(PrecisionDebugError, OSError): ...


def claim(path: Path) -> io.FileIO:
    """Open a file for appending that no other process writes, without a buffer.

    If another running process has claimed the file, the first free one of ``<name>.1``, ``<name>.2`` and so on is
    opened. On a file system without locks, every file counts as free.
    """
    for name in itertools.chain([path.name], (f"{path.name}.{count}" for count in itertools.count(1))):
        file = _claimed(path.with_name(name))
        if file is not None:
            if name != path.name:
                logger.warning("Another process is writing %s; this process writes %s instead.", path, name)
            return file
    raise AssertionError  # not reached: the names do not end


def _claimed(path: Path) -> io.FileIO | None:
    while True:
        file = io.FileIO(path, "ab+", opener=own_file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            logger.info("%s: %s. Two runs that write into the folder at once would mix their lines.", path, error)
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # the process that had it has renamed it meanwhile


def older_half(path: Path) -> Path:
    return path.with_name(path.name + OLDER_HALF)


def time_now() -> str:
    now = datetime.now()
    return f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"


LogJob = Callable[[], Iterable[str]]
"""Returns whole lines, many at once; called in the log's own thread."""


class LogFile:
    """See the module. Its methods are for one thread, such as a ``WriterThread``.

    Args:
        path: the file. Its folder is made with it, when there is something to write.
        limit: the most bytes of the file and its older half together; 0 for any number.
        advice: how to keep more than the limit, as a sentence; empty if there is no way.

    Attributes:
        note_progress: called when the disk has taken a piece.
    """

    def __init__(self, path: Path, limit: int, advice: str) -> None:
        self._path = path
        self._half = max(1, limit // 2) if limit else 0
        self._advice = advice
        self.note_progress: Callable[[], None] = lambda: None
        self._file: io.FileIO | None = None
        self._size = 0
        self._has_rotated = False
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
        if not self._lines:
            return
        data, self._lines = bytes(self._lines), bytearray()
        try:
            file = self._current()
            while data:
                piece = data[: min(_CHUNK, self._half or _CHUNK)]
                piece = data[: piece.rfind(b"\n") + 1 or data.find(b"\n") + 1 or len(data)]  # whole lines
                if self._half and self._size and self._size + len(piece) > self._half:
                    file = self._rotated(file)
                self._write(file, piece)
                data = data[len(piece) :]
        except OSError as error:
            raise LogFileError(
                f"{self._path} cannot be written: {error}. The run goes on without this log. Give log_dir= a folder on"
                " a disk with room that takes files to append to."
            ) from error

    def _current(self) -> io.FileIO:
        """Return the file, with a mark where the new part begins in an existing one."""
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError("it was deleted while it was written")
            return self._file
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._begun(claim(self._path))
        if self._size:
            mark = f"{time_now()} - INFO - Here another run begins, of process {os.getpid()}.\n".encode()
            if os.pread(file.fileno(), 1, self._size - 1) != b"\n":  # the earlier process was killed while it wrote
                mark = b"\n" + mark
            self._write(file, mark)
        return file

    def _begun(self, file: io.FileIO) -> io.FileIO:
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        return file

    def _write(self, file: io.FileIO, data: bytes) -> None:
        while len(data):
            written = os.write(file.fileno(), data)
            self._size += written
            data = data[written:]
            self.note_progress()

    def _rotated(self, full: io.FileIO) -> io.FileIO:
        written = Path(str(full.name))
        older = older_half(written)
        os.replace(written, older)
        # The full one is locked until the new one is, so that no other process takes it for the log.
        file = self._begun(_claimed(written) or claim(self._path))
        full.close()
        self._write(file, f"{time_now()} - INFO - The log goes on from {older.name}.\n".encode())
        if not self._has_rotated:
            self._has_rotated = True
            logger.warning(
                "%s has reached half of its limit of %s bytes: it is %s now, and a new file goes on. From the next time"
                " on, the oldest lines are lost. %s",
                written,
                f"{2 * self._half:,}",
                older.name,
                self._advice,
            )
        return file

    def leave(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            file.close()
