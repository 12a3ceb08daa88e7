"""The settings that a process with the reference backend passes to child processes in their environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.reference.errors import InstallError

ENVIRONMENT_VARIABLE = "TE_PRECISION_REFERENCE_INSTALL"
"""Holds the arguments of ``install`` as JSON, in the environment of child processes."""

_STARTUP_FOLDER = str(Path(__file__).parents[1] / "startup")


class Inherited(NamedTuple):
    """The settings that a child inherits: arguments of ``install``; ``always``: install the backend even with a GPU and
    a compiled Transformer Engine.
    """

    pretend_cuda: bool
    capability: tuple[int, int]
    always: bool


def environment(settings: Inherited) -> dict[str, str]:
    return {ENVIRONMENT_VARIABLE: json.dumps(settings._asdict()), "PYTHONPATH": startup_path()}


def startup_path() -> str:
    former_path = os.environ.get("PYTHONPATH")
    folders = former_path.split(os.pathsep) if former_path else []  # an empty entry would mean the current folder
    if _STARTUP_FOLDER not in folders:
        folders.insert(0, _STARTUP_FOLDER)
    return os.pathsep.join(folders)


def read_inherited() -> Inherited | None:
    """Read the settings from this process's environment; None without settings.

    Raises:
        InstallError: the variable is invalid.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    try:
        settings = json.loads(text)
        major, minor = settings["capability"]
        return Inherited(bool(settings["pretend_cuda"]), (major, minor), bool(settings.get("always", False)))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InstallError(
            f"{ENVIRONMENT_VARIABLE}={text!r} in the environment is invalid: only a process with the reference backend"
            " sets this variable, for its children. Unset it, and call reference.install()."
        ) from None


pending: Any = None
"""The entry of ``sys.meta_path`` that waits for an import to install the backend; ``startup/`` adds it."""


def install_if_pending() -> None:
    """Install the backend now if the environment requires it and no import has installed it yet."""
    finder = pending
    if finder is not None:
        forget_pending()
        finder.install()


def forget_pending() -> None:
    """Cancel a pending installation; the backend is then installed only on an explicit request."""
    global pending
    if pending is not None:
        sys.meta_path.remove(pending)
        pending = None
