"""Examination of packages, Transformer Engine, torch, variables and the log folder."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.base.environment import installed_version, read_environment
from te_precision_callbacks.base.torch_facts import Torch, torch_facts
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine, transformer_engine
from te_precision_callbacks.dumps.budget import why_full

_PACKAGES = (
    *("te-precision-callbacks", "transformer-engine", "nvdlfw-inspect", "torch", "triton", "numpy", "pyarrow"),
    *("pydantic", "safetensors", "lightning", "accelerate", "transformers"),
)


@dataclass(frozen=True)
class LogFolder:
    """A log folder, which need not exist yet; the reasons are empty if there are none."""

    path: str
    exists: bool
    why_not_writable: str
    why_full: str
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """A machine; ``torch`` is the error if torch cannot be imported. Packages have versions; None: not installed."""

    platform: str
    packages: dict[str, str | None]
    transformer_engine: TransformerEngine
    torch: Torch | str
    environment: dict[str, str]
    log_folder: LogFolder


def examine(log_dir: Path) -> Machine:
    torch: Torch | str
    try:
        torch = torch_facts()  # before the search for Transformer Engine, since torch warns about GPUs only once
    except Exception as error:  # a broken installation
        torch = f"{type(error).__name__}: {error}"
    return Machine(
        platform=platform.platform(),
        packages={"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}},
        transformer_engine=transformer_engine(),
        torch=torch,
        environment=read_environment(os.environ),
        log_folder=log_folder(log_dir),
    )


def log_folder(folder: Path) -> LogFolder:
    """Write a file in the folder, or where the folder would be made, and remove it."""
    path = folder.expanduser().absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    why_not_writable = ""
    try:
        if not place.is_dir():
            raise NotADirectoryError(f"{str(place)!r} is not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"written")
    except OSError as error:
        why_not_writable = str(error)
    return LogFolder(str(path), path.is_dir(), why_not_writable, why_full(path) or "", shutil.disk_usage(place).free)
