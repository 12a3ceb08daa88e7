"""``te-precision speed``: what low precision costs and buys, expected for a device that need not be here.

Usage::

    te-precision speed RUN --device h200
    te-precision speed --shapes 15872x4096x12288,15872x4096x4096 --recipe fp8_current_scaling --device b300
    te-precision speed RUN --json

The exit code is 0; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json, Run

if TYPE_CHECKING:
    from te_precision_callbacks.speed.expected import CallPlan


DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="The device that times are expected for, such as h100, h200_nvl, b300, or the path of a YAML file with a"
        " device of your own. The default is the GPU of the run.",
    ),
]
"""The option of commands that expect times."""

PlanName = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="training: operands are cast once for their GEMMs, weights once a step. benchmark: each product casts both"
        " operands. The default is benchmark for --shapes, and training otherwise.",
    ),
]
"""The option of how often operands are cast."""


def speed_command(
    path: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A recorded run: its log folder; or give --shapes.")
    ] = None,
    *,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="MxKxN,...", help="Shapes in place of a run: tokens x in_features x out_features."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="The recipe of --shapes.")] = None,
    device: DeviceName = None,
    plan: PlanName = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Show where low precision saves time, and where it does not: expected times of each matrix product."""
    if (path is None) == (shapes is None):
        raise typer.BadParameter("give the log folder of a run, or --shapes", param_hint="RUN")
    if shapes is None:
        raise typer.BadParameter("recorded runs are not read yet", param_hint="RUN")
    _speed_of_shapes(shapes, recipe, device, plan, as_json=as_json)


def call_plan(name: str | None, default: CallPlan) -> CallPlan:
    """The plan of calls by its name.

    Raises:
        SpeedError: there is no such plan.
    """
    from te_precision_callbacks.config.problems import suggestion
    from te_precision_callbacks.speed.errors import SpeedError
    from te_precision_callbacks.speed.expected import CALL_PLANS

    found = next((each for each in CALL_PLANS if each == (name or default)), None)
    if found is None:
        raise SpeedError(f"There is no plan {name!r}.{suggestion(str(name), CALL_PLANS)}")
    return found


def _speed_of_shapes(shapes: str, recipe: str | None, device: str | None, plan: str | None, *, as_json: bool) -> None:
    from te_precision_callbacks.speed import printing
    from te_precision_callbacks.speed.costs import Shape
    from te_precision_callbacks.speed.devices import device_named
    from te_precision_callbacks.speed.expected import expected_shapes

    if device is None:
        raise typer.BadParameter("shapes need a device, such as --device h200", param_hint="--device")
    if recipe is None:
        raise typer.BadParameter("shapes need a recipe, such as --recipe fp8_current_scaling", param_hint="--recipe")
    chosen, calls = device_named(device), call_plan(plan, "benchmark")
    times = expected_shapes([Shape.parse(text) for text in shapes.split(",")], recipe, chosen)
    notes = printing.notes_of(times, chosen)
    if as_json:
        terminal.show_json({**printing.as_json(times, chosen, calls), "notes": notes})
    else:
        printing.show_times(times, chosen, calls)
        terminal.show_notes(notes)
