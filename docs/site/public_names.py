"""The public names of the package, by the rule of docs/api.md, read from the sources without importing them.

    public_names(repository)["te_precision_callbacks.session"]  # ("FeatureLoadError", "GemmPrecision", ...)

The site makes the pages of its API reference from them, and a test compares them with a list in the repository.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = "te_precision_callbacks"


def public_modules(repository: Path) -> dict[str, ast.Module]:
    """The package and the modules right below it that have an ``__all__``: name -> source."""
    folder = repository / PACKAGE
    files = {PACKAGE: folder / "__init__.py"}
    files |= {f"{PACKAGE}.{path.stem}": path for path in folder.glob("[!_]*.py")}
    files |= {f"{PACKAGE}.{path.parent.name}": path for path in folder.glob("*/__init__.py")}
    parsed = {module: ast.parse(path.read_text()) for module, path in sorted(files.items())}
    return {module: source for module, source in parsed.items() if _exported(source) is not None}


def public_names(repository: Path) -> dict[str, tuple[str, ...]]:
    """Each public module and its public names, in the order of its ``__all__``.

    Raises:
        ValueError: an ``__all__`` is no literal list of names.
    """
    return {module: _exported(source) or () for module, source in public_modules(repository).items()}


def _exported(source: ast.Module) -> tuple[str, ...] | None:
    for statement in source.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return tuple(ast.literal_eval(statement.value))
    return None
