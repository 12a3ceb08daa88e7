"""``te-precision speed``: expected times for a device, which need not be on this machine, and measured times.

Usage::

    te-precision speed RUN --device h200
    te-precision speed RUN --trace trace.json.gz
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
    from te_precision_callbacks.speed.devices import Device
    from te_precision_callbacks.speed.estimate import Step, StepSpeed


DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="The device for expected times, such as h100, h200_nvl, b300, or the path of a YAML file that describes"
        " one. Default: the GPU of the run.",
    ),
]

Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure the GEMMs of the run on this GPU with Transformer Engine, and save the times in the file of"
        " --table. Times already in the file are kept.",
    ),
]

TableFile = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="A file of measured times, which replace those of the cost model. Written by --calibrate, by default to"
        " speed_calibration.json.",
    ),
]


def speed_command(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A recorded run: its log folder.")],
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe to assume for layers in high precision.",
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
            help="A trace recorded with profile=, to compare with the expected times. Default: the last trace of the"
            " run.",
        ),
    ] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Show where low precision saves time, where it does not, and what to change."""

    def expect(step: Step, chosen: Device) -> StepSpeed:
        return speed_of_step(step, chosen, recipe=recipe, calibrate=calibrate, table=table)

    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.speed.printing import show_run
    from te_precision_callbacks.speed.recorded import run_speed

    recorded, message = chosen_run(path, run)
    if message:
        terminal.show_text(message, err=as_json)
    known = run_speed(recorded, expect, device=device, trace=trace)
    if known.why_not is not None and known.measured is None:
        raise type(known.why_not)(" ".join([str(known.why_not), *known.notes[:-1]]))
    if as_json:
        terminal.show_json(known.as_json())
    else:
        show_run(known)
    recorded.require_undamaged()


def speed_of_step(
    step: Step,
    device: Device,
    *,
    recipe: str | None,
    calibrate: bool,
    table: Path | None,
) -> StepSpeed:
    """Return the expected speed of a step, with measured times according to a command's options."""
    from te_precision_callbacks.speed import calibration
    from te_precision_callbacks.speed.estimate import estimate_step
    from te_precision_callbacks.speed.expected import with_recipes

    file = table
    if file is None and calibrate:
        file = calibration.DEFAULT_FILE
    measured = None
    if file is not None and (file.exists() or not calibrate):
        measured = calibration.Calibration.read(file)
    if calibrate and file is not None:
        measured = calibration.calibrate(
            with_recipes(step.coverage, step.recipes),
            table=measured,
            report=lambda *progress: typer.echo("{1}/{2} {0}".format(*progress), err=True),
        )
        measured.write(file)
    if measured is not None:
        measured.check_device(device)
    return estimate_step(step, device, recipe=recipe or "", table=measured)
