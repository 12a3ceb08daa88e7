"""benchmarks/figures.py: the tables of README and docs are those of what was measured."""

from __future__ import annotations

import importlib
import json
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


def test_the_pages_have_the_tables_of_what_was_measured(figures: Any) -> None:
    shown = []
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == figures.rendered(text), f"{page}: python benchmarks/figures.py --write"
        shown += re.findall("<!-- figures: (?!end)(.+) -->", text)
    assert sorted(shown) == sorted(figures.TABLES)


def test_another_measurement_makes_another_page(figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((figures.KEPT / "overflow.json").read_text())
    found["cases"][0]["ours_added_percent"] = {"value": 12.345, "low": 11, "high": 13}
    (tmp_path / "overflow.json").write_text(json.dumps(found))
    monkeypatch.setattr(figures, "KEPT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text(
        "before\n<!-- figures: overflow -->\na former table\n<!-- figures: end -->\nafter\n"
    )
    figures.main(["--write"])
    written = (tmp_path / "page.md").read_text()
    assert written.startswith("before\n<!-- figures: overflow -->\n| dtype |")
    assert "| 12.3 (11 to 13) |" in written
    assert found["commit"] in written
    assert written.endswith("<!-- figures: end -->\nafter\n")
    assert "a former table" not in written


def test_a_number_that_no_case_has_is_no_empty_column(figures: Any) -> None:
    with pytest.raises(KeyError, match="no case has other_ms"):
        figures._cases(figures.kept("overflow"), {"dtype": "dtype", "other, ms": "other_ms"})


@pytest.mark.parametrize("asked", ["stepp", "accuracy"])
def test_a_name_without_figures(figures: Any, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main([asked])
    assert f"There is no benchmark '{asked}' with figures. There are stats, " in capsys.readouterr().err
