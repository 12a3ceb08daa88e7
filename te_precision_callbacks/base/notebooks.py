"""HTML for notebooks (``_repr_html_``); all texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_MOST_ROWS = 200


def paragraph(text: str) -> str:
    return f"<p>{'<br>'.join(map(escape, text.splitlines()))}</p>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table of at most 200 rows; empty without rows."""
    if not rows:
        return ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    rest = paragraph(f"and {more:,} more") if more > 0 else ""
    return f"<table><thead><tr>{_cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>{rest}"


def bullets(texts: Iterable[str]) -> str:
    """Format a list; empty without texts."""
    items = "".join(f"<li>{'<br>'.join(map(escape, text.splitlines()))}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _cells(tag: str, texts: Iterable[object]) -> str:
    return "".join(f'<{tag} style="text-align: left">{escape(str(text))}</{tag}>' for text in texts)
