"""Installs the reference backend in child processes of a process that has it.

A spawned worker, or the same script started with another rank, runs no line of this package before it imports torch and
Transformer Engine. But every Python process runs the module ``sitecustomize``, so its folder goes into PYTHONPATH, and
the arguments into an environment variable, for as long as the parent runs.

If a job scheduler has copied the environment to another machine, a child with a GPU and a compiled Transformer Engine
uses that, and logs so, unless the parent asked for the backend in all children. The backend is installed when torch or
Transformer Engine is first imported, and never in a child that imports neither.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from te_precision_callbacks.reference import compiled_extension
from te_precision_callbacks.reference.inherited import (
    ENVIRONMENT_VARIABLE,
    Inherited,
    PendingInstallation,
    inherited,
    install_if_pending,
    watch_setting,
)

logger = logging.getLogger(__name__)


def arguments_here(settings: Inherited, *, has_gpu: bool) -> dict[str, Any] | None:
    """The arguments of ``install`` in a child; None if the child uses the compiled Transformer Engine."""
    if has_gpu and not settings.always and compiled_extension.why_unavailable() is None:
        logger.warning(
            "This process uses the compiled Transformer Engine, but its parent the reference backend. For the"
            " reference backend in both, call reference.install(always_in_children=True) in the parent, or use"
            " te-precision run --backend reference."
        )
        return None
    if has_gpu:
        logger.warning(
            "Transformer Engine runs on the slow reference backend despite the GPU, as in the parent process."
        )
    return {
        "pretend_cuda": settings.pretend_cuda and not has_gpu,
        "capability": settings.capability,
        "always_in_children": settings.always,
    }


def install_when_needed() -> None:
    """Install the backend and watch the script, if the environment asks for it, when torch or Transformer Engine is
    imported.

    Called at the start of each Python process, maybe twice: by ``startup/sitecustomize.py``, and by the file
    ``te_precision_watch.pth`` of an installed package.
    """
    is_asked = os.environ.get(ENVIRONMENT_VARIABLE) or watch_setting()
    if is_asked and not any(isinstance(finder, _Trigger) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Trigger())


class _Trigger(MetaPathFinder, PendingInstallation):
    """Gives torch and Transformer Engine loaders that install the backend.

    A lookup does not install it: libraries check whether the packages exist.
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

    def install(self) -> None:
        settings = inherited()
        if settings is not None:
            import torch

            from te_precision_callbacks.reference.install import install

            arguments = arguments_here(settings, has_gpu=torch.cuda.is_available())
            if arguments is not None:
                install(**arguments)
        if watch_setting():
            importlib.import_module("te_precision_callbacks.watch").begin_from_environment()


class _InstallingLoader(Loader):
    """Loads torch and installs the backend after that, or installs it and loads Transformer Engine."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == "transformer_engine":
            install_if_pending()  # while the module is not yet in sys.modules
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        install_if_pending()
