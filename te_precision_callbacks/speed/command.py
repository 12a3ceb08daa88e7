"""``te-precision speed``: expected times for a device, which need not be on this machine, and measured ones.

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

    from te_precision_callbacks.speed.devices import Device
    from te_precision_callbacks.speed.estimate import Step, StepSpeed


DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="The device for expected times, such as h100, h200_nvl, b300, or the path of a YAML file with your own"
        " device. The default is the GPU of the run.",
    ),
]

Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure the shapes on this GPU, as Transformer Engine runs them, and save the times in the file of"
        " --table. Times in the file are not measured again.",
    ),
]

TableFile = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="Measured times, which take precedence over the model's. Written by --calibrate; the default is then"
        " speed_calibration.json.",
    ),
]


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
            help="The recipe of --shapes; with a run, a recipe for its layers in high precision.",
        ),
    ] = None,
    device: DeviceName = None,
    calibrate: Calibrate = False,
    table: TableFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="A trace recorded with profile=, shown beside the expected times. The default is the last one of the"
            " run. Without a run, only the trace is shown.",
        ),
    ] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Show where low precision saves time, where it does not, and what to change."""
    if path is not None and shapes is not None:
        raise typer.BadParameter("give either a run or --shapes, not both", param_hint="RUN")
    if shapes is not None and trace is not None:
        raise typer.BadParameter("give either --trace or --shapes, not both", param_hint="--trace")

    def expect(step: Step, chosen: Device) -> StepSpeed:
        return speed_of_step(step, chosen, recipe=recipe, calibrate=calibrate, table=table)

    if shapes is not None:
        _show_shapes(shapes, recipe, device, expect, as_json=as_json)
        return
    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.speed.printing import show_run
    from te_precision_callbacks.speed.recorded import RunSpeed, run_speed
    from te_precision_callbacks.speed.trace import measure, read_trace

    if path is not None:
        recorded, message = chosen_run(path, run)
        if message:
            terminal.show_text(message, err=as_json)
        known = run_speed(recorded, expect, device=device, trace=trace)
        if known.why_not is not None and known.measured is None:
            raise type(known.why_not)(" ".join([str(known.why_not), *known.notes[:-1]]))
    elif trace is not None:
        expecting = {"--recipe": recipe, "--device": device, "--table": table, "--calibrate": calibrate or None}
        for name, value in expecting.items():
            if value is not None:
                raise typer.BadParameter("needs expected times; also give the log folder of the run", param_hint=name)
        known = RunSpeed(measured=measure(read_trace(trace)))
    else:
        raise typer.BadParameter("give the log folder of a run, --shapes, or --trace", param_hint="RUN")
    if as_json:
        terminal.show_json(known.as_json())
    else:
        show_run(known)


def _show_shapes(
    shapes: str,
    recipe: str | None,
    device: str | None,
    expect: Callable[[Step, Device], StepSpeed],
    *,
    as_json: bool,
) -> None:
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
    parsed = list(dict.fromkeys(Shape.parse(text) for text in shapes.split(",")))
    notes = tuple(notes_of_shapes(parsed, recipe, chosen))
    speed = expect(Step(Coverage(products_of_shapes(parsed, recipe)), recipe, notes=notes), chosen)
    if as_json:
        terminal.show_json(speed.as_json())
    else:
        show_times(speed)
        terminal.show_notes(speed.notes)


def speed_of_step(
    step: Step,
    device: Device,
    *,
    recipe: str | None,
    calibrate: bool = False,
    table: Path | None = None,
) -> StepSpeed:
    """Return the expected speed of a step, with measured times according to a command's options."""
    from te_precision_callbacks.speed import calibration
    from te_precision_callbacks.speed.estimate import estimate_step
    from te_precision_callbacks.speed.expected import with_recipes

    file = table if table is not None or not calibrate else calibration.DEFAULT_FILE
    measured = None
    if file is not None and (file.exists() or not calibrate):
        measured = calibration.Calibration.read(file)
    if calibrate and file is not None:
        products = with_recipes(step.coverage, step.recipes)
        measured = calibration.calibrate(
            products, table=measured, report=lambda *progress: typer.echo("{1}/{2} {0}".format(*progress), err=True)
        )
        measured.write(file)
    if measured is not None:
        measured.check_device(device)
    return estimate_step(step, device, recipe=recipe or "", table=measured)
