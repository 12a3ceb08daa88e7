"""The call paths of docs/architecture.md name functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 15


def paths() -> list[list[str]]:
    """The lines of each call path."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Five call paths\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]


@cache
def functions(file: str) -> set[str]:
    """The functions and methods of a file, by qualified name."""
    folder = ROOT if file.startswith("features/") else ROOT / "te_precision_callbacks"
    results: set[str] = set()
    for node in ast.parse((folder / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            results.add(node.name)
        elif isinstance(node, ast.ClassDef):
            results |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return results


@pytest.mark.parametrize("path", paths(), ids=lambda path: path[0].split()[0])
def test_each_function_of_a_call_path_exists(path: list[str]) -> None:
    assert len(path) <= MOST_LINES
    named = [match.groups() for line in path if (match := re.match(r" *(\S+\.py) +(\S+)", line))]
    assert len(named) >= len(path) - 2, "all lines but those of Transformer Engine"
    assert [(file, name) for file, name in named if name not in functions(file)] == []


def test_there_are_five_call_paths() -> None:
    assert len(paths()) == 5
