"""Installs the reference backend, and watches the script, in processes with its environment variables.

A spawned worker, or the same script started for another rank, does not run this package's code before it imports torch
and Transformer Engine. Every Python process imports ``sitecustomize``, however, so the parent adds this folder to
PYTHONPATH, and sets a variable for the backend, the watch, or both. They begin at the first import of torch or
Transformer Engine.

A job scheduler may copy the environment to another machine. A child with a GPU and a compiled Transformer Engine uses
these, with a warning, unless the parent requested the backend in all children.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from te_precision_callbacks.reference import compiled_extension, inherited
from te_precision_callbacks.reference.inherited import (
    ENVIRONMENT_VARIABLE,
    Inherited,
    install_if_pending,
    read_inherited,
    startup_path,
)

logger = logging.getLogger(__name__)

WATCH_VARIABLE = "TE_PRECISION_WATCH"
"""The options of a session as JSON: :mod:`te_precision_callbacks.watch` then watches the script."""


def watch_environment(options: Mapping[str, Any]) -> dict[str, str]:
    return {WATCH_VARIABLE: json.dumps(options), "PYTHONPATH": startup_path()}


def child_arguments(settings: Inherited, *, has_gpu: bool) -> dict[str, Any] | None:
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
    """Arrange that the import of torch or Transformer Engine installs the backend, and watches the script, if the
    environment requires it.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE) or os.environ.get(WATCH_VARIABLE):
        inherited.pending = _Trigger()
        sys.meta_path.insert(0, inherited.pending)


class _Trigger(MetaPathFinder):
    """Lets the loaders of torch and Transformer Engine install the backend.

    A lookup alone does not install it, since libraries look up whether packages exist.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("torch", "transformer_engine"):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    _install_with(spec.loader, before=fullname == "transformer_engine")
                return spec
        return None

    def install(self) -> None:
        settings = read_inherited()
        if settings is not None:
            import torch

            from te_precision_callbacks.reference.install import install

            arguments = child_arguments(settings, has_gpu=torch.cuda.is_available())
            if arguments is not None:
                install(**arguments)
        options = os.environ.get(WATCH_VARIABLE, "")
        if options.startswith("{"):
            from te_precision_callbacks.watch import ScriptWatch

            ScriptWatch(json.loads(options)).begin()
        elif options:
            logger.error("%s=%s watches nothing: use te-precision run --watch.", WATCH_VARIABLE, options)


def _install_with(loader: Any, *, before: bool) -> None:
    """Let a loader install the backend after it has executed its module, or ``before`` the module is created."""
    create_module = loader.create_module
    exec_module = loader.exec_module

    def create(spec: ModuleSpec) -> ModuleType | None:
        install_if_pending()
        module: ModuleType | None = create_module(spec)
        return module

    def execute(module: ModuleType) -> None:
        exec_module(module)
        install_if_pending()

    if before:
        loader.create_module = create
    else:
        loader.exec_module = execute
