"""Finds the Python modules that have imported a function of ``cpp_extensions``, and its name there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Callers:
    def __init__(self) -> None:
        self._callers: list[tuple[Any, str]] = []
        self._modules = 0  # their number at the last search

    def find(self, functions: Mapping[Any, Sequence[str]]) -> list[tuple[Any, str]]:
        """Return the importing modules, with their names of the functions; searches again after new imports.

        ``functions``: Python module of ``cpp_extensions`` -> names of functions.
        """
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            originals = {name: getattr(origin, name) for origin, names in functions.items() for name in names}
            self._callers = [
                (module, name)
                for module in list(sys.modules.values())
                if not originals.keys().isdisjoint(getattr(module, "__dict__", ()))
                for name, original in originals.items()
                if _is_caller(module, vars(module).get(name), original)
            ]
        return self._callers


def _is_caller(module: Any, function: Any, original: Any) -> bool:
    """Return whether a module has the function, or belongs to Transformer Engine and has a user's replacement."""
    return function is original or (
        callable(function) and str(getattr(module, "__name__", "")).startswith("transformer_engine.")
    )
