"""``te-precision doctor``: versions, Transformer Engine, GPUs, variables and the log folder on one screen.

Usage::

    te-precision doctor
    te-precision doctor --log-dir logs --json

The exit code is 0 without findings, 1 with findings, and 2 for wrong use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.base.torch_facts import Torch
    from te_precision_callbacks.cli.doctor.advice import DoctorFinding
    from te_precision_callbacks.cli.doctor.examination import Examination
    from te_precision_callbacks.cli.doctor.log_folder import LogFolder
    from te_precision_callbacks.cli.doctor.packages import Package
    from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine


def doctor_command(
    log_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for logs that is examined. By default the current one.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Show what a bug report needs to know of this machine, and what is wrong with it.

    Returns exit code 1 if something is. Of the environment, only variables that change numbers are shown.
    """
    from te_precision_callbacks.cli.doctor.advice import findings
    from te_precision_callbacks.cli.doctor.examination import examine

    examination = examine(log_dir)
    found = findings(examination)
    if as_json:
        terminal.show_json({**vars(examination), "findings": found})
    else:
        _show(examination, found)
    raise typer.Exit(1 if found else 0)


# ---------------------------------------------------------------------- the screen

_INDENT = 3
"""The indent of the lines of a finding below its number."""


def _show(examination: Examination, found: tuple[DoctorFinding, ...]) -> None:
    from te_precision_callbacks.cli.doctor.examination import Failed

    terminal.show_text(f"te-precision doctor on {examination.platform}")
    parts = (
        ("Packages", examination.packages, _show_packages),
        ("Transformer Engine", examination.transformer_engine, _show_engine),
        ("GPU and torch", examination.torch, _show_torch),
        ("Environment variables that are set", examination.environment, _show_environment),
        ("Log folder", examination.log_folder, _show_folder),
    )
    part: Any
    show_part: Any
    for title, part, show_part in parts:
        terminal.show(f"\n[bold]{title}[/bold]")
        if isinstance(part, Failed):
            _line("could not be examined", part.failure)
        else:
            show_part(part)
    terminal.show("\n[bold]Findings[/bold]")
    for number, finding in enumerate(found, 1):
        terminal.show_text(f"{number}. ({finding.severity}) {finding.what}", hanging=_INDENT)
        terminal.show_text(f"-> {finding.remedy}", _INDENT, hanging=_INDENT)
    if not found:
        terminal.show("none")


def _line(name: str, value: object) -> None:
    terminal.show_text(f"{name:<25} {value}", 2, hanging=2)


def _show_packages(packages: tuple[Package, ...]) -> None:
    table = terminal.table("package", "installed", "works with", "", "what to do")
    for package in packages:
        cells = (package.name, package.version or "", package.wanted, package.state, package.remedy)
        table.add_row(*map(terminal.cell, cells))
    terminal.show(table)


def _show_engine(engine: TransformerEngine) -> None:
    from te_precision_callbacks.base.vocabulary import RECIPES

    _line("runs on", engine.description)
    _line("installed", ", ".join(f"{name} {version}" for name, version in engine.installed.items()) or "nothing")
    if engine.why_not_compiled:
        _line("compiled build", engine.why_not_compiled)
    if engine.why_no_reference:
        _line("reference backend", engine.why_no_reference)
    if not engine.recipes:
        return
    table = terminal.table("recipe", *(recipes.place for recipes in engine.recipes))
    for recipe in RECIPES:
        answers = ("not known" if place.failure else place.refusals.get(recipe, "runs") for place in engine.recipes)
        table.add_row(recipe, *map(terminal.cell, answers))
    table.add_row("te.autocast() takes", *(terminal.cell(recipes.default or "none") for recipes in engine.recipes))
    terminal.show(table)


def _show_torch(torch: Torch) -> None:
    for number, gpu in enumerate(torch.gpus):
        _line(f"GPU {number}", f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 2**30:.0f} GiB")
    if not torch.gpus:
        _line("GPU", "none")
    if torch.visible_devices is not None:
        _line("CUDA_VISIBLE_DEVICES", repr(torch.visible_devices))
    _line("driver, CUDA, cuDNN", ", ".join(version or "none" for version in (torch.driver, torch.cuda, torch.cudnn)))
    _line("settings of a new process", ", ".join(f"{name}={value}" for name, value in torch.settings.items()))


def _show_environment(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        _line(name, repr(value))
    if not environment:
        terminal.show("  none of those that change numbers")


def _show_folder(folder: LogFolder) -> None:
    _line("folder", folder.path + ("" if folder.exists else ", which does not exist yet"))
    _line("can be written to", "no: " + folder.why_not_writable if folder.why_not_writable else "yes")
    _line("free space", f"{folder.free_bytes / 2**30:,.1f} GiB")
    if not folder.why_not_writable:
        _line("file locks", folder.why_no_locks or "work")
