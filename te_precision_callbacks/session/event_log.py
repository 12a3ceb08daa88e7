"""nvidia-dlfw-inspect's log of events, which a thread writes: which feature acts on which layer, GEMM and tensor.

<log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - LAYER=fc1: Feature=LogTensorStats, API=inspect_tensor: activation
"""

from __future__ import annotations

import logging
from pathlib import Path

from te_precision_callbacks.ranks import own_rank
from te_precision_callbacks.records.log_file import LogFile
from te_precision_callbacks.records.statistics_log import EVENTS_FOLDER, log_file_name
from te_precision_callbacks.records.writer_thread import WriterThread

LIMIT = 256 << 20
"""The bytes of a rank's log of events: each line comes once, except from users' features that repeat themselves."""

MOST_WAITING = 1 << 18
"""The lines that may wait for the thread, or for the model; further ones are left out."""

FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: FileLogger.initialize``."""


class EventLog(logging.Handler):
    """The handler of nvidia-dlfw-inspect's logger, in place of its own, whose every line waits for the disk.

    Lines wait in memory until :meth:`begin` says which ones this rank writes: the ranks may not be known before.

    Args:
        log_dir: the folder of the session's files.
    """

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._folder = log_dir / EVENTS_FOLDER
        self._thread: WriterThread[tuple[int, str]] = WriterThread("log of events", self, MOST_WAITING)
        self._file: LogFile | None = None
        self._least = logging.INFO

    def begin(self, *, in_full: bool) -> None:
        """Begin to write.

        Args:
            in_full: whether this rank writes all lines. If not, it writes warnings and errors, so that a rank to which
                nothing happens makes no file.
        """
        if self._file is None:
            self._least = logging.NOTSET if in_full else logging.WARNING
            path = self._folder / log_file_name(own_rank())
            self._file = LogFile(path, LIMIT, "", self._thread.note_progress)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over a line."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._thread.put((record.levelno, f"{line}\n"), 1)

    def take_failure(self) -> BaseException | None:
        """Why lines could not be written; None the next time."""
        return self._thread.take_failure()

    def close(self) -> None:
        """Wait until all lines are written, or until the disk no longer answers, which is logged."""
        self.begin(in_full=own_rank() == 0)
        self._thread.finish()
        super().close()

    # ------------------------------------------------------------------ in the log's own thread

    def take(self, job: tuple[int, str]) -> bool:
        """Write a line, once it is known which lines are written."""
        level, line = job
        if self._file is not None and level >= self._least:
            self._file.append(line)
        return self._file is not None

    def leave(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
