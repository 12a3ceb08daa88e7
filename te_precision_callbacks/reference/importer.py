"""Imports Transformer Engine's Python on the reference backend, through a finder in ``sys.meta_path``.

Transformer Engine's files are unchanged; rewritten bytecode is cached next to the original, in ``__pycache__``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

from te_precision_callbacks.reference import rewrite as rewrite_module
from te_precision_callbacks.reference.compiled_extension import COMPILED_MODULE
from te_precision_callbacks.reference.rewrite import ALIAS, ON_CPU, ON_CUDA, rewrite

_FEATURE_EXECUTOR = "nvdlfw_inspect.utils"


class Finder(MetaPathFinder):
    """Finds modules by the other finders of ``sys.meta_path``, and replaces Transformer Engine's loaders."""

    def __init__(self, *, cuda_on_cpu: bool) -> None:
        self._cuda_on_cpu = cuda_on_cpu

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == COMPILED_MODULE:
            return ModuleSpec(fullname, _ExtensionLoader())
        if fullname != _FEATURE_EXECUTOR and not re.match(r"transformer_engine\.(?!jax)", fullname):
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.origin is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RewritingLoader(fullname, spec.origin, self._cuda_on_cpu)
        return spec


class _ExtensionLoader(Loader):
    """Loads the backend's extension in place of the compiled one.

    The import is deferred until Transformer Engine needs it: the backend may be installed while a module of this
    package that the extension imports is still importing torch.
    """

    def exec_module(self, module: ModuleType) -> None:
        from te_precision_callbacks.reference import extension

        sys.modules[COMPILED_MODULE] = extension


class RewritingLoader(SourceFileLoader):
    """Compiles rewritten source, and caches the bytecode next to the original, under another name."""

    def __init__(self, fullname: str, path: str, cuda_on_cpu: bool) -> None:
        super().__init__(fullname, path)
        self.cuda_on_cpu = cuda_on_cpu

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        tree = rewrite(ast.parse(data, path), cuda_on_cpu=self.cuda_on_cpu)
        return super().source_to_code(tree, path, **options)

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._rewritten_path(path))

    def set_data(self, path: str, data: Any, **options: Any) -> None:
        super().set_data(self._rewritten_path(path), data, **options)

    def _rewritten_path(self, path: str) -> str:
        """The path of rewritten bytecode for a path of bytecode; paths of sources are unchanged."""
        device = "cpu" if self.cuda_on_cpu else "cuda"
        if path.endswith(".pyc"):
            return f"{path.removesuffix('.pyc')}.{device}-{_rewriter()}.pyc"
        return path

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[ALIAS] = importlib.import_module(ON_CPU if self.cuda_on_cpu else ON_CUDA)
        super().exec_module(module)
        module.__dict__.update(_REPLACED.get(module.__name__, {}))
        if module.__name__ == _FEATURE_EXECUTOR:
            rewrite_executed_features(module, cuda_on_cpu=self.cuda_on_cpu)


@cache
def _rewriter() -> str:
    return hashlib.sha256(Path(rewrite_module.__file__).read_bytes()).hexdigest()[:16]


def _pad_columnwise_scale_inv(inp: torch.Tensor) -> torch.Tensor:
    """Replaces Transformer Engine's function: pads with zeros to multiples of 128 rows and 4 columns."""
    rows, columns = inp.shape
    return torch.nn.functional.pad(inp, (0, -columns % 4, 0, -rows % 128))


def _load_framework_extension(framework: str) -> None:
    if framework != "torch":
        raise ImportError(f"The reference backend is for PyTorch; it has no extension for {framework!r}.")


_REPLACED: dict[str, dict[str, Any]] = {
    "transformer_engine.common": {"load_framework_extension": _load_framework_extension},
    "transformer_engine.pytorch.triton.pad": {"pad_columnwise_scale_inv": _pad_columnwise_scale_inv},
}
"""Module -> the functions that are replaced in it."""


def rewrite_executed_features(executor: ModuleType, *, cuda_on_cpu: bool) -> None:
    """Make ``executor``, ``nvdlfw_inspect.utils``, rewrite the feature files that it executes by path.

    It loads them by ``importlib.util.spec_from_file_location``, which is replaced in that module.
    """

    def spec_from_file_location(name: str, location: str, **options: Any) -> ModuleSpec | None:
        loader = RewritingLoader(name, os.fspath(location), cuda_on_cpu)
        return importlib.util.spec_from_file_location(name, location, loader=loader, **options)

    util = SimpleNamespace(
        spec_from_file_location=spec_from_file_location, module_from_spec=importlib.util.module_from_spec
    )
    executor.__dict__["importlib"] = SimpleNamespace(util=util)
