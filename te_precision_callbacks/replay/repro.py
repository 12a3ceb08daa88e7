"""Writes a script that replays a recorded GEMM, and runs it again with Transformer Engine if installed."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path

from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.replay.gemm import Replayed

_HEADING = '''"""{verdict}

Recorded on {device} with {versions}.
Keep it in one folder with {data}, and run: python {script}
It needs te-precision-callbacks, and no GPU. With Transformer Engine installed, it runs the recorded GEMM again.
The exit code is 1 if the fault is reproduced, or, if the GEMM cannot run, if it is in the record.
"""
'''


def check_script(script: Path, record: Path) -> None:
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


def write_repro(script: Path, record: Path, replayed: Replayed) -> Path:
    """Write a script, whose path :func:`check_script` has checked, and a copy of the record in the same folder.

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
