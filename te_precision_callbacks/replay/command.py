"""``te-precision replay``: attributes the error of a recorded GEMM to the format, the quantizer or the kernel.

The exit code is 0 without a fault; 1 with a fault; 2 for wrong use; 3 if nothing could be checked, or if a record is
unreadable and the others have no fault.
"""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import first_of, many
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.dumps.errors import DumpError

if TYPE_CHECKING:
    import torch

    from te_precision_callbacks.replay.gemm import Replayed, ReplayedFolder

FOUND = 1
NOT_CHECKED = 3
"""Exit codes."""

_INDENT = 2
_MOST_ROWS = 5
_MOST_FILES = 20


_HEADING = '''"""{verdict}

Recorded on {device} with {versions}.
Keep it in one folder with {data}, and run: python {script}
It needs te-precision-callbacks, and no GPU. With Transformer Engine installed, it runs the recorded GEMM again.
The exit code is 1 if the fault is reproduced, or, if the GEMM cannot run, if it is in the record.
"""
'''


def replay_command(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE|FOLDER", help="A record of a GEMM, or a folder with records."),
    ],
    *,
    repro: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Write a script for a bug report, with a copy of the record. The script replays the record, and"
            " reruns the GEMM if Transformer Engine is installed. For a folder: the first record with a fault."
            " Existing files are not overwritten.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attribute the error of recorded GEMMs to the format, the quantizer or the kernel."""
    from te_precision_callbacks.replay.gemm import ReplayedFolder, replay_file, replay_folder

    if repro is not None:
        _check_script(repro, path)
    replayed = replay_folder(path) if path.is_dir() else ReplayedFolder({path: replay_file(path)}, {})
    first = replayed.first_bad
    if as_json:
        terminal.show_json(_as_json(replayed))
    else:
        _show(replayed)
    if repro is not None:
        terminal.show_text(_written(replayed, repro), err=as_json)
    if first is not None:
        raise typer.Exit(FOUND)
    if replayed.unread or not any(record.gain is not None for record in replayed.records.values()):
        raise typer.Exit(NOT_CHECKED)


def _check_script(script: Path, record: Path) -> None:
    """Check the path of a script before the replay; a record may be in the folder of its script.

    Raises:
        DumpError: the path is not a script, or exists.
    """
    if script.is_dir():
        raise DumpError(f"{script} is a folder. Name the script: {script / 'repro.py'}.")
    if script.suffix != ".py":
        raise DumpError(f"{script}: a script ends in .py. Name it {script.with_suffix('.py')}.")
    taken = [path for path in (script, script.with_suffix(".safetensors")) if path.exists() and path != record]
    if taken:
        raise DumpError(f"{taken[0]} exists already, and is not overwritten. Name another script.")


def _write_script(script: Path, record: Path, replayed: Replayed) -> Path:
    """Write a script, after :func:`_check_script`, and a copy of the record in the same folder.

    Raises:
        DumpError: a file cannot be written.
    """
    data = script.with_suffix(".safetensors")
    body = importlib.resources.files("te_precision_callbacks.replay").joinpath("shown.py").read_text()
    heading = _HEADING.format(
        verdict=replayed.verdict.replace("\\", "/").replace('"', "'"),
        device=replayed.gemm.device,
        versions=", ".join(f"{name} {version}" for name, version in replayed.header.versions.items()),
        data=data.name,
        script=script.name,
    )
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(heading + body[body.index('"""', 3) + 4 :])
        if not data.exists() or not data.samefile(record):
            shutil.copyfile(record, data)
    except OSError as error:
        raise DumpError(f"{script}: cannot be written: {error.strerror or error}.") from error
    return script


def _written(replayed: ReplayedFolder, repro: Path) -> str:
    shown = replayed.first_bad or next(iter(replayed.records.items()), None)
    if shown is None:
        return "No script was written, because no record could be read."
    made = _write_script(repro, *shown)
    healthy = "This record has no fault; the script can run its GEMM on another device."
    wrote = f"Wrote {made} and {made.with_suffix('.safetensors')}."
    if shown[1].faults:
        return wrote
    return f"{wrote} {healthy}"


def _show(replayed: ReplayedFolder) -> None:
    bad = {path: record for path, record in replayed.records.items() if record.faults}
    if len(replayed.records) + len(replayed.unread) != 1:
        text = f"{many(len(replayed.records), 'recorded GEMM')}, {len(bad)} with a fault"
        if replayed.unread:
            text += f"; {many(len(replayed.unread), 'file')} could not be read"
        terminal.show_text(f"{text}.")
    for path, why in list(replayed.unread.items())[:_MOST_FILES]:
        terminal.show_text(f"Not read: {path}: {why}")
    chosen = replayed.first_bad or next(iter(replayed.records.items()), None)
    if chosen is None:
        return
    path, first = chosen
    if bad and len(replayed.records) > 1:
        terminal.show_text(f"First in execution order: {path}")
    terminal.show_text(first.verdict)
    for fault in first.faults[1:]:
        terminal.show_text(f"{fault.cause}: {fault.text}", _INDENT)
    if first.faults:
        for text in first.not_checked:
            terminal.show_text(f"Not checked: {text}", _INDENT)
    lanes = terminal.table("lane", "differs from the next by", "of the norm")
    for lane in first.lanes:
        error = ""
        if lane.error is not None:
            error = f"{100 * lane.error:.3g} %"
        elif lane.difference:
            error = "unknown"
        lanes.add_row(lane.name, lane.difference, error)
    terminal.show(lanes)
    others = [record.verdict for record_path, record in bad.items() if record_path != path]
    for text in first_of(others, _MOST_FILES, "and {} more; --json lists all."):
        terminal.show_text(text)


def _largest(ratios: torch.Tensor) -> list[tuple[int, float]]:
    order = ratios.argsort(descending=True, stable=True)[:_MOST_ROWS].tolist()
    return [(place, float(ratios[place])) for place in order]


def _as_json(replayed: ReplayedFolder) -> dict[str, Any]:
    first_bad, _ = replayed.first_bad or (None, None)
    return {
        "first_bad": first_bad and str(first_bad),
        "records": [_record_as_json(path, record) for path, record in replayed.records.items()],
        "unread": {str(path): why for path, why in replayed.unread.items()},
    }


def _record_as_json(path: Path, record: Replayed) -> dict[str, Any]:
    return {
        "path": str(path),
        "layer": record.header.layer,
        "gemm": record.gemm.gemm,
        "expert": record.gemm.expert,
        "iteration": record.header.iteration,
        "micro_batch": record.header.micro_batch,
        "rank": record.header.rank,
        "order": record.gemm.order,
        "recipe": record.header.recipe,
        "device": record.gemm.device,
        "verdict": record.verdict,
        "faults": record.faults,
        "not_checked": record.not_checked,
        "gain": record.gain,
        "lanes": record.lanes,
        "worst_rows": _largest(record.rows),
        "worst_columns": _largest(record.columns),
    }
