"""The error for everything that is wrong with a config, and how it points at the place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from te_precision_callbacks.errors import PrecisionDebugError

KeyPath = tuple[str | int, ...]
"""The keys and the places in lists that lead to an entry: ``("tensors_struct", 0, "freq")``."""


class ConfigError(PrecisionDebugError, ValueError):
    """A config that cannot be used. The text names the file and line, the key, the value, and what to write instead."""


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The at most ``most`` entries of ``known`` that look like ``word``, best first."""
    by_folded = {entry.casefold(): entry for entry in known}
    return [by_folded[match] for match in difflib.get_close_matches(word.casefold(), by_folded, n=most, cutoff=0.5)]


def meant_for(key: str, present: Iterable[object]) -> str:
    """``" Is ... meant for it?"`` where a key that is there looks like one that is missing."""
    close = nearest(key, map(str, present), most=1)
    return f" Is {close[0]!r} meant for it?" if close else ""


def suggestion(word: str, known: Iterable[str], known_as: str = "Known") -> str:
    """``" Did you mean ...?"`` where something known is near, else the list of what is known."""
    known = list(known)
    close = nearest(word, known)
    if close:
        return f" Did you mean {' or '.join(repr(entry) for entry in close)}?"
    return f" {known_as}: {', '.join(sorted(known))}." if known else ""
