"""Tables that are generated from the code, in docs/options.md and docs/diagnosis.md."""

from __future__ import annotations

from pathlib import Path

from tools import options_page, rules_table

ROOT = Path(__file__).parents[2]


def test_the_table_of_options_is_made_from_the_docstring() -> None:
    remedy = "a keyword has changed; python -m tools.options_page prints the table"
    assert options_page.table() in (ROOT / "docs" / "options.md").read_text(encoding="utf-8"), remedy


def test_the_table_of_rules_is_made_from_the_rules() -> None:
    remedy = "a rule has changed; python -m tools.rules_table prints the table"
    assert rules_table.table() in (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8"), remedy
