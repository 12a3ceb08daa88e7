"""nvidia-dlfw-inspect's event log, written by a thread: which features act on each layer, GEMM and tensor.

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
"""Size limit of a rank's event log. Only users' features repeat lines."""

MOST_WAITING = 1 << 18
"""Maximum queued lines; further ones are dropped."""

FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: FileLogger.initialize``."""


class EventLog(logging.Handler):
    """Replaces nvidia-dlfw-inspect's log handler, which waits for the disk on every line.

    Lines stay in memory until :meth:`begin`, since ranks may be unknown before.
    """

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._folder = log_dir / EVENTS_FOLDER
        self._lines = _Lines()
        self._thread: WriterThread[tuple[int, str]] = WriterThread("log of events", self._lines, MOST_WAITING)

    def begin(self, *, in_full: bool) -> None:
        """Start writing.

        Args:
            in_full: write all lines; otherwise only warnings and errors, so a rank without any creates no file.
        """
        if self._lines.file is None:
            self._lines.least = logging.NOTSET if in_full else logging.WARNING
            path = self._folder / log_file_name(own_rank())
            file = LogFile(path, LIMIT, "")
            file.note_progress = self._thread.note_progress
            self._lines.file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._thread.put((record.levelno, f"{line}\n"), 1)

    def hurry(self) -> Callable[[], bool]:
        return self._thread.hurry()

    def take_failure(self) -> BaseException | None:
        return self._thread.take_failure()

    def close(self) -> None:
        """Wait until all lines are written, or until the disk no longer responds, which is logged."""
        self.begin(in_full=own_rank() == 0)
        self._thread.finish()
        super().close()


class _Lines:
    """The thread's part of the log.

    Attributes:
        file: None until :meth:`EventLog.begin`.
        least: the lowest level to write.
    """

    def __init__(self) -> None:
        self.file: LogFile | None = None
        self.least = logging.NOTSET

    def take(self, job: tuple[int, str]) -> bool:
        level, line = job
        if self.file is not None and level >= self.least:
            self.file.append(line)
        return self.file is not None

    def flush(self) -> None:
        if self.file is not None:
            self.file.flush()

    def leave(self) -> None:
        if self.file is not None:
            self.file.leave()
