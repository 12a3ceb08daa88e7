"""docs/files.md: each file of the package with the first line of its docstring or comment, and the tree of exceptions.

    python tools/source_map.py > docs/files.md

Read from the sources, without importing them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "te_precision_callbacks"
BASE_OF_EXCEPTIONS = "PrecisionDebugError"


def rooms() -> Mapping[str, list[Path]]:
    """Folder, from the root of the repository -> its sources, each folder after the one that holds it."""
    found: dict[str, list[Path]] = {}
    for top in (PACKAGE, "features"):
        sources = (path for ending in ("*.py", "*.js") for path in (ROOT / top).rglob(ending))
        for path in sorted(sources, key=lambda path: (path.parent.parts, path.name)):
            found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


def purpose(path: Path) -> str:
    """The first paragraph of a module's docstring, or the first line of a script, as Markdown."""
    if path.suffix == ".js":
        return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("//").strip()
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`").replace("|", "\\|")


def map_of_files() -> Iterator[str]:
    """A section for each folder."""
    for folder, paths in rooms().items():
        yield f"\n### {folder}\n"
        inits = [path for path in paths if path.name == "__init__.py"]
        for path in inits:
            if said := purpose(path):
                yield f"{said}\n"
        others = [path for path in paths if path not in inits]
        if others:
            yield "| file | what it does |\n|---|---|"
        for path in others:
            yield f"| `{path.name}` | {purpose(path)} |"


def exceptions() -> Mapping[str, list[tuple[str, str]]]:
    """Base class -> its subclasses, each with the first line of its docstring."""
    bases: dict[str, list[tuple[str, str]]] = {}
    for paths in rooms().values():
        for path in (path for path in paths if path.suffix == ".py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.bases:
                    first = (ast.get_docstring(node) or "").partition("\n\n")[0]
                    base = ast.unparse(node.bases[0]).rpartition(".")[2]
                    bases.setdefault(base, []).append((node.name, " ".join(first.split())))
    return bases


def tree(base: str, bases: Mapping[str, list[tuple[str, str]]], depth: int = 0) -> Iterator[str]:
    """The subclasses of a class, in depth-first order, as a nested list."""
    for name, said in sorted(bases.get(base, ())):
        said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said).replace("``", "`")
        yield f"{'  ' * depth}- `{name}`: {said}"
        yield from tree(name, bases, depth + 1)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# Files and exceptions",
            "",
            "This page is made from the docstrings: `python tools/source_map.py > docs/files.md`.",
            "[Architecture](architecture.md) says which room may import which.",
            "",
            "## Exceptions",
            "",
            f"Every exception that the package raises on purpose derives from `{BASE_OF_EXCEPTIONS}`, and from the",
            "built-in class that fits.",
            "",
            *tree(BASE_OF_EXCEPTIONS, exceptions()),
            "",
            "## Files",
            *map_of_files(),
        ]
    )


if __name__ == "__main__":
    print(page())
