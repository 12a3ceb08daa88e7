"""benchmarks/figures.py: the tables of README and docs have the stored results."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("figures")
    for name in ("figures", "measuring", "stats", "step"):
        sys.modules.pop(name, None)


def test_the_pages_have_the_tables_of_the_stored_results(figures: Any) -> None:
    shown = []
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == figures.rendered(text), f"{page}: python benchmarks/figures.py"
        shown += re.findall("<!-- figures: (?!end)(.+) -->", text)
    assert sorted(shown) == sorted(figures.TABLES)
