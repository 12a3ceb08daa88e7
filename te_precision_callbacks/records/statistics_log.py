"""The statistics log: nvidia-dlfw-inspect's text file of statistics, with all digits.

<log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - fc1_activation_max   iteration=000002   value=4.318804740905762

A line ends with ``rank=<rank>`` where its number is of that rank alone although statistics are reduced over ranks, as
after a reduction that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TextIO

from te_precision_callbacks.records.model import Row, RunInfo, StepRecords

STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: make_default_statistics_logger``."""

_LINE = "{time} - INFO - {name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value}{mark}\n"
_LOCAL_MARK = " \t\t\t\t rank={rank}"


def log_file_name(rank: int) -> str:
    """nvidia-dlfw-inspect's name for the log of a rank."""
    return f"nvdlfw_inspect_globalrank-{rank}.log"


OVERWRITE_VARIABLE = "NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE"
"""nvidia-dlfw-inspect's: ``0`` has it append to a file that is there, anything else empty it."""


def is_overwritten() -> bool:
    """Whether the user has told nvidia-dlfw-inspect what to do with a file that is there, so that it is left to it."""
    return OVERWRITE_VARIABLE in os.environ


def keep_previous(path: Path) -> None:
    """Move a file that is there aside, to the next free ``<name>.1``, ``<name>.2`` and so on.

    nvidia-dlfw-inspect empties it instead. It may belong to another process that is running: that one goes on writing
    into it, under its new name. However many processes do this at once, no file takes the place of another.
    """
    if is_overwritten() or not path.is_file():
        return
    for count in itertools.count(1):
        kept = path.with_name(f"{path.name}.{count}")
        try:
            kept.open("x").close()  # the name is ours: a rename alone would replace what another process has put there
        except FileExistsError:
            continue
        try:
            path.replace(kept)
        except FileNotFoundError:  # another process was first
            kept.unlink()
        return


def claim(path: Path) -> TextIO:
    """Open a new file that no other process has; what is there is kept.

    Raises:
        OSError: it cannot be made.
    """
    if is_overwritten():
        append = os.environ[OVERWRITE_VARIABLE] == "0"
        return path.open("a" if append else "w", encoding="utf-8")
    while True:
        keep_previous(path)
        try:
            return path.open("x", encoding="utf-8")
        except FileExistsError:
            # Another process was first, whose file a third one may have moved aside since; or what is there is no file.
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode) and not path.is_file():
                    raise


def format_value(value: float) -> str:
    """The shortest decimal that reads back as the same float64, without an exponent, which tools do not expect."""
    return format(Decimal(repr(value)), "f") if math.isfinite(value) else f"{value}"


def statistic_label(row: Row, layer: str | None = None) -> str:
    """Transformer Engine's name of a number: ``<layer>_<tensor>_<statistic>``; with another name for the layer."""
    return "_".join(part for part in (layer or row.layer, row.tensor, row.statistic) if part)


class StatisticsLog:
    """The sink that writes the statistics log of a rank. A step is in the file when ``write`` returns.

    The file is made when there is something to write.

    Args:
        own_only: write what is this rank's alone, since another rank writes what is reduced.
        given_names: layer -> the name that the script has given to it, under which it is written. It may change.
    """

    def __init__(self, *, own_only: bool = False, given_names: Mapping[str, str] | None = None) -> None:
        self._own_only = own_only
        self._given_names = {} if given_names is None else given_names
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._mark = ""
        self._begun: StepRecords | None = None
        self._position = 0

    def start(self, run: RunInfo) -> None:
        """Keep the file of an earlier run."""
        self._mark = _LOCAL_MARK.format(rank=run.rank)
        self._path = run.log_dir / STATISTICS_FOLDER / log_file_name(run.rank)
        keep_previous(self._path)

    def write(self, records: StepRecords) -> None:
        """Append a line a number."""
        rows = list(records)
        if self._own_only:
            rows = [row for row, own in zip(rows, records.own, strict=True) if own]
        if self._path is None or not rows:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = claim(self._path)
        now = datetime.now()
        time = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
        mark = self._mark if records.local else ""
        text = "".join(
            _LINE.format(
                time=time,
                name=statistic_label(row, self._given_names.get(row.layer)),
                iteration=records.iteration,
                value=format_value(row.value),
                mark=mark,
            )
            for row in rows
        )
        if records is self._begun:  # Ctrl-C came when it was written
            self._file.seek(self._position)
            self._file.truncate()
        else:
            self._position = self._file.tell()
            self._begun = records
        self._file.write(text)
        self._file.flush()
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self._path} was deleted while it was written")

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self._path = None
        if self._file is not None:
            self._file.close()
            self._file = None
