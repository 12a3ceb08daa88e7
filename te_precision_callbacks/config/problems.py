"""Errors about configs, and suggestions.

problems = Problems()
with problems.noted():              # an error raised inside is one of several
    check_something()
problems.raise_any()
"""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import re
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from te_precision_callbacks.base.errors import PrecisionDebugError

KeyPath = tuple[str | int, ...]
"""The path of an entry: ``("tensors_struct", 0, "freq")``."""


Where = Callable[..., str]
"""Formats the place of an entry, such as ``config.yaml, line 7 (section 'stats')``, from its path below a section or
feature; without a path, the place of the section or feature."""

MOST_TOLD = 20
"""The most problems in a message; others are counted."""

_LONGEST_PROBLEM = 4000
_LONGEST_WORD = 200
_MOST_COMPARED = 200


class ConfigError(PrecisionDebugError, ValueError):
    """An invalid config. The message names file and line, key, value, and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*(shortened(problem, _LONGEST_PROBLEM) for problem in problems))

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"The config has {len(self.problems)} problems:"]
        lines += [f"- {problem}" for problem in self.problems[:MOST_TOLD]]
        more = len(self.problems) - MOST_TOLD
        return "\n".join([*lines, f"- ... and {more} more"] if more > 0 else lines)


def shortened(text: str, most: int = 500) -> str:
    """Shorten a long text to its beginning and end."""
    return text if len(text) <= most else f"{text[: most - most // 4]} ... {text[-(most // 4) :]}"


class Problems:
    """Problems that are raised together."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, problem: str) -> None:
        self.texts.append(problem)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Collect the problems of a :class:`ConfigError` raised in a block."""
        try:
            yield
        except ConfigError as error:
            self.texts += error.problems

    def warn(self, logger: logging.Logger) -> None:
        for problem in self.texts[:MOST_TOLD]:
            logger.warning("%s", problem)
        if len(self.texts) > MOST_TOLD:
            logger.warning("... and %d more of this kind.", len(self.texts) - MOST_TOLD)

    def raise_any(self) -> None:
        """Raise a ConfigError if there are problems."""
        if self.texts:
            raise ConfigError(*self.texts)


class _Shown(reprlib.Repr):
    """A ``repr`` of a few lines, even for deep or recursive values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0:
            return "{...}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in itertools.islice(x.items(), 8)]
        return f"{{{', '.join([*shown, '...'] if len(x) > 8 else shown)}}}"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """Format a value of a config for a message."""
    return _SHOWN.repr(value)


_PART = re.compile(r"[._]")

_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("forward", "fwd"), ("fprop",)),
    **dict.fromkeys(("backward", "bwd"), ("dgrad", "wgrad")),
    **dict.fromkeys(("input", "inputs", "x"), ("activation",)),
}
"""Words of users -> words of a config."""


class Vocabulary:
    """Known words, as suggestions for unknown ones; of words that differ in case only, the last one counts."""

    def __init__(self, words: Iterable[str]) -> None:
        self._by_folded = {word.casefold(): word for word in words}

    @functools.cached_property
    def _by_part(self) -> dict[str, list[str]]:
        """Map a part to the words that contain it and others."""
        found: dict[str, list[str]] = {}
        for word in self._by_folded:
            parts = {part for part in _PART.split(word) if len(part) > 1 and not part.isdecimal()}
            for part in parts if len(parts) > 1 else ():
                found.setdefault(part, []).append(word)
        return found

    @functools.cached_property
    def _forwards(self) -> list[str]:
        return sorted(self._by_folded)

    @functools.cached_property
    def _backwards(self) -> list[str]:
        return sorted(word[::-1] for word in self._by_folded)

    def nearest(self, word: str, most: int = 3) -> list[str]:
        """Return similar words, or words with the same meaning, best first.

        Among many words, only those with a similar beginning or end are compared.
        """
        if len(word) > _LONGEST_WORD:
            return []
        folded = word.casefold()
        meant = [other for other in _MEANT.get(folded, ()) if other in self._by_folded]
        meant += [other for other in self._by_part.get(folded, ()) if other not in meant]
        if len(meant) >= most or folded in _MEANT:
            return [self._by_folded[other] for other in meant[:most]]
        candidates: Iterable[str] = self._by_folded
        if len(self._by_folded) > _MOST_COMPARED:
            ends_alike = (candidate[::-1] for candidate in _around(folded[::-1], self._backwards))
            candidates = dict.fromkeys((*_around(folded, self._forwards), *ends_alike))
        close = difflib.get_close_matches(folded, candidates, n=most, cutoff=0.5)
        return [self._by_folded[match] for match in list(dict.fromkeys((*meant, *close)))[:most]]

    def sharing(self, word: str, most: int = 3) -> list[str]:
        """Return words that share a part, such as qkv."""
        parts = _PART.split(word.casefold()) if len(word) <= _LONGEST_WORD else ()
        found = dict.fromkeys(other for part in parts for other in self._by_part.get(part, ())[:most])
        return [self._by_folded[other] for other in found][:most]


def _around(word: str, in_order: Sequence[str]) -> Sequence[str]:
    place = bisect_left(in_order, word)
    return in_order[max(0, place - _MOST_COMPARED // 4) : place + _MOST_COMPARED // 4]


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return entries of ``known`` similar to ``word``, best first."""
    return Vocabulary(known).nearest(word, most)


def meant_for(key: str, present: Iterable[object]) -> str:
    """Return ``" Is ... meant for it?"`` if a present key is similar to a missing one."""
    close = nearest(key, map(str, present), most=1)
    return f" Is {close[0]!r} meant for it?" if close else ""


def suggestion(word: str, known: Iterable[str], known_as: str = "Known") -> str:
    """Return ``" Did you mean ...?"`` if a known word is similar, else a list of known words."""
    known = list(known)
    close = nearest(word, known)
    if close:
        return f" Did you mean {' or '.join(map(shown, close))}?"
    more = f", and {len(known) - 60} more" if len(known) > 60 else ""
    return f" {known_as}: {', '.join(sorted(known)[:60])}{more}." if known else ""
