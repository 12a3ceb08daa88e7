"""Numbers of things in words.

many(1, "file"), many(3000, "file")     # "1 file", "3,000 files"
"""

from __future__ import annotations


def many(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'' if count == 1 or what == 'series' else 's'}"
