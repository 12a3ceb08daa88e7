"""``te-precision doctor``: versions, Transformer Engine, GPUs, variables and the log folder on one screen.

The exit code is 0 without findings, 1 with findings, and 2 for wrong use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.base.vocabulary import RECIPES

if TYPE_CHECKING:
    from te_precision_callbacks.cli.doctor.machine import DoctorFinding, Machine, TransformerEngine
    from te_precision_callbacks.te.environment import Torch


def doctor_command(
    log_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The log folder to check. Default: the current folder.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Print system information for bug reports, and known problems.

    The exit code is 1 if there are problems. Only environment variables that change results are shown.
    """
    from te_precision_callbacks.cli.doctor.machine import examine, findings

    machine = examine(log_dir)
    advice = findings(machine)
    if as_json:
        terminal.show_json({**vars(machine), "findings": advice})
    else:
        _show(machine, advice)
    raise typer.Exit(1 if advice else 0)


_INDENT = 3
"""The indent of the lines of a finding below its number."""


def _show(machine: Machine, advice: tuple[DoctorFinding, ...]) -> None:
    terminal.show_text(f"te-precision doctor on {machine.platform}")
    _title("Packages")
    for name, version in machine.packages.items():
        _line(name, version or "not installed")
    _title("Transformer Engine")
    _show_engine(machine.transformer_engine, without_gpu=not getattr(machine.torch, "gpus", True))
    _title("GPU and torch")
    if isinstance(machine.torch, str):
        _line("torch", machine.torch)
    else:
        _show_torch(machine.torch)
    _title("Environment variables that are set")
    for name, value in machine.environment.items():
        _line(name, repr(value))
    if not machine.environment:
        terminal.show("  none that affect numerics")
    _title("Log folder")
    folder = machine.log_folder
    _line("folder", folder.path + ("" if folder.exists else ", which does not exist yet"))
    _line("can be written to", f"no: {folder.why_not_writable}" if folder.why_not_writable else "yes")
    _line("free space", f"{folder.free_bytes / 2**30:,.1f} GiB")
    _title("Known problems" if advice else "No known problems.")
    for number, finding in enumerate(advice, 1):
        terminal.show_text(f"{number}. ({finding.severity}) {finding.what}", hanging=_INDENT)
        terminal.show_text(f"-> {finding.remedy}", _INDENT, hanging=_INDENT)


def _title(text: str) -> None:
    terminal.show(f"\n[bold]{text}[/bold]")


def _line(name: str, value: object) -> None:
    terminal.show_text(f"{name:<25} {value}", 2, hanging=2)


def _show_engine(engine: TransformerEngine, *, without_gpu: bool) -> None:
    _line("runs on", engine.description)
    _line("installed", ", ".join(f"{name} {version}" for name, version in engine.installed.items()) or "nothing")
    if engine.why_not_compiled:
        first = f"none ({engine.why_not_compiled.partition('. ')[0]}), as expected without a GPU"
        _line("compiled build", first if without_gpu and "meta package" in first else engine.why_not_compiled)
    if engine.why_no_reference:
        _line("reference backend", engine.why_no_reference)
    if engine.recipes is None:
        return
    table = terminal.table("recipe", engine.recipes.place)
    for recipe in RECIPES:
        answer = "not known" if engine.recipes.failure else engine.recipes.refusals.get(recipe, "runs")
        table.add_row(recipe, terminal.cell(answer))
    terminal.show(table)


def _show_torch(torch: Torch) -> None:
    for number, gpu in enumerate(torch.gpus):
        _line(f"GPU {number}", f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 2**30:.0f} GiB")
    if not torch.gpus:
        _line("GPU", "none")
    if torch.visible_devices is not None:
        _line("CUDA_VISIBLE_DEVICES", repr(torch.visible_devices))
    versions = ", ".join(version or "none" for version in (torch.driver, torch.cuda, torch.cudnn))
    _line("driver, CUDA, cuDNN", "none" if versions == "none, none, none" else versions)
    _line("torch defaults", ", ".join(f"{name}={value}" for name, value in torch.settings.items()))
