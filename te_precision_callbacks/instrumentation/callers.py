"""Which Python modules have imported a function of ``cpp_extensions``, and under which name."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class _ModuleScan(NamedTuple):
    """A look through all Python modules.

    Attributes:
        modules: those that there were, in the order of their import.
        again: those of them that the next look has to look at: that have a name, or may still get one. Of thousands
            they are a few.
    """

    modules: list[Any]
    again: list[Any]


_last_looks: dict[tuple[str, ...], _ModuleScan] = {}
"""Names of functions -> the last look for them."""


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
    last = _last_looks.get(tuple(names), _ModuleScan([], []))
    modules, known = list(sys.modules.values()), len(last.modules)
    goes_on = known <= len(modules) and all(map(operator.is_, modules, last.modules))
    found, again = [], []
    for module in [*last.again, *modules[known:]] if goes_on else modules:
        variables = getattr(module, "__dict__", {})
        spec = variables.get("__spec__")
        if not names.keys().isdisjoint(variables.keys()):
            found.append(module)
            again.append(module)
        # A notebook, which has no spec, and what is being imported may get one yet.
        elif spec is None or getattr(spec, "_initializing", False):
            again.append(module)
    _last_looks[tuple(names)] = _ModuleScan(modules, again)
    return found


def _is_of_transformer_engine(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).startswith("transformer_engine.")
