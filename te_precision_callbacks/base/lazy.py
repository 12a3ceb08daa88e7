"""Lazy imports of a package's public names.

The package's ``__init__.py`` lists its names for type checkers::

    if TYPE_CHECKING:
        from te_precision_callbacks.views.compare.comparison import compare

    __all__ = ["compare"]
    __getattr__, __dir__ = lazy_names(__name__)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its names under ``if TYPE_CHECKING:``."""

    @cache
    def origins() -> dict[str, tuple[str, str]]:
        imported = {}
        for statement in ast.walk(ast.parse(inspect.getsource(sys.modules[package]))):
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                for alias in statement.names:
                    imported[alias.asname or alias.name] = statement.module, alias.name
        return imported

    def getattr_(name: str) -> object:
        if name.startswith("__") or name not in origins():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original_name = origins()[name]
        return getattr(importlib.import_module(module), original_name)

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins()})

    return getattr_, dir_
