"""Which run a command reads: the one that ``--run`` names, or the latest of the folder.

recorded, told = chosen_run("logs")
told            # "logs has 2 runs. The latest is read: 20261122-... The others, for --run: 20261121-..."
"""

from __future__ import annotations

from te_precision_callbacks.runs.reading import StrPath, list_runs, open_run
from te_precision_callbacks.runs.recorded import RecordedRun

_MOST_NAMED = 8


def chosen_run(path: StrPath, run: str | None = None) -> tuple[RecordedRun, str]:
    """Read a run for a command.

    Args:
        path: as for :func:`open_run`.
        run: likewise; None for the latest run of the folder.

    Returns:
        The run, and a line for the user on the choice that was made; empty where there was none to make.

    Raises:
        RunError: as from :func:`open_run`.
    """
    recorded = open_run(path, run=run or "latest")
    names = list_runs(path) if run is None else ()
    others = [name for name in reversed(names) if name != recorded.run_id]
    if not others:
        return recorded, ""
    more = len(others) - _MOST_NAMED
    listed = ", ".join(others[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return recorded, (
        f"{path} has {len(names)} runs. The latest is read: {recorded.run_id}. The others, for --run: {listed}."
    )
