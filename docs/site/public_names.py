"""The public names of the package, by the rule of docs/api.md, read from the sources without importing them.

    public_names(repository)["te_precision_callbacks.session"]  # ("FeatureLoadError", "GemmPrecision", ...)

The site makes the pages of its API reference from them, and a test compares them with a list in the repository.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = "te_precision_callbacks"


def public_names(repository: Path) -> dict[str, tuple[str, ...]]:
    """The package and the modules right below it that have an ``__all__``: each with its names, in their order.

    Raises:
        ValueError: an ``__all__`` is no literal list of names.
    """
    folder = repository / PACKAGE
    files = {PACKAGE: folder / "__init__.py"}
    files |= {f"{PACKAGE}.{path.stem}": path for path in folder.glob("[!_]*.py")}
    files |= {f"{PACKAGE}.{path.parent.name}": path for path in folder.glob("*/__init__.py")}
    found = {module: _exported(ast.parse(path.read_text())) for module, path in sorted(files.items())}
    return {module: names for module, names in found.items() if names is not None}


def _exported(source: ast.Module) -> tuple[str, ...] | None:
    for statement in source.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return tuple(ast.literal_eval(statement.value))
    return None
