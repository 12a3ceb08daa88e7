"""nvidia-dlfw-inspect's log of events, which a thread writes: which feature acts on which layer, GEMM and tensor.

<log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - LAYER=fc1: Feature=LogTensorStats, API=inspect_tensor: activation
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.sinks.log_file import LogFile
from te_precision_callbacks.sinks.statistics_log import EVENTS_FOLDER, log_file_name
from te_precision_callbacks.sinks.writer_thread import WriterThread

LIMIT = 256 << 20
"""The bytes of a rank's log of events: each line comes once, except from users' features that repeat themselves."""

MOST_WAITING = 1 << 18
"""The lines that may wait for the thread, or for the model; further ones are left out."""

FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: FileLogger.initialize``."""


class EventLog(logging.Handler):
    """Replaces the handler of nvidia-dlfw-inspect's logger, whose every line waits for the disk.

    Lines wait in memory until :meth:`begin` says which ones this rank writes: the ranks may not be known before.

    Args:
        log_dir: the folder of the session's files.
    """

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._folder = log_dir / EVENTS_FOLDER
        self._lines = _Lines()
        self._thread: WriterThread[tuple[int, str]] = WriterThread("log of events", self._lines, MOST_WAITING)

    def begin(self, *, in_full: bool) -> None:
        """Begin to write.

        Args:
            in_full: whether this rank writes all lines. If not, it writes warnings and errors, so that a rank to which
                nothing happens makes no file.
        """
        if self._lines.file is None:
            self._lines.least = logging.NOTSET if in_full else logging.WARNING
            path = self._folder / log_file_name(own_rank())
            self._lines.file = LogFile(path, LIMIT, "", self._thread.note_progress)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over a line."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._thread.put((record.levelno, f"{line}\n"), 1)

    def hurry(self) -> Callable[[], bool]:
        """Have what was handed over written at once; see :meth:`WriterThread.hurry`."""
        return self._thread.hurry()

    def take_failure(self) -> BaseException | None:
        """Why lines could not be written; None the next time."""
        return self._thread.take_failure()

    def close(self) -> None:
        """Wait until all lines are written, or until the disk no longer answers, which is logged."""
        self.begin(in_full=own_rank() == 0)
        self._thread.finish()
        super().close()


class _Lines:
    """The part of the log that runs in its thread.

    Attributes:
        file: the file; None until it is known which lines are written.
        least: the least level of these.
    """

    def __init__(self) -> None:
        self.file: LogFile | None = None
        self.least = logging.NOTSET

    def take(self, job: tuple[int, str]) -> bool:
        """Take a line, once it is known whether it is written."""
        level, line = job
        if self.file is not None and level >= self.least:
            self.file.append(line)
        return self.file is not None

    def flush(self) -> None:
        """Bring what was taken to the file."""
        if self.file is not None:
            self.file.flush()

    def leave(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
