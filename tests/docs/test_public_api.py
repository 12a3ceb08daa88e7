"""The list of public names, by the rule of docs/options.md; pages and examples use only these."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.public_api import PACKAGE, ROOT, listed, public_names

LIST = Path(__file__).parents[1] / "public_api.txt"
PUBLIC = public_names(ROOT)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_list_is_that_of_the_package() -> None:
    remedy = "a change of the public API: python -m tests.public_api > tests/public_api.txt"
    assert listed().splitlines() == LIST.read_text().splitlines(), remedy


def test_every_public_class_and_function_has_a_docstring() -> None:
    for module, names in PUBLIC.items():
        result = importlib.import_module(module)
        assert result.__doc__, module
        for name in names:
            value = getattr(result, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                assert inspect.getdoc(value), f"{module}.{name}"


def test_the_page_names_every_public_module() -> None:
    page = (ROOT / "docs" / "options.md").read_text().partition("\n## Public names\n")[2]
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert {PACKAGE + name if name.startswith(".") else name for name in named} == set(PUBLIC)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_pages_are_public(page: Path) -> None:
    text = page.read_text()
    for module, names in re.findall(rf"^ *from ({PACKAGE}[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in re.split(", *", names):
            assert module in PUBLIC, f"{module} is not public"
            assert name in PUBLIC[module] or f"{module}.{name}" in PUBLIC, f"{module}.{name} is not public"
    for module in re.findall(rf"^ *import ({PACKAGE}[\w.]*)$", text, re.MULTILINE):
        assert module in {*PUBLIC, f"{PACKAGE}.features"}, f"{module} is not public"
