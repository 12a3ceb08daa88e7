"""The record store: files of a run that other tools can read, and their reader.

    from te_precision_callbacks.runs import open_run
    run = open_run("logs")                  # RecordedRun: tables of Arrow, and typed access
    run.grid("underflows%", "activation")   # layers x iterations

Sessions record their runs.
"""

from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.recorded import (
    Grid,
    NotARunError,
    RecordedRun,
    RunError,
    Segment,
    SeveralRunsError,
    Thinned,
    UnknownSubjectError,
)
from te_precision_callbacks.runs.run_files import traces_of

__all__ = [
    "Grid",
    "NotARunError",
    "RecordedRun",
    "RunError",
    "Segment",
    "SeveralRunsError",
    "Thinned",
    "UnknownSubjectError",
    "list_runs",
    "open_run",
    "traces_of",
]
