"""``te-precision report``: a recorded run as one page.

Usage::

    te-precision report logs
    te-precision report logs -o report.html

The exit code is 0; 2 for a path without a run, and for a run without values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Run


def report_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The log folder, or the folder of a single run.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The output file, ending in .html."),
    ] = Path("report.html"),
    *,
    run: Run = None,
) -> None:
    """Make one page of a recorded run that opens offline: coverage, worst layers, heat maps, layers, the depth profile.

    A page has at most 10 MB. It marks which of its numbers are exact.
    """
    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.views.report.page import MOST_BYTES, write_report

    recorded, note = chosen_run(path, run)
    if note:
        terminal.show_text(note)
    written = write_report(recorded, output)
    for line in recorded.notes:
        terminal.show_text(f"note: {line}", hanging=6)
    size = written.stat().st_size
    terminal.show_text(f"{written}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        terminal.show_text(f"It is larger than {MOST_BYTES / 1e6:.0f} MB: the facts of the run alone need that much.")
    recorded.require_undamaged()
