"""The public names of the package, by the rule of docs/options.md, read from the sources without importing them.

    public_names(repository)["te_precision_callbacks.session"]  # ("FeatureLoadError", "GemmPrecision", ...)

The site makes the pages of its API reference from them, and a test compares them with a list in the repository.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = "te_precision_callbacks"


_NOT_PUBLIC = ("engine", "reference")
"""Rooms in whose modules an ``__all__`` says what their own parts may use; only that of the room itself is public."""


@functools.cache
def public_names(repository: Path) -> dict[str, tuple[str, ...]]:
    """The modules that have an ``__all__``: each with its names, in their order.

    Raises:
        ValueError: an ``__all__`` is no literal list of names.
    """
    folder = repository / PACKAGE
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] in _NOT_PUBLIC and parts[1:] != ("__init__",):
            continue
        names = _exported(ast.parse(path.read_text()))
        if names is not None:
            found[".".join((PACKAGE, *(part for part in parts if part != "__init__")))] = names
    return dict(sorted(found.items()))


def _exported(source: ast.Module) -> tuple[str, ...] | None:
    for statement in source.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return tuple(ast.literal_eval(statement.value))
    return None
