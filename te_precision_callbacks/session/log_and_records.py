"""The statistics log and the records of a run, and the page that is made of the records."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.options import SessionOptions, read_statistics_log
from te_precision_callbacks.runs.limits import record_limit
from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.recording import Place
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.runs.trace_files import new_trace_file
from te_precision_callbacks.session.sinks import Sinks
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import Sink

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"


class LogAndRecords:
    """The statistics log and the records of a run, as far as the options ask for them.

    Args:
        options: the session's options.
        log_dir: the folder of the session's files.
        given_names: layer -> the name that the script gave to it and to no other layer.
        ranks: those that reduce together.

    Attributes:
        log: the statistics log; None without one.
        records: the records; None if the run is not recorded.
        sinks: those of the two that there are.
        page: the page of the run once it is written, before that the command that makes it; empty as long as there is
            nothing for a page.
    """

    def __init__(self, options: SessionOptions, log_dir: Path, given_names: Mapping[str, str], ranks: Ranks) -> None:
        choice, limit = read_statistics_log(options.statistics_log), record_limit(options.records)
        self._on_all_ranks = choice.ranks == "all"
        self._ranks = ranks
        self._log_dir = log_dir
        self.log = None if choice.ranks == "off" else StatisticsLog(given_names=given_names, limit=choice.limit)
        self.records = RecordSink(log_dir, limit) if limit else None
        self.page = ""
        self.sinks: list[Sink] = [sink for sink in (self.log, self.records) if sink is not None]

    @property
    def in_full(self) -> bool:
        """Whether this rank writes more than its own numbers, failures and dumps."""
        return self._ranks.leads or self._on_all_ranks

    @property
    def place(self) -> Place | None:
        """Where the run is recorded; None if it is not."""
        return None if self.records is None else self.records.place

    def attach(self) -> None:
        """Decide what this rank writes, once the ranks have met."""
        if self.log is not None:
            self.log.own_only = not self.in_full

    def hurry(self) -> list[Callable[[], bool]]:
        """Have what was handed over written at once; see :meth:`WriterThread.hurry`."""
        return [file.hurry() for file in (self.log, self.records) if file is not None]

    def trace_file(self, first: int, last: int) -> Path:
        """The file of a profile of some iterations: in the folder of the run, or in the log folder if there is none."""
        return new_trace_file(self._log_dir, self.place, own_rank(), first, last)

    @property
    def _run_id(self) -> str:
        """The name of the run; empty if nothing is recorded that a view could show, or if its folder is gone."""
        records = self.records
        if records is None or records.place is None or not records.has_content:
            return ""
        run_id = records.place.run_id
        return run_id if (self._log_dir / FOLDER / run_id).is_dir() else ""

    def tell_command(self) -> str:
        """Log the command that makes the page of the run.

        Returns:
            The name of the run, or an empty text if nothing is recorded that a page could show.
        """
        run_id = self._run_id
        if run_id:
            self.page = tell_command(self._log_dir, run_id)
        return run_id

    def speed_command(self, trace: Path) -> str:
        """The command that reads a trace of the run."""
        if run_id := self._run_id:
            return f"te-precision speed {_quoted_run(self._log_dir, run_id)}"
        return f"te-precision speed --trace {shlex.quote(str(trace))}"

    def write_page(self, run_id: str, sinks: Sinks) -> None:
        """Write the page of the run into the log folder, and hand it to the trainer's loggers.

        Raises:
            PrecisionDebugError: the run cannot be read, or the page cannot be made or written.
        """
        from te_precision_callbacks.views.report import write_report

        path = write_report(open_run(self._log_dir / FOLDER / run_id), self._log_dir / REPORT_FILE)
        logger.info("The report of this run: %s", path)
        self.page = str(path)
        sinks.report(path)


def tell_command(log_dir: Path, run_id: str) -> str:
    """Log the command that makes the page of a run, and give it.

    Args:
        log_dir: the session's log folder.
        run_id: the run; the folder may have others.
    """
    command = f"te-precision report {_quoted_run(log_dir, run_id)}"
    logger.info("%s makes one page of this run.", command)
    return command


def _quoted_run(log_dir: Path, run_id: str) -> str:
    """The path of a run for a command: the log folder, or the run's own if there are others in it."""
    path = log_dir if list_runs(log_dir) == (run_id,) else log_dir / FOLDER / run_id
    return shlex.quote(str(path.absolute()))
