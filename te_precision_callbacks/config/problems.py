"""The errors for problems of a config, with the place of each.

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
"""The keys and the places in lists that lead to an entry: ``("tensors_struct", 0, "freq")``."""


Where = Callable[..., str]
"""Gives the place of an entry, such as ``config.yaml, line 7 (section 'stats')``, by its path below a section or
feature; without a path the place of the section or feature itself."""

MOST_TOLD = 20
"""The most problems that the text of one error has; it counts the others."""

_LONGEST_PROBLEM = 4000
_LONGEST_WORD = 200
_MOST_COMPARED = 200


class ConfigError(PrecisionDebugError, ValueError):
    """A config that cannot be used. The text names the file and line, the key, the value, and what to write instead.

    Args:
        problems: the problems, a text each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*(shortened(problem, _LONGEST_PROBLEM) for problem in problems))

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems; the text of the error has the first :data:`MOST_TOLD`."""
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"The config has {len(self.problems)} problems:"]
        lines += [f"- {problem}" for problem in self.problems[:MOST_TOLD]]
        more = len(self.problems) - MOST_TOLD
        return "\n".join([*lines, f"- ... and {more} more"] if more > 0 else lines)


def shortened(text: str, most: int = 500) -> str:
    """A text from elsewhere for a message: of a long text, the beginning and the end."""
    return text if len(text) <= most else f"{text[: most - most // 4]} ... {text[-(most // 4) :]}"


class Problems:
    """Problems that are raised together.

    Attributes:
        texts: the added problems.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, problem: str) -> None:
        """Add a problem."""
        self.texts.append(problem)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block whose :class:`ConfigError` is added instead of raised."""
        try:
            yield
        except ConfigError as error:
            self.texts += error.problems

    def warn(self, logger: logging.Logger) -> None:
        """Log the added problems as warnings."""
        for problem in self.texts[:MOST_TOLD]:
            logger.warning("%s", problem)
        if len(self.texts) > MOST_TOLD:
            logger.warning("... and %d more of this kind.", len(self.texts) - MOST_TOLD)

    def raise_any(self) -> None:
        """Raise the added problems.

        Raises:
            ConfigError: there is a problem.
        """
        if self.texts:
            raise ConfigError(*self.texts)


class _Shown(reprlib.Repr):
    """``repr``, but never longer than a few lines, even for a value that is deep or holds itself."""

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
    """A value of a config for a message: its ``repr``, shortened if long."""
    return _SHOWN.repr(value)


_PART = re.compile(r"[._]")

_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("forward", "fwd"), ("fprop",)),
    **dict.fromkeys(("backward", "bwd"), ("dgrad", "wgrad")),
    **dict.fromkeys(("input", "inputs", "x"), ("activation",)),
}
"""Words that others use -> those of a config."""


class Vocabulary:
    """The known words, to suggest for an unknown one.

    Args:
        words: the words; of two that differ only in case, the later one counts.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._by_folded = {word.casefold(): word for word in words}

    @functools.cached_property
    def _by_part(self) -> dict[str, list[str]]:
        """A part -> the words that have it beside others."""
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
        """The at most ``most`` words that look like this one, or that are meant by it, best first.

        If there are many words, only those that begin or end like this one are compared, as words with one typo do.
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
        """The at most ``most`` words that have a part in common with this one, such as qkv."""
        parts = _PART.split(word.casefold()) if len(word) <= _LONGEST_WORD else ()
        found = dict.fromkeys(other for part in parts for other in self._by_part.get(part, ())[:most])
        return [self._by_folded[other] for other in found][:most]


def _around(word: str, in_order: Sequence[str]) -> Sequence[str]:
    """The neighbours of a word in a sorted list."""
    place = bisect_left(in_order, word)
    return in_order[max(0, place - _MOST_COMPARED // 4) : place + _MOST_COMPARED // 4]


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The at most ``most`` entries of ``known`` that look like ``word``, best first."""
    return Vocabulary(known).nearest(word, most)


def meant_for(key: str, present: Iterable[object]) -> str:
    """``" Is ... meant for it?"`` if a present key looks like the missing one."""
    close = nearest(key, map(str, present), most=1)
    return f" Is {close[0]!r} meant for it?" if close else ""


def suggestion(word: str, known: Iterable[str], known_as: str = "Known") -> str:
    """``" Did you mean ...?"`` if a known word is similar, else the list of known words."""
    known = list(known)
    close = nearest(word, known)
    if close:
        return f" Did you mean {' or '.join(map(shown, close))}?"
    more = f", and {len(known) - 60} more" if len(known) > 60 else ""
    return f" {known_as}: {', '.join(sorted(known)[:60])}{more}." if known else ""
