"""``te-precision report``: a recorded run as one page, or as numbers.

Usage::

    te-precision report logs
    te-precision report logs -o report.html
    te-precision report logs --json
    te-precision report logs --device h200

The exit code is 0; 2 for what is no run, for a run without numbers, and for a layer, statistic or step that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json, Run
from te_precision_callbacks.speed.command import DeviceName


class Format(str, Enum):
    """What a report is written as."""

    HTML = "html"
    JSON = "json"


def report_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The log folder of a run, or a run's own folder.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file, which ends in .html or .json; report.html if it is not given.",
        ),
    ] = None,
    *,
    run: Run = None,
    kind: Annotated[
        Format | None,
        typer.Option("--format", help="A page, or numbers; if it is not given, by the name of the file."),
    ] = None,
    layer: Annotated[str | None, typer.Option(metavar="NAME", help="For json: the layer.")] = None,
    statistic: Annotated[str | None, typer.Option(metavar="NAME", help="For json: the statistic.")] = None,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="For json: the tensor.")] = None,
    device: DeviceName = None,
    as_json: Json = False,
) -> None:
    """Make one page of a recorded run that opens offline: coverage, worst layers, heat maps, layers, the depth profile.

    A page has at most 10 MB. It says which of its numbers are exact.
    """
    kind = Format.JSON if as_json else kind or _format_of(output)
    _refuse_what_is_not_for(kind, layer=layer, statistic=statistic, tensor=tensor, device=device)
    if as_json and output is not None:
        raise typer.BadParameter("it prints; write numbers into a file with --format json", param_hint="--json")
    from te_precision_callbacks.views.report.page import MOST_BYTES, PAGES, output_path, write_bytes, write_report

    if output is not None:
        output_path(output, PAGES if kind is Format.HTML else (kind.value,))
    from te_precision_callbacks.runs.choosing import chosen_run
    from te_precision_callbacks.speed.devices import device_named

    chosen = None if device is None else device_named(device)
    recorded, told = chosen_run(path, run)
    if told:
        terminal.show_text(told, err=kind is Format.JSON)
    first = recorded.notes
    _show_notes(first, kind)
    match kind:
        case Format.HTML:
            written = write_report(recorded, output or Path("report.html"), device=chosen)
        case Format.JSON:
            from te_precision_callbacks.views.report.numbers import numbers

            found = numbers(recorded, layer=layer, statistic=statistic, tensor=tensor, device=chosen)
            if output is None:
                terminal.show_json(found)
                return
            written = write_bytes(output, terminal.as_json(found).encode())
    _show_notes(recorded.notes[len(first) :], kind)  # of what turned out to be damaged when it was read
    size = written.stat().st_size
    terminal.show_text(f"{written}: {size / 1e6:.1f} MB")
    if kind is Format.HTML and size > MOST_BYTES:
        terminal.show_text(f"It is larger than {MOST_BYTES / 1e6:.0f} MB: the facts of the run alone need that much.")


def _show_notes(notes: Sequence[str], kind: Format) -> None:
    for note in notes if kind is not Format.JSON else ():  # whose numbers have them
        terminal.show_text(f"note: {note}", hanging=6)


def _format_of(output: Path | None) -> Format:
    """What a file is by its name."""
    ending = "" if output is None else output.suffix[1:].lower()
    if ending in ("", "htm"):
        return Format.HTML
    if ending not in {each.value for each in Format}:
        known = ", ".join(f".{each.value}" for each in Format)
        raise typer.BadParameter(f"no report ends in .{ending}: {known}", param_hint="--output")
    return Format(ending)


def _refuse_what_is_not_for(kind: Format, **given: Any) -> None:
    used = {Format.HTML: ("device",), Format.JSON: ("layer", "statistic", "tensor", "device")}[kind]
    for name, value in given.items():
        if value is not None and name not in used:
            raise typer.BadParameter(f"--format {kind.value} takes no --{name}", param_hint=f"--{name}")
