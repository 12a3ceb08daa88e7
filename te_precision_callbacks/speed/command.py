"""``te-precision speed``: what low precision costs and buys, expected for a device that need not be here, and measured.

Usage::

    te-precision speed RUN --device h200
    te-precision speed RUN --trace trace.json.gz
    te-precision speed --trace trace.json.gz
    te-precision speed --shapes 15872x4096x12288,15872x4096x4096 --recipe fp8_current_scaling --device b300
    te-precision speed RUN --calibrate
    te-precision speed RUN --table speed_calibration.json --json

The exit code is 0; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json, Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_precision_callbacks.speed.costs import CallPlan
    from te_precision_callbacks.speed.devices import Device
    from te_precision_callbacks.speed.estimate import Step, StepSpeed
    from te_precision_callbacks.speed.recorded import RunSpeed


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
        help="training: fprop, dgrad and wgrad of each linear layer; operands are cast once for their GEMMs, weights"
        " once a step. benchmark: each product casts both operands; of --shapes only fprop counts. The default is"
        " benchmark for --shapes, and training otherwise.",
    ),
]
"""The option of how often operands are cast."""


Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure the shapes on this GPU, as Transformer Engine runs them, and keep the times in the file of"
        " --table; only what the file does not have is measured.",
    ),
]
"""The option of commands that can measure."""

TableFile = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="Measured times, which come before those of the model. --calibrate writes them to it; its default is then"
        " speed_calibration.json.",
    ),
]
"""The option of commands that take measured times."""


def speed_command(
    path: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A recorded run: its log folder. Or give --shapes or --trace.")
    ] = None,
    *,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="TOKENSxINxOUT,...", help="Shapes in place of a run: tokens x in x out."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe of --shapes; with a run, what its layers in high precision could run in.",
        ),
    ] = None,
    device: DeviceName = None,
    plan: PlanName = None,
    calibrate: Calibrate = False,
    table: TableFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="A trace that profile= recorded, whose times are shown beside the expected ones. The default is the"
            " last one of the run. Without a run, the trace alone is shown.",
        ),
    ] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Show where low precision saves time, where it does not, and what to do: for a GPU that need not be here."""
    if path is None and shapes is None and trace is not None:
        expecting = {"--recipe": recipe, "--device": device, "--plan": plan, "--table": table}
        for name, value in (expecting | {"--calibrate": calibrate or None}).items():
            if value is not None:
                raise typer.BadParameter(
                    "it is for expected times; give the log folder of the run, too", param_hint=name
                )
        _show_trace(trace, as_json=as_json)
        return
    if path is not None and shapes is not None:
        raise typer.BadParameter("both a run and --shapes were given; give one of the two", param_hint="RUN")
    if path is None and shapes is None:
        raise typer.BadParameter("give the log folder of a run, --shapes, or --trace", param_hint="RUN")
    if path is None and trace is not None:
        raise typer.BadParameter("a trace has no shapes to expect times of; give one of the two", param_hint="--trace")
    calls = call_plan(plan, "training" if shapes is None else "benchmark")

    def expect(step: Step, chosen: Device) -> StepSpeed:
        return speed_of_step(step, chosen, plan=calls, recipe=recipe, calibrate=calibrate, table=table)

    if path is None:
        _show_shapes(str(shapes), recipe, device, calls, expect, as_json=as_json)
        return
    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.speed.recorded import run_speed

    recorded, told = chosen_run(path, run)
    if told:
        terminal.show_text(told, err=as_json)
    _show(run_speed(recorded, expect, device=device, trace=trace), as_json=as_json)


def _show_trace(trace: Path, *, as_json: bool) -> None:
    """Print what a step took in a trace whose run is not known."""
    from te_precision_callbacks.speed.recorded import RunSpeed
    from te_precision_callbacks.speed.trace import measure, read_trace

    _show(RunSpeed(None, measure(read_trace(trace)), (), ()), as_json=as_json)


def _show(known: RunSpeed, *, as_json: bool) -> None:
    from te_precision_callbacks.speed.printing import show_run

    if as_json:
        terminal.show_json(known.as_json())
    else:
        show_run(known)


def _show_shapes(
    shapes: str,
    recipe: str | None,
    device: str | None,
    plan: CallPlan,
    expect: Callable[[Step, Device], StepSpeed],
    *,
    as_json: bool,
) -> None:
    """Print what is expected of shapes, without a run."""
    if device is None:
        raise typer.BadParameter("shapes need a device, such as --device h200", param_hint="--device")
    if recipe is None:
        raise typer.BadParameter("shapes need a recipe, such as --recipe fp8_current_scaling", param_hint="--recipe")
    from te_precision_callbacks.coverage.coverage import Coverage
    from te_precision_callbacks.speed.costs import Shape
    from te_precision_callbacks.speed.devices import device_named
    from te_precision_callbacks.speed.estimate import Step, notes_of_shapes
    from te_precision_callbacks.speed.expected import products_of_shapes
    from te_precision_callbacks.speed.printing import show_times

    chosen = device_named(device)
    chosen.check_recipe(recipe)
    parsed = dict.fromkeys(Shape.parse(text) for text in shapes.split(","))
    products = Coverage(products_of_shapes(list(parsed), recipe, plan=plan))
    notes = tuple(notes_of_shapes(parsed, recipe, chosen, plan))
    speed = expect(Step(products, dict.fromkeys(map(str, parsed), recipe), notes=notes), chosen)
    if as_json:
        terminal.show_json(speed.as_json())
    else:
        show_times(speed.times, speed.total, speed.device, speed.plan)
        terminal.show_notes(speed.notes)


def call_plan(name: str | None, default: CallPlan) -> CallPlan:
    """The plan of calls by its name.

    Raises:
        SpeedError: there is no such plan.
    """
    from te_precision_callbacks.config.problems import suggestion
    from te_precision_callbacks.speed.costs import CALL_PLANS
    from te_precision_callbacks.speed.errors import SpeedError

    found = next((each for each in CALL_PLANS if each == (name or default)), None)
    if found is None:
        raise SpeedError(f"There is no plan {name!r}.{suggestion(str(name), CALL_PLANS)}")
    return found


def speed_of_step(
    step: Step,
    device: Device,
    *,
    plan: CallPlan,
    recipe: str | None,
    calibrate: bool = False,
    table: Path | None = None,
) -> StepSpeed:
    """What is expected of a step, with measured times if a command has been asked for them.

    Raises:
        SpeedError: as from :func:`~te_precision_callbacks.speed.estimate.estimate_step`.
        CalibrationError: the table cannot be used, or nothing can be measured here.
    """
    from te_precision_callbacks.speed import calibrating, calibration
    from te_precision_callbacks.speed.estimate import estimate_step
    from te_precision_callbacks.speed.expected import expected

    file = table if table is not None or not calibrate else calibration.DEFAULT_FILE
    measured = None
    if file is not None and (file.exists() or not calibrate):
        measured = calibration.Calibration.read(file)
    if calibrate and file is not None:
        times = expected(step.coverage, step.recipes, device, plan=plan)
        measured = calibrating.calibrate(times, plan=plan, table=measured, report=_progress)
        measured.write(file)
    if measured is not None:
        measured.check_device(device)
    return estimate_step(step, device, plan=plan, recipe=recipe or "", table=measured)


def _progress(what: str, number: int, of: int) -> None:
    typer.echo(f"{number}/{of} {what}", err=True)
