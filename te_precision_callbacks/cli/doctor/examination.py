"""The examination of a machine: its parts, of which each may fail by itself.

examination = examine(Path("logs"))
examination.packages        # the versions, or Failed
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from te_precision_callbacks.base.environment import read_environment
from te_precision_callbacks.base.torch_facts import Torch, torch_facts
from te_precision_callbacks.cli.doctor.log_folder import LogFolder, log_folder
from te_precision_callbacks.cli.doctor.packages import Package, packages
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine, transformer_engine

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Failed:
    """A part that could not be examined.

    Attributes:
        failure: the exception, in words.
    """

    failure: str


@dataclass(frozen=True)
class Examination:
    """What was found, part by part."""

    platform: str
    packages: tuple[Package, ...] | Failed
    transformer_engine: TransformerEngine | Failed
    torch: Torch | Failed
    environment: dict[str, str]
    log_folder: LogFolder | Failed


def examine(log_dir: Path) -> Examination:
    """Examine this machine.

    Args:
        log_dir: the folder for logs.
    """
    return Examination(
        platform=platform.platform(),
        packages=_examined(packages),
        torch=_examined(torch_facts),  # before the search for Transformer Engine asks for GPUs: torch warns once
        transformer_engine=_examined(transformer_engine),
        environment=read_environment(os.environ),
        log_folder=_examined(lambda: log_folder(log_dir)),
    )


def _examined(part: Callable[[], FoundT]) -> FoundT | Failed:
    try:
        return part()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")
