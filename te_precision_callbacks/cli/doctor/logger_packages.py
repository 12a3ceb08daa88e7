"""The loggers for which the front doors convert metrics, and whether their packages can be imported."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.cli.doctor.asking import ask

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Logger -> the module that trainers import for it, as in ``lightning.py`` and ``accelerate/tracking.py``."""


@dataclass(frozen=True)
class Logger:
    """A logger.

    Attributes:
        name: its name.
        installed: whether its package is installed.
        version: the version that was imported; None if importing it failed.
        failure: the error of importing it; empty if there was none.
    """

    name: str
    installed: bool
    version: str | None
    failure: str


def loggers() -> tuple[Logger, ...]:
    """Import the packages in another process.

    Raises:
        NoAnswerError: the process crashed or hung.
    """
    return tuple(Logger(**answer) for answer in ask(loggers_here, os.environ))


def loggers_here() -> list[dict[str, Any]]:
    """Import the packages in this process: :class:`Logger` as JSON can hold them."""
    return [dataclasses.asdict(_imported(name, module)) for name, module in _MODULES.items()]


def _imported(name: str, module: str) -> Logger:
    if importlib.util.find_spec(name) is None:
        return Logger(name, installed=False, version=None, failure="")
    try:
        importlib.import_module(module)
        version = importlib.import_module(name).__version__
    except Exception as error:
        return Logger(name, installed=True, version=None, failure=f"{type(error).__name__}: {error}")
    return Logger(name, installed=True, version=version, failure="")
