"""Values and suggestions in error messages."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping

from te_precision_callbacks.base.counts import first_of

_LONGEST_WORD = 200


def shorten(text: str, most: int = 500) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - most // 4]} ... {text[-(most // 4) :]}"


class _Shown(reprlib.Repr):
    """A ``repr`` of a few lines, even for deep or recursive values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = 8
        self.maxlist = 8
        self.maxtuple = 8
        self.maxset = 8
        self.maxfrozenset = 8
        self.maxstring = 200
        self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() <= 128:
            return repr(x)
        return f"an integer of {x.bit_length()} bits"


_SHOWN = _Shown()


def shown(value: object) -> str:
    return _SHOWN.repr(value)


_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("forward", "fwd"), ("fprop",)),
    **dict.fromkeys(("backward", "bwd"), ("dgrad", "wgrad")),
    **dict.fromkeys(("input", "inputs", "x"), ("activation",)),
}
"""Words of users -> words of a config."""


def nearest(word: str, candidates: Iterable[str], most: int = 3) -> list[str]:
    """Return entries of ``candidates`` that are similar to ``word``, contain it, or are synonyms; best first."""
    by_folded = {candidate.casefold(): candidate for candidate in candidates}
    folded = word[:_LONGEST_WORD].casefold()
    if folded in _MEANT:
        return [by_folded[other] for other in _MEANT[folded] if other in by_folded]
    having = [candidate for candidate in by_folded if folded in _parts(candidate)]
    close = difflib.get_close_matches(folded, by_folded, n=most, cutoff=0.5) if len(having) < most else []
    return [by_folded[match] for match in dict.fromkeys((*having, *close))][:most]


def with_common_part(word: str, candidates: Iterable[str]) -> list[str]:
    """Return up to 3 entries of ``candidates`` that share a part, such as qkv, with ``word``."""
    parts = _parts(word[:_LONGEST_WORD].casefold())
    return [candidate for candidate in candidates if parts & _parts(candidate.casefold())][:3]


def _parts(word: str) -> set[str]:
    parts = {part for part in re.split("[._]", word) if len(part) > 1 and not part.isdecimal()}
    if len(parts) > 1:
        return parts
    return set()


def meant_for(key: str, present: Iterable[object]) -> str:
    """Return ``" Is ... meant for it?"`` if a present key is similar to a missing one."""
    close = nearest(key, map(str, present), most=1)
    if close:
        return f" Is {close[0]!r} a misspelling of it?"
    return ""


def suggestion(word: str, candidates: Iterable[str], known_as: str = "Known") -> str:
    """Return ``" Did you mean ...?"`` if a known word is similar, else a sentence that lists known words."""
    candidates = list(candidates)
    close = nearest(word, candidates)
    if close:
        return f" Did you mean {' or '.join(map(shown, close))}?"
    if candidates:
        return f" {known_as}: {', '.join(first_of(sorted(candidates), 60))}."
    return ""
