"""Writes a script that shows the fault of a recorded GEMM with torch, and runs it with Transformer Engine if installed.

write_repro(Path("repro.py"), record, replayed)     # repro.py and repro.safetensors
"""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path

from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.replay.verdict import Replayed

_HEADING = '''"""{verdict}

Recorded on {device} with {versions}.
Run it beside {data}: python {script}
It needs torch and safetensors, and no GPU. Where Transformer Engine can be imported, it runs the recorded GEMM with it.
The exit code is 1 if the fault is there: now, or where the GEMM cannot run, in the record.
"""
'''


def check_script(script: Path, record: Path) -> None:
    """Refuse the path of a script that is none, or that has a file already, before the work for it begins.

    Args:
        script: the path.
        record: the record or folder that is replayed; a record may lie beside its script.

    Raises:
        DumpError: it is refused.
    """
    if script.is_dir():
        raise DumpError(f"{script} is a folder. Name the script: {script / 'repro.py'}.")
    if script.suffix != ".py":
        raise DumpError(f"{script}: a script ends in .py. Name it {script.with_suffix('.py')}.")
    taken = [path for path in (script, script.with_suffix(".safetensors")) if path.exists() and path != record]
    if taken:
        raise DumpError(f"{taken[0]} exists already, and is not overwritten. Name another script.")


def write_repro(script: Path, record: Path, replayed: Replayed) -> Path:
    """Write a script, and a copy of the record beside it.

    Args:
        script: the script, as :func:`check_script` lets it pass.
        record: the file of the record.
        replayed: what was found in it.

    Returns:
        The script.

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
