"""Processes that are started by one with the reference backend install it as well.

Usage, in the process that has it::

    install_in_children(pretend_cuda=True, capability=(9, 0))

and in a process that it starts, by :mod:`te_precision_callbacks.reference.startup.sitecustomize`::

    install_when_needed()

A child may be a spawned worker that unpickles a function, or the same script started again with another rank; neither
runs a line of this package before it imports torch and Transformer Engine. What every Python process does run is the
module ``sitecustomize``, so its folder goes into PYTHONPATH, and the arguments into an environment variable. Both stay
in the environment of the parent for as long as it runs, for it may start a child at any time.

The child's start costs nothing but a look at the environment: the backend is installed when torch or Transformer Engine
is first imported, and never in a child that does neither.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ENVIRONMENT_VARIABLE = "TE_PRECISION_REFERENCE_INSTALL"
"""Holds the arguments of ``install`` as JSON, in the environment of child processes."""

_STARTUP_FOLDER = str(Path(__file__).with_name("startup"))


def install_in_children(*, pretend_cuda: bool, capability: tuple[int, int]) -> None:
    """Have the processes that are started from now on install the backend with these arguments."""
    os.environ.update(environment(pretend_cuda=pretend_cuda, capability=capability))


def environment(*, pretend_cuda: bool, capability: tuple[int, int]) -> dict[str, str]:
    """The environment variables with which a Python process installs the backend by itself."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if _STARTUP_FOLDER not in folders:
        folders.insert(0, _STARTUP_FOLDER)
    return {
        ENVIRONMENT_VARIABLE: json.dumps({"pretend_cuda": pretend_cuda, "capability": capability}),
        "PYTHONPATH": os.pathsep.join(folders),
    }


def install_when_needed() -> None:
    """Install the backend, as the environment says, when torch or Transformer Engine is imported."""
    if ENVIRONMENT_VARIABLE in os.environ:
        sys.meta_path.insert(0, _Trigger())


def install_if_pending() -> None:
    """Install the backend now, if the environment says so and it has not been needed yet."""
    for finder in sys.meta_path:
        if isinstance(finder, _Trigger):
            sys.meta_path.remove(finder)
            _install_from_environment()
            return


class _Trigger(MetaPathFinder):
    """Gives torch and Transformer Engine loaders that install the backend.

    Looking for them is not enough: libraries do that to know whether they are there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("torch", "transformer_engine"):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _InstallingLoader(spec.loader)
                return spec
        return None


class _InstallingLoader(Loader):
    """Loads torch and installs the backend after that, or installs it and loads Transformer Engine."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == "transformer_engine":
            install_if_pending()  # while it is not yet in sys.modules
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        install_if_pending()


def _install_from_environment() -> None:
    from te_precision_callbacks.reference.install import install

    arguments = json.loads(os.environ[ENVIRONMENT_VARIABLE])
    install(pretend_cuda=arguments["pretend_cuda"], capability=tuple(arguments["capability"]))
