"""``te-precision search``: the layers and GEMMs to keep in high precision.

Usage::

    te-precision search package.module:setup --cosine 0.999
    te-precision search package.module:setup --low-share 0.85 --device h200 --max-time 600 -o search

The exit code is 0 only if the confirmation shows that the choice is within the tolerance, and otherwise 1; 2 for wrong
use, and if no choice meets the budget. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.errors import rename_keywords
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check.command import install_backend
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import fold_names

if TYPE_CHECKING:
    from te_precision_callbacks.search.results import GradientEffect, SearchResult

_MOST_ROWS = 12


def search_command(
    context: typer.Context,
    setup: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function without arguments that returns a mapping with model, closure (batch -> loss), batches, and"
            " optimizer to confirm the choice.",
        ),
    ],
    *,
    low_share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Budget: the least share of multiply-adds in low precision, such as 0.85."),
    ] = None,
    extra_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Budget: the most planned milliseconds of a step over all-low; with --device."),
    ] = None,
    cosine: Annotated[
        float | None,
        typer.Option(metavar="COSINE", help="Budget: the least cosine of the gradient to high precision."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU of planned milliseconds, such as h100, h200_nvl or b300."),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="Layers whose names match, with equal captures, are chosen together. Can be repeated.",
        ),
    ] = None,
    sweep_batches: Annotated[int, typer.Option(metavar="N", help="Batches of each measurement.")] = 1,
    seeds: Annotated[int, typer.Option(metavar="N", help="Paired short trainings; 0 for no confirmation.")] = 3,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each short training.")] = 20,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="The allowed difference of final losses to all-high (default: 0.0025)."),
    ] = None,
    max_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no measurement after this time.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the results are written.")
    ] = Path("search"),
    as_json: Json = False,
) -> None:
    """Choose the layers and GEMMs to keep in high precision within a budget, and confirm the choice with seeds."""
    install_backend(None)
    from te_precision_callbacks.check.factory import build_setup
    from te_precision_callbacks.search.searching import search

    not_passed = ("setup", "as_json")
    options = {name: value for name, value in context.params.items() if value is not None and name not in not_passed}
    with rename_keywords({name: f"--{name.replace('_', '-')}" for name in options}):
        result = search(**build_setup(setup), **options)
    if as_json:
        terminal.show_json(result)
    else:
        _show(result, folder)
    if result.confirmation is None or result.confirmation.choice.decision != "within":
        raise typer.Exit(1)


def _show(result: SearchResult, folder: Path) -> None:
    terminal.show_text(f"Recipe {result.recipe}; {result.passes} forwards with backward.")
    terminal.show("\n[bold]Effect of low precision, alone in a layer[/bold]")
    measured = [
        (group.level, group.name, f"{group.effect.error:.3g}", f"{group.effect.cosine:.6f}", f"{group.effect.loss:.6g}")
        for group in result.measured
    ]
    _show_rows(("level", "where", "gradient error", "cosine", "loss"), measured)
    terminal.show("\n[bold]Cost against quality[/bold]")
    points = []
    for point in result.frontier:
        extra = "" if point.extra_ms is None else f"{point.extra_ms:.3g}"
        points.append((point.kept or "nothing", f"{percent(point.low_share)} %", extra, f"{point.expected_error:.3g}"))
    _show_rows(("also in high precision", "low share", "ms over all-low", "expected error"), points)
    terminal.show("\n[bold]Choice[/bold]")
    for gemms, names in group_by_key((gemms, name) for name, gemms in result.high.items()).items():
        gemm_names = "" if gemms == GEMMS else f" ({', '.join(gemms)})"
        terminal.show_text(f"In high precision{gemm_names}: {', '.join(fold_names(names, most=8))}.", hanging=2)
    if not result.high:
        terminal.show_text("Everything in low precision.")
    extra = "" if result.extra_ms is None else f", {result.extra_ms:.3g} ms over all-low"
    terminal.show_text(f"All-low: {_effect(result.all_low)}.")
    terminal.show_text(f"Choice: {_effect(result.effect)}; {percent(result.low_share)} % low{extra}.")
    if result.confirmation is not None:
        terminal.show(f"\n[bold]Confirmation, {many(result.confirmation.steps, 'step')}[/bold]")
        for line in result.describe():
            terminal.show_text(line, hanging=2)
    terminal.show_notes(result.notes)
    terminal.show_text(f"Written: {', '.join(sorted(map(str, folder.glob('*'))))}.")


def _effect(effect: GradientEffect) -> str:
    return f"gradient error {effect.error:.3g}, cosine {effect.cosine:.6f}"


def _show_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = terminal.table(*heads)
    for cells in rows[:_MOST_ROWS]:
        table.add_row(*map(terminal.cell, cells))
    terminal.show(table)
    if rows[_MOST_ROWS:]:
        terminal.show_text(f"and {len(rows) - _MOST_ROWS} more, which --json has.")
