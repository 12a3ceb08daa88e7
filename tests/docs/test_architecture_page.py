"""What pages say of the code: the call paths of docs/architecture.md, tables that are made, and quoted messages."""

import ast
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import te_precision_callbacks
from tools import options_page, rules_table

ROOT = Path(__file__).parents[2]
MOST_LINES = 15


def paths() -> list[list[str]]:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Five call paths\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]


@cache
def functions(file: str) -> set[str]:
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


# ------------------------------------------------------------------------------------------------- tables that are made


@pytest.mark.parametrize(("made", "page"), [(options_page, "options"), (rules_table, "diagnosis")])
def test_the_table_of_a_page_is_made_from_the_code(made: ModuleType, page: str) -> None:
    remedy = f"the code has changed; python -m {made.__name__} prints the table"
    assert made.table() in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), remedy


# ---------------------------------------------------------------------------------------------- docs/troubleshooting.md


def test_the_quoted_messages_are_in_the_sources() -> None:
    texts = [
        node.value
        for path in Path(te_precision_callbacks.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    quoted = [part.strip() for cell in symptoms for text in re.findall('"([^"]+)"', cell) for part in text.split("...")]
    assert len(quoted) > 15
    assert [part for part in quoted if not any(part in text for text in texts)] == []
