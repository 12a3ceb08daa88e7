"""``te-precision search``: the layers and GEMMs to keep in high precision.

Usage::

    te-precision search package.module:setup --cosine 0.999
    te-precision search package.module:setup --low-share 0.85 --device h200 --max-time 600 -o search

The exit code is 0 only if the confirmation shows that the choice is within the tolerance, and otherwise 1; 2 for wrong
use, and if no choice meets the budget. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.errors import rename_keywords
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.check.command import install_backend

_OPTIONS = ("low_share", "extra_ms", "cosine", "device", "together", "sweep_batches", "seeds", "steps", "tolerance")


def search_command(
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
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the results are written, to resume from.")
    ] = Path("search"),
    as_json: Json = False,
) -> None:
    """Choose the layers and GEMMs to keep in high precision within a budget, and confirm the choice with seeds."""
    install_backend(None)
    from te_precision_callbacks.check.factory import build_setup
    from te_precision_callbacks.search.printing import show
    from te_precision_callbacks.search.searching import search
    from te_precision_callbacks.views.compare.paired import TOLERANCE

    try:
        with rename_keywords({name: f"--{name.replace('_', '-')}" for name in _OPTIONS}):
            result = search(
                **build_setup(setup),
                low_share=low_share,
                extra_ms=extra_ms,
                cosine=cosine,
                device=device,
                together=together or (),
                sweep_batches=sweep_batches,
                seeds=seeds,
                steps=steps,
                tolerance=TOLERANCE if tolerance is None else tolerance,
                max_time=max_time,
                folder=folder,
            )
    except KeyboardInterrupt:
        typer.echo(f"te-precision: interrupted. The same command goes on with what is measured in {folder}.", err=True)
        raise
    if as_json:
        terminal.show_json(result.as_json())
    else:
        show(result, folder)
    if result.confirmation is None or result.confirmation.choice.decision != "within":
        raise typer.Exit(1)
