"""docs/files.md is what ``python tools/source_map.py`` prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_docstrings() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "source_map.py")], capture_output=True, text=True, check=True
    ).stdout
    remedy = "a docstring has changed: python tools/source_map.py > docs/files.md"
    assert made == (ROOT / "docs" / "files.md").read_text(encoding="utf-8"), remedy
