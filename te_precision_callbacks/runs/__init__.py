"""The records of a run, which sessions write as Parquet files, and their reader.

from te_precision_callbacks.runs import open_run
run = open_run("logs")                  # RecordedRun: Arrow tables, and typed access
run.grid("underflows%", "activation")   # layers x iterations
"""

from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.recorded import (
    Grid,
    NotARunError,
    RecordedRun,
    RunError,
    Segment,
    SeveralRunsError,
    UnknownSubjectError,
)

__all__ = [
    "Grid",
    "NotARunError",
    "RecordedRun",
    "RunError",
    "Segment",
    "SeveralRunsError",
    "UnknownSubjectError",
    "list_runs",
    "open_run",
]
