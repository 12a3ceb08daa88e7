"""The statistics log: nvidia-dlfw-inspect's text file of statistics, with all digits.

<log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - fc1_activation_max   iteration=000002   value=4.318804740905762

A line ends with ``rank=<rank>`` if its number belongs to that rank alone although statistics are reduced over ranks, as
after a reduction that failed. A run in the folder of an earlier run appends to the file:
    <time> - INFO - Here another run begins, of process 4711.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple, TextIO

from te_precision_callbacks.records.model import RunInfo, StepRecords
from te_precision_callbacks.records.writer_thread import WriterThread
from te_precision_callbacks.statistics.series import SeriesTable, log_name

EVENTS_FOLDER = "nvdlfw_inspect_logs"

STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: make_default_statistics_logger``."""

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 22
"""The numbers that may wait for the thread, some 50 MB."""

_PAUSE = 0.01
"""The seconds between two looks whether the disk has kept up."""

_TAB = " \t\t\t\t "
_LOCAL_MARK = " \t\t\t\t rank={rank}"


def log_file_name(rank: int) -> str:
    """nvidia-dlfw-inspect's name for the log of a rank."""
    return f"nvdlfw_inspect_globalrank-{rank}.log"


OVERWRITE_VARIABLE = "NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE"
"""nvidia-dlfw-inspect's variable: with ``0`` it appends to an existing file, with any other value it empties the
file."""


def is_overwritten() -> bool:
    """Whether the user has told nvidia-dlfw-inspect how to treat an existing file, which then decides."""
    return OVERWRITE_VARIABLE in os.environ


class _ClaimedFile(io.TextIOWrapper):
    """A file for appending, locked until it is closed."""

    def close(self) -> None:
        """Close the file; processes forked meanwhile, such as workers of a DataLoader, do not keep it locked."""
        if not self.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


def claim(path: Path) -> TextIO:
    """Open a file for appending that no other process writes.

    Existing content is kept, and a line marks where the new part begins. If another running process has claimed the
    file, the first free one of ``<name>.1``, ``<name>.2`` and so on is opened. On a file system without locks, every
    file counts as free.

    Raises:
        OSError: the file cannot be created.
    """
    if is_overwritten():
        append = os.environ[OVERWRITE_VARIABLE] == "0"
        return path.open("a" if append else "w", encoding="utf-8")
    for name in itertools.chain([path.name], (f"{path.name}.{count}" for count in itertools.count(1))):
        file = _ClaimedFile(path.with_name(name).open("ab+"), encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:
            pass
        break
    if name != path.name:
        logger.warning("Another process is writing %s; this process writes %s instead.", path, name)
    _begin_part(file)
    return file


def _begin_part(file: TextIO) -> None:
    """Mark where the new part of the file begins."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.buffer.seek(size - 1)
        if file.buffer.read(1) != b"\n":  # the earlier process was killed while it wrote
            file.write("\n")
        file.write(f"{_now()} - INFO - Here another run begins, of process {os.getpid()}.\n")
        file.flush()


def _now() -> str:
    """The time in the format of the logging module."""
    now = datetime.now()
    return f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"


def format_value(value: float) -> str:
    """The shortest decimal that reads back as the same float64, without an exponent, since tools expect none."""
    text = repr(value)
    return format(Decimal(text), "f") if "e" in text else text


class _Step(NamedTuple):
    """What a step hands over to the thread.

    Attributes:
        at: when, in the format of the logging module.
        names: of the series, by their numbers; may grow.
        records: the numbers.
    """

    at: str
    names: Sequence[str]
    records: StepRecords


class StatisticsLog:
    """The sink that writes the statistics log of a rank.

    The file is created when there is something to write. A thread writes: a step is in the file ``FLUSH_SECONDS``
    (``writer_thread.py``) after it was handed over at the latest, and all steps are when ``close`` returns.

    Args:
        own_only: write only numbers of this rank alone, since another rank writes the reduced numbers.
        given_names: layer -> the name that the script has given to it, which the log uses. The mapping may change.
    """

    def __init__(self, *, own_only: bool = False, given_names: Mapping[str, str] | None = None) -> None:
        self._own_only = own_only
        self._given_names = {} if given_names is None else given_names
        self._named: SeriesTable | None = None
        self._named_as: Mapping[str, str] = {}
        self._names: list[str] = []
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._mark = ""
        self._given = 0  # numbers, counted by the training's thread
        self._taken = 0  # numbers, counted by the log's thread
        self._last: StepRecords | None = None
        self._thread: WriterThread[_Step | None] = WriterThread("te-precision statistics log", self._write_waiting)

    def start(self, run: RunInfo) -> None:
        """Take the path of the file from the run."""
        self._mark = _LOCAL_MARK.format(rank=run.rank)
        self._path = run.log_dir / STATISTICS_FOLDER / log_file_name(run.rank)

    def write(self, records: StepRecords) -> None:
        """Hand over a step's numbers, one line each. This waits while more than :data:`MOST_WAITING` wait for the disk.

        Raises:
            OSError: the file cannot be created, was deleted, or could not be written since.
        """
        self._raise_failure()
        count = sum(records.own) if self._own_only else len(records)
        if self._path is None or not count:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = claim(self._path)
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was deleted while it was written")
        while self.waiting > MOST_WAITING and not self._thread.has_failed:
            time.sleep(_PAUSE)
        self._given += count
        self._thread.put(_Step(_now(), self._names_in(records.table), records))

    @property
    def waiting(self) -> int:
        """The numbers that the thread has not written yet."""
        return self._given - self._taken

    def _names_in(self, table: SeriesTable) -> Sequence[str]:
        """The names of a table's series, each made once."""
        if self._named is not table or self._named_as != self._given_names:
            self._named, self._named_as, self._names = table, dict(self._given_names), []
        for number in range(len(self._names), len(table)):
            series = table[number]
            layer = self._named_as.get(series.layer, series.layer)
            self._names.append(log_name(layer, series.tensor, series.statistic))
        return self._names

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written, and close the file; an interruption may end the waiting, and a second call
        goes on with it.

        Raises:
            OSError: something could not be written.
        """
        if self._path is not None and self._file is not None:
            self._thread.put(None)
        self._path = None
        self._thread.finish()
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._thread.take_failure()
        if failure is not None:
            self._path = None
            raise failure

    # ------------------------------------------------------------------ in the log's own thread

    def _write_waiting(self, steps: deque[_Step | None]) -> bool:
        """Write what waits; returns whether that was the end."""
        ended = False
        while steps:
            step = steps.popleft()
            if step is None:  # the log is closed
                ended = True
            elif step.records is not self._last:  # again, if Ctrl-C came when it was handed over
                self._last = step.records
                self._write_step(step)
        if self._file is not None:
            self._file.flush()
        return ended

    def _write_step(self, step: _Step) -> None:
        records, names = step.records, step.names
        numbers: Iterable[tuple[int, float]] = zip(records.series.tolist(), records.values, strict=True)
        written = list(itertools.compress(numbers, records.own) if self._own_only else numbers)
        before, between = f"{step.at} - INFO - ", f"{_TAB}iteration={records.iteration:06d}{_TAB}value="
        after = f"{self._mark if records.local else ''}\n"
        text = "".join(f"{before}{names[number]}{between}{format_value(value)}{after}" for number, value in written)
        if self._file is not None:
            self._file.write(text)
        self._taken += len(written)
