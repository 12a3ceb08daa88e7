"""The loggers for which the front doors convert metrics, and whether their packages can be imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from te_precision_callbacks.doctor.asking import ask

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Logger -> the module that trainers import for it, as in ``lightning.py`` and ``accelerate/tracking.py``."""

_QUESTION = f"""
import importlib, importlib.util
answer = {{}}
for name, module in {_MODULES}.items():
    answer[name] = None
    if importlib.util.find_spec(name) is not None:
        try:
            importlib.import_module(module)
            answer[name] = [importlib.import_module(name).__version__, ""]
        except Exception as error:
            answer[name] = [None, f"{{type(error).__name__}}: {{error}}"]
"""


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
    """Import the packages, in a process of its own.

    Raises:
        NoAnswerError: the process crashed or hung.
    """
    return tuple(
        Logger(name, False, None, "") if found is None else Logger(name, True, *found)
        for name, found in ask(_QUESTION, os.environ).items()
    )
