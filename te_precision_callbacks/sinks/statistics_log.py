"""The statistics log: nvidia-dlfw-inspect's text file of statistics, with all digits.

<log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - fc1_activation_max   iteration=000002   value=4.318804740905762

A log is an append-only, locked text file with a size limit, for use in one thread. If another process is writing the
file, ``<name>.1`` is used. At the limit, the log ends.

A line ends with ``rank=<rank>`` if its value is local although statistics are reduced over ranks. A run in an earlier
run's folder appends to the file, after a line that names the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.files import AppendedFile
from te_precision_callbacks.sinks.step_records import RunInfo, StepRecords
from te_precision_callbacks.sinks.writer_thread import Wait, WriterThread
from te_precision_callbacks.statistics.series import SeriesTable, log_name

logger = logging.getLogger(__name__)

_CHUNK = 1 << 22
"""Size in bytes of the buffer of a log."""

EVENTS_FOLDER = "nvdlfw_inspect_logs"

STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: make_default_statistics_logger``."""

MAX_QUEUED = 1 << 22
"""Maximum number of queued values, some 50 MB; further steps are dropped."""

DEFAULT_LIMIT = 1 << 30
"""Default size limit of a rank's log in bytes: some 10^7 values."""

_AT_ONCE = 1 << 14
"""Number of values formatted at once, which bounds the memory for the text of a large step."""

_TAB = " \t\t\t\t "


def log_file_name(rank: int) -> str:
    return f"nvdlfw_inspect_globalrank-{rank}.log"


def format_value(value: float) -> str:
    """Format a float64 as the shortest decimal that reads back as the same value, without an exponent."""
    text = repr(value)
    if "e" in text:
        return format(Decimal(text), "f")
    return text


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
    time = datetime.now()
    return f"{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03d}"


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


class StatisticsLog:
    """Sink that writes the statistics log of a rank, in a thread.

    The file is created at the first write. A step is in it at the end of the step (``WriterThread.catch_up``), and
    all steps are when ``close`` returns, unless the disk is too slow, which is logged.

    Args:
        own_only: write only local values, since another rank writes the reduced ones; may be set until ``start``.
        given_names: layer -> the script's name for it. The mapping may change.
        limit: maximum size of the log in bytes; 0 for no limit.
    """

    def __init__(
        self, *, own_only: bool = False, given_names: Mapping[str, str] | None = None, limit: int = DEFAULT_LIMIT
    ) -> None:
        self.own_only = own_only
        self._given_names = {} if given_names is None else given_names
        self._limit = limit
        self._named: SeriesTable | None = None
        self._named_as: Mapping[str, str] = {}
        self._names: list[str] = []
        self.thread: WriterThread[LogJob] | None = None
        self._local_mark = ""
        self._last: StepRecords | None = None

    def start(self, run: RunInfo) -> None:
        path = run.log_dir / STATISTICS_FOLDER / log_file_name(run.rank)
        advice = "The records continue. To keep more, set statistics_log='rank0, 4GiB' or 'rank0, unlimited'."
        self._local_mark = f"{_TAB}rank={run.rank}"
        self.thread = WriterThread("statistics log", LogFile(path, self._limit, advice), MAX_QUEUED)

    def write(self, records: StepRecords) -> None:
        """Queue the values of a step; dropped while more than :data:`MAX_QUEUED` values are queued."""
        self._raise_failure()
        count = sum(records.own) if self.own_only else len(records)
        if self.thread is not None and count:
            job = functools.partial(self._lines, records, time_now(), self._names_in(records.table))
            self.thread.put(job, count)

    def flush_soon(self) -> Wait:
        if self.thread is None:
            return lambda _: True
        return self.thread.flush_soon()

    def _names_in(self, table: SeriesTable) -> Sequence[str]:
        if self._named is not table or self._named_as != self._given_names:
            self._named, self._named_as, self._names = table, dict(self._given_names), []
        for series in table.since(len(self._names)):
            layer = self._named_as.get(series.layer, series.layer)
            self._names.append(log_name(layer, series.family.tensor, series.family.statistic))
        return self._names

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written, or the disk no longer responds; an interrupted call can be repeated."""
        if self.thread is not None:
            self.thread.finish()
        self._raise_failure()
        self.thread = None

    def _raise_failure(self) -> None:
        failure = None if self.thread is None else self.thread.take_failure()
        if failure is not None:
            self.thread = None
            raise failure

    def _lines(self, records: StepRecords, time: str, names: Sequence[str]) -> Iterator[str]:
        if records is self._last:  # queued twice, since Ctrl-C interrupted write()
            return
        self._last = records
        numbers: Iterable[tuple[int, float]] = zip(records.series.tolist(), records.values, strict=True)
        remaining = iter(itertools.compress(numbers, records.own) if self.own_only else numbers)
        line_start = f"{time} - INFO - "
        between = f"{_TAB}iteration={records.iteration:06d}{_TAB}value="
        line_end = f"{self._local_mark if records.local else ''}\n"
        while some := list(itertools.islice(remaining, _AT_ONCE)):
            yield "".join(
                f"{line_start}{names[number]}{between}{format_value(value)}{line_end}" for number, value in some
            )
