"""docs/troubleshooting.md quotes messages that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import te_precision_callbacks

ROOT = Path(__file__).parents[2]


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
