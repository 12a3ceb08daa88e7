"""``te-precision show``: a recorded run on a terminal, also while it is written.

Usage::

    te-precision show logs
    te-precision show logs --follow
    te-precision show logs --statistic underflows% --most 10
    te-precision show logs --last-steps

The exit code is 0; 2 for wrong use, such as a path without a run, or an empty run. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json, Run

if TYPE_CHECKING:
    from te_precision_callbacks.runs import RecordedRun
    from te_precision_callbacks.views.show.view import RunView


MOST_TENSORS = 20
_MOST_LAYERS = 3
_MOST_FAILURES = 5

_SHARE = 4.0
"""The pause between two reads of a run, as a multiple of the time to read it."""


def show_command(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A recorded run: its log folder.")],
    *,
    run: Run = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A statistic, as in a config or with its recipe. Can be repeated."),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The number of layers per statistic (3), or of tensors (20)."),
    ] = None,
    last_steps: Annotated[
        bool,
        typer.Option(
            "--last-steps", help="The last steps before the first problem: the largest magnitude of each tensor."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Update until the run ends, and wait for a run that has not started. In a file or pipe: print once,"
            " at the end.",
        ),
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Seconds between updates with --follow.")
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Show a run: the verdict, coverage, the loss, the worst layers by each statistic, the last events."""
    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.runs.summary import why_nothing_to_show
    from te_precision_callbacks.views.show.view import LastStepsView, NothingToShowError, RunView

    recorded, note = _wait_for_run(path, run, every) if follow else chosen_run(path, run)
    if note:
        terminal.show_text(note, err=as_json)
    if last_steps:
        steps = LastStepsView(recorded, most or MOST_TENSORS)
        if as_json:
            terminal.show_json(steps.data)
        else:
            terminal.show(steps)
        recorded.require_undamaged()
        return
    chosen = recorded.run_id if note else run

    def read() -> RunView:
        return RunView(chosen_run(path, chosen)[0], statistic or (), most or _MOST_LAYERS)

    view = RunView(recorded, statistic or (), most or _MOST_LAYERS)
    is_live = follow and not as_json and terminal.is_terminal()
    if follow:
        view = _follow(view, read, every, is_live=is_live)
    why = why_nothing_to_show(view.run)
    if why:
        raise NothingToShowError(why + view.run.notes_sentence)
    if as_json:
        terminal.show_json(view.as_json())
    elif not is_live:
        terminal.show(view)
    recorded.require_undamaged()


def _wait_for_run(path: str, run: str | None, every: float) -> tuple[RecordedRun, str]:
    from te_precision_callbacks.runs import NotARunError, reading

    is_announced = False
    while True:
        try:
            return reading.chosen_run(path, run)
        except NotARunError:
            if Path(path).is_file() or reading.list_runs(path):
                raise
        if not is_announced:
            terminal.show_text(f"Waiting for a run in {path}. Ctrl-C ends it.", err=True)
            is_announced = True
        time.sleep(every)


def _follow(view: RunView, read: Callable[[], RunView], every: float, *, is_live: bool) -> RunView:
    """Read the run again until it ends, and draw it each time if ``is_live``; returns the last view."""
    from te_precision_callbacks.runs import RunError

    failures = 0
    pause = every
    live = Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="ellipsis")
    with live if is_live else contextlib.nullcontext():
        while True:
            if is_live:
                live.update(view, refresh=True)
            if view.status != "running":
                return view
            time.sleep(pause)
            begun = time.monotonic()
            try:
                view = read()
            except RunError:  # a file may have been replaced during the read
                failures += 1
                if failures == _MOST_FAILURES:
                    raise
                continue
            failures = 0
            pause = max(every, _SHARE * (time.monotonic() - begun))
