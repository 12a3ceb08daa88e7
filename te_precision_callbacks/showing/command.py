"""``te-precision show``: a recorded run on a terminal, also while it is written.

Usage::

    te-precision show logs
    te-precision show logs --follow
    te-precision show logs --statistic underflows% --most 10

The exit code is 0; 2 for wrong use, such as a path that is no run, or a run without numbers. ``--json`` prints one JSON
object.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks import terminal
from te_precision_callbacks.terminal import Json, Run

if TYPE_CHECKING:
    from te_precision_callbacks.showing.view import Curve, RunView


_MOST_FAILURES = 5
"""How often in a row a run that is followed may be unreadable."""

_SHARE = 4.0
"""How many times as long as a run was read it is left alone, however large it is."""


def show_command(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A recorded run: its log folder.")],
    *,
    run: Run = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A statistic, as in a config or with its recipe. May be given several times."
        ),
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", min=1, help="The layers of each statistic.")] = 3,
    follow: Annotated[
        bool, typer.Option("--follow", help="Draw again while the run is written, and end with it.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How often, with --follow.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Show a run: the worst layers by each statistic, curves, coverage, the loss, the last events."""
    from te_precision_callbacks.showing.view import NothingToShowError, look
    from te_precision_callbacks.store.choosing import chosen_run

    recorded, told = chosen_run(path, run)
    if told:
        terminal.show_text(told, err=as_json)
    chosen = recorded.run_id if told else run  # which stays the one that is followed

    def again() -> RunView:
        return look(chosen_run(path, chosen)[0], statistic or (), most)

    view = look(recorded, statistic or (), most)
    if follow:
        view = _follow(view, again, every, as_json=as_json)
    if view.is_empty:
        why = f"no statistic was recorded, and no loss ({view.status})."
        raise NothingToShowError(" ".join([f"{path} has no numbers: {why}", *view.notes]))
    if as_json:
        terminal.show_json(_for_json(view))
    elif not follow:
        from te_precision_callbacks.showing.screen import Screen

        terminal.show(Screen(view))


def _follow(view: RunView, again: Callable[[], RunView], every: float, *, as_json: bool) -> RunView:
    """Draw the run until it has ended, and give what it then is."""
    from rich.console import Console
    from rich.live import Live

    from te_precision_callbacks.showing.screen import Screen
    from te_precision_callbacks.store import RunError

    drawing = Live(Screen(view), console=Console(highlight=False), auto_refresh=False, vertical_overflow="ellipsis")
    failures, took = 0, 0.0
    with contextlib.nullcontext() if as_json else drawing:
        while view.status == "running":
            time.sleep(max(every, _SHARE * took))
            begun = time.monotonic()
            try:
                view = again()
            except RunError:  # a part may be replaced while it is read
                failures += 1
                if failures == _MOST_FAILURES:
                    raise
                continue
            failures, took = 0, time.monotonic() - begun
            if not as_json:
                drawing.update(Screen(view), refresh=True)
    return view


def _for_json(view: RunView) -> dict[str, Any]:
    found = dict(vars(view))
    found["scalars"] = {scalar.name: _curve(scalar.curve) for scalar in view.scalars}
    found["worst"] = {
        name: [
            {**vars(series), "lost": series.lost and series.lost._asdict(), "curve": _curve(series.curve)}
            for series in worst
        ]
        for name, worst in view.worst.items()
    }
    return found


def _curve(curve: Curve) -> dict[str, Any]:
    return {"iterations": curve.iterations.tolist(), "values": curve.values.tolist()}
