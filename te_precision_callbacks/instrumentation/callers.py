"""Which Python modules have imported a function of ``cpp_extensions``, and under which name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_without: dict[tuple[str, ...], dict[str, Any]] = {}
"""Names of functions -> the modules, by name, that were imported whole and have none of them: of thousands, nearly all.
They are not looked through again."""


class Callers:
    """Finds them, anew when Python modules have come."""

    def __init__(self) -> None:
        self._callers: list[tuple[Any, str]] = []
        self._modules = 0  # so many there were when the callers were found
        self._said_foreign = False

    def find(self, functions: Mapping[Any, Sequence[str]]) -> list[tuple[Any, str]]:
        """The Python modules, and the names.

        Args:
            functions: Python module of ``cpp_extensions`` -> the functions.
        """
        origins = {name: origin for origin, names in functions.items() for name in names}
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._callers = [
                (module, name)
                for module in _modules_with(origins)
                for name, origin in origins.items()
                if (found := vars(module).get(name)) is not None
                # Transformer Engine's modules may have one of the user's own.
                if found is getattr(origin, name) or (callable(found) and _is_of_transformer_engine(module))
            ]
            self._say_foreign(origins)
        return self._callers

    def _say_foreign(self, origins: Mapping[str, Any]) -> None:
        """Log once which of Transformer Engine's functions the user has replaced."""
        theirs = [
            f"{module.__name__}.{name}"
            for module, name in self._callers
            if getattr(module, name) is not getattr(origins[name], name)
        ]
        if theirs and not self._said_foreign:
            self._said_foreign = True
            logger.info(
                "%s is not Transformer Engine's own function. It is kept: the session looks at what Transformer Engine"
                " hands to it, and then calls it.",
                " and ".join(theirs),
            )


def _modules_with(names: Mapping[str, Any]) -> list[Any]:
    """The modules that have a variable of one of these names, in the order of their import."""
    without = _without.setdefault(tuple(names), {})
    found = []
    for path, module in list(sys.modules.items()):
        if without.get(path) is module:
            continue
        variables = getattr(module, "__dict__", {})
        if not names.keys().isdisjoint(variables.keys()):
            found.append(module)
        # A notebook, which has no spec, and what is being imported may get one yet.
        elif (spec := variables.get("__spec__")) is not None and not getattr(spec, "_initializing", False):
            without[path] = module
    return found


def _is_of_transformer_engine(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).startswith("transformer_engine.")
