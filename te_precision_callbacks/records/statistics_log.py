"""The statistics log: nvidia-dlfw-inspect's text file of statistics, with all digits.

<log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-<rank>.log
    <time> - INFO - fc1_activation_max   iteration=000002   value=4.318804740905762
"""

from __future__ import annotations

import math
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TextIO

from te_precision_callbacks.records.model import Row, RunInfo, StepRecords

STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: make_default_statistics_logger``."""

_LINE = "{time} - INFO - {name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value}\n"


def log_file_name(rank: int) -> str:
    """nvidia-dlfw-inspect's name for the log of a rank."""
    return f"nvdlfw_inspect_globalrank-{rank}.log"


def keep_previous(path: Path) -> None:
    """Move a file of an earlier run aside, to the next free ``<name>.1``, ``<name>.2`` and so on.

    nvidia-dlfw-inspect empties it instead. Where ``NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE`` is set the file is left to it.
    """
    if "NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE" in os.environ or not path.is_file() or not path.stat().st_size:
        return
    count = 1
    while (kept := path.with_name(f"{path.name}.{count}")).exists():
        count += 1
    path.rename(kept)


def format_value(value: float) -> str:
    """The shortest decimal that reads back as the same float64, without an exponent, which tools do not expect."""
    return format(Decimal(repr(value)), "f") if math.isfinite(value) else f"{value}"


def statistic_label(row: Row) -> str:
    """Transformer Engine's name of a number: ``<layer>_<tensor>_<statistic>``."""
    return "_".join(part for part in (row.layer, row.tensor, row.statistic) if part)


class StatisticsLog:
    """The sink that writes the statistics log of a rank. A step is in the file when ``write`` returns."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: RunInfo) -> None:
        """Open the file; one of an earlier run is kept beside it."""
        folder = run.log_dir / STATISTICS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / log_file_name(run.rank)
        keep_previous(path)
        append = os.environ.get("NVDLFW_INSPECT_ENABLE_LOG_OVERWRITE") == "0"
        self._file = path.open("a" if append else "w", encoding="utf-8")

    def write(self, records: StepRecords) -> None:
        """Append a line a number."""
        if self._file is None:
            return
        now = datetime.now()
        time = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
        self._file.writelines(
            _LINE.format(
                time=time, name=statistic_label(row), iteration=records.iteration, value=format_value(row.value)
            )
            for row in records
        )
        self._file.flush()

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
