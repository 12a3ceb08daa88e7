"""The settings that a process with the reference backend passes to child processes in their environment."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.reference.errors import InstallError

ENVIRONMENT_VARIABLE = "TE_PRECISION_REFERENCE_INSTALL"
"""Holds the arguments of ``install`` as JSON, in the environment of child processes."""

WATCH_VARIABLE = "TE_PRECISION_WATCH"
"""``1``, or the options of a session as JSON: :mod:`te_precision_callbacks.watch` then watches the script."""

_STARTUP_FOLDER = str(Path(__file__).with_name("startup"))


class Inherited(NamedTuple):
    """The settings that a child inherits: two arguments of ``install``, and whether to install the backend even if
    there are a GPU and a compiled Transformer Engine.
    """

    pretend_cuda: bool
    capability: tuple[int, int]
    always: bool


def install_in_children(*, pretend_cuda: bool, capability: tuple[int, int], always: bool) -> None:
    os.environ.update(environment(pretend_cuda=pretend_cuda, capability=capability, always=always))


def environment(*, pretend_cuda: bool, capability: tuple[int, int], always: bool) -> dict[str, str]:
    return {
        ENVIRONMENT_VARIABLE: json.dumps(Inherited(pretend_cuda, capability, always)._asdict()),
        "PYTHONPATH": startup_path(),
    }


def startup_path() -> str:
    before = os.environ.get("PYTHONPATH")
    folders = before.split(os.pathsep) if before else []  # an empty entry is the current folder
    if _STARTUP_FOLDER not in folders:
        folders.insert(0, _STARTUP_FOLDER)
    return os.pathsep.join(folders)


def watch_setting() -> str:
    text = os.environ.get(WATCH_VARIABLE, "")
    return "" if text == "0" else text


def inherited() -> Inherited | None:
    """The settings in this process's environment; None if there are none.

    Raises:
        InstallError: the variable does not hold such settings.
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
            f"{ENVIRONMENT_VARIABLE}={text!r} in the environmentis invalid: only a process with the reference backend"
            " sets this variable, for its children. Unset it, and call reference.install()."
        ) from None


class PendingInstallation(ABC):
    """An entry of ``sys.meta_path`` that waits for an import to install the backend."""

    @abstractmethod
    def install(self) -> None:
        """Install the backend."""


def install_if_pending() -> None:
    """Install the backend now if the environment requires it and no import has installed it yet."""
    for finder in sys.meta_path:
        if isinstance(finder, PendingInstallation):
            sys.meta_path.remove(finder)
            finder.install()
            return


def forget_pending() -> None:
    """Never install the backend in this process, unless it is already installed or explicitly requested."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, PendingInstallation)]
