"""Pages that are made from docstrings: docs/files.md, and the table of docs/options.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from te_precision_callbacks.cli.manual import options_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_docstrings() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "source_map.py")], capture_output=True, text=True, check=True
    ).stdout
    remedy = "a docstring has changed: python tools/source_map.py > docs/files.md"
    assert made == (ROOT / "docs" / "files.md").read_text(encoding="utf-8"), remedy


def test_the_table_of_options_is_made_from_the_docstring() -> None:
    remedy = "a keyword has changed; python -m te_precision_callbacks.cli.manual.options_page prints the table"
    assert options_page.table() in (ROOT / "docs" / "options.md").read_text(encoding="utf-8"), remedy
