"""benchmarks/figures.py: the tables of README and docs are those of what was measured."""

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
    for name in ("figures", "in_turn", "measuring"):
        sys.modules.pop(name, None)


def test_the_pages_have_the_tables_of_the_stored_results(figures: Any) -> None:
    shown = []
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == figures.rendered(text), f"{page}: python benchmarks/figures.py --write"
        shown += re.findall("<!-- figures: (?!end)(.+) -->", text)
    assert sorted(shown) == sorted(figures.TABLES)


def test_a_number_that_no_case_has_is_no_empty_column(figures: Any) -> None:
    with pytest.raises(KeyError, match="no case has other_ms"):
        figures._cases(figures.kept("overflow"), {"dtype": "case", "other, ms": "other_ms"})


@pytest.mark.parametrize("asked", ["stepp", "accuracy"])
def test_a_name_without_figures(figures: Any, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main([asked])
    assert f"There is no benchmark '{asked}' with figures. There are stats, " in capsys.readouterr().err
