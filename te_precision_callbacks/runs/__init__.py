"""The record store: a run as files that other tools read too, and its reader.

    from te_precision_callbacks.runs import open_run
    run = open_run("logs")                  # RecordedRun: tables of Arrow, and typed access
    run.grid("underflows%", "activation")   # layers x iterations

A session writes a run by itself. :class:`RunWriter` writes one without a session; its module shows how.
"""

from te_precision_callbacks.runs.errors import NotARunError, RunError, SeveralRunsError, UnknownSubjectError
from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.recorded import Grid, RecordedRun, Segment, Thinned
from te_precision_callbacks.runs.trace_files import traces_of
from te_precision_callbacks.runs.writing import RunWriter

__all__ = [
    "Grid",
    "NotARunError",
    "RecordedRun",
    "RunError",
    "RunWriter",
    "Segment",
    "SeveralRunsError",
    "Thinned",
    "UnknownSubjectError",
    "list_runs",
    "open_run",
    "traces_of",
]
