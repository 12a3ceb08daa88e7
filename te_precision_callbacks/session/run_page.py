"""The end of a recorded run: the command that makes its page is named, and with ``report=True`` the page is written."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.session.sinks import Sinks

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"


def tell_command(log_dir: Path, run_id: str) -> None:
    """Log the command that makes the page of a run.

    Args:
        log_dir: the session's log folder.
        run_id: the run; the folder may have others.
    """
    path = log_dir if list_runs(log_dir) == (run_id,) else log_dir / FOLDER / run_id
    logger.info("te-precision report %s makes one page of this run.", shlex.quote(str(path.absolute())))


def write_page(log_dir: Path, run_id: str, sinks: Sinks) -> Path:
    """Write the page of a run into the log folder, and hand it to the trainer's loggers.

    Returns:
        The file.

    Raises:
        PrecisionDebugError: the run cannot be read, or the page cannot be made or written.
    """
    from te_precision_callbacks.views.report import write_report

    path = write_report(open_run(log_dir / FOLDER / run_id), log_dir / REPORT_FILE)
    logger.info("The report of this run: %s", path)
    sinks.report(path)
    return path
