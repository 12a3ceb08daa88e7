"""The observed precision of each GEMM of a run, by iteration.

A run may change precision in every step, so an entry of a layer is a few numbers that refer to shared facts.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from te_precision_callbacks.base.spans import AnyIteration, Iterations
from te_precision_callbacks.base.vocabulary import GEMMS, GemmName

FROZEN = "frozen weight"
NO_INPUT_GRADIENT = "input needs no gradient"
NO_GRADIENT = "neither input nor parameters need a gradient"
NO_BACKWARD = "no backward has reached it"

HIGH_PRECISION = "none"
"""The recipe of a GEMM in a layer without one."""


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``. Several formats in a run are joined by arrows
            in the order of their first step. Empty for a GEMM that has not run.
        seen: whether all of these formats were seen on the tensors passed to the GEMM. Otherwise some are formats of
            the quantizers.
        not_run: the reason if the GEMM has not run in training, one of :data:`FROZEN`, :data:`NO_INPUT_GRADIENT`,
            :data:`NO_GRADIENT` and :data:`NO_BACKWARD`; else empty. NO_BACKWARD is reported only for steps that observe
            the layer, if a backward has reached other parts of the model.
        since: the first debug iteration with these facts; in ``session.precision``, the first one of the GEMM.
        until: the last debug iteration with these facts; None while they hold.
        recipe: ``fp8_delayed_scaling``, ``fp8_current_scaling``, ``mxfp8``, ``fp8_block_scaling``, ``nvfp4``, the class
            of a custom recipe, or :data:`HIGH_PRECISION`; several are joined by arrows. Empty for a GEMM that has not
            run.
        excluded: whether the layer ran in high precision because its forward is inside ``te.autocast(enabled=False)``.
    """

    layer: str
    gemm: GemmName
    operands: Mapping[str, str]
    seen: bool
    not_run: str = ""
    since: int = 0
    until: int | None = None
    recipe: str = ""
    excluded: bool = False


def in_short(operands: Mapping[str, str]) -> str:
    """``FP8 E5M2 * E4M3``; one format if both operands have it; in brackets the formats of a changed operand."""
    return _formats_in_short(tuple(operands.values()))


@functools.cache
def _formats_in_short(formats: tuple[str, ...]) -> str:
    if len(set(formats)) == 1:
        return formats[0]
    if any("->" in text for text in formats):
        return " * ".join(f"({text})" if "->" in text else text for text in formats)
    if all(" " in text and text.split()[0] == formats[0].split()[0] for text in formats):
        return " * ".join([formats[0], *(text.split(maxsplit=1)[1] for text in formats[1:])])
    return " * ".join(formats)


class Precision(AnyIteration[GemmPrecision]):
    """The observed precision of each GEMM of a run; calling the object returns the precision in one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # the formats in iteration 120, with first and last iteration

    A GEMM that did not run has the reason in ``not_run``. A layer without a forward in the iteration keeps its previous
    precision; so do the GEMMs of the backward in an iteration without one, such as a skipped batch.
    """


_EXCLUDED = 1 << len(GEMMS)

MOST_SPANS = 64


class Format(NamedTuple):
    text: str
    recipe: str = ""


class GemmFact(NamedTuple):
    """The operands of a GEMM in an iteration, each with its formats; or the reason why the GEMM did not run."""

    operands: tuple[tuple[str, tuple[Format, ...]], ...] = ()
    not_run: str = ""

    @property
    def is_left_out(self) -> bool:
        return self.not_run not in ("", NO_BACKWARD)


_Fields = tuple[GemmName, Mapping[str, str], bool, str, int, int | None, str, bool]

LayerFacts = tuple[GemmFact | None, ...]

_UNKNOWN: LayerFacts = (None,) * len(GEMMS)


class _Entries:
    """The entries of one layer: first iteration, number of its facts, and flags for GEMMs with seen operands, and for
    a forward inside ``te.autocast(enabled=False)``.

    Attributes:
        met: all numbers of facts in the order of their first iteration, with the union of their flags.
    """

    def __init__(self) -> None:
        self.since, self.facts, self.flags = array("q"), array("q"), bytearray()
        self.met: dict[int, int] = {}

    def put(self, iteration: int, facts: int, flags: int) -> None:
        """Add facts that hold from an iteration on; replaces an entry of the same iteration."""
        self.met[facts] = self.met.get(facts, 0) | flags
        if self.since and self.since[-1] == iteration:
            self.facts[-1], self.flags[-1] = facts, flags | (self.flags[-1] if facts == self.facts[-1] else 0)
        elif self.since and self.facts[-1] == facts:
            self.flags[-1] |= flags
        else:
            self.since.append(iteration)
            self.facts.append(facts)
            self.flags.append(flags)

    @property
    def key(self) -> tuple[bytes, bytes, bytes, tuple[int, ...]]:
        return self.since.tobytes(), self.facts.tobytes(), bytes(self.flags), tuple(self.met.values())

    def cut(self, iteration: int) -> None:
        number = bisect_left(self.since, iteration)
        del self.since[number:], self.facts[number:], self.flags[number:]


class PrecisionHistory:
    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations
        self._layers: dict[str, _Entries] = {}
        self._facts: list[LayerFacts] = []
        self._numbers: dict[LayerFacts, int] = {}
        self.changes = 0

    @property
    def has_changed(self) -> bool:
        return any(len(entries.since) > 1 for entries in self._layers.values())

    @property
    def last(self) -> int | None:
        return self._iterations.last

    def ran(self, iteration: int) -> None:
        if self._iterations.ran(iteration):
            for entries in self._layers.values():
                entries.cut(iteration)

    def put(
        self,
        layer: str,
        iteration: int,
        facts: Mapping[GemmName, GemmFact],
        seen: Iterable[GemmName],
        *,
        excluded: bool = False,
    ) -> None:
        """Record facts about some GEMMs of a layer from the last iteration on; facts about its other GEMMs continue.

        ``seen`` are the GEMMs with seen operands; ``excluded``: the forward ran inside ``te.autocast(enabled=False)``.
        """
        flags = sum(1 << GEMMS.index(gemm) for gemm in seen) | (_EXCLUDED if excluded else 0)
        before = self.now(layer)
        after = tuple(facts.get(gemm, fact) for gemm, fact in zip(GEMMS, before, strict=True))
        number = self._numbers.setdefault(after, len(self._facts))
        if number == len(self._facts):
            self._facts.append(after)
        self.changes += after != before
        self._layers.setdefault(layer, _Entries()).put(iteration, number, flags)

    def now(self, layer: str) -> LayerFacts:
        entries = self._layers.get(layer)
        return _UNKNOWN if entries is None or not entries.since else self._facts[entries.facts[-1]]

    def _met(self, entries: _Entries, column: int) -> dict[GemmFact, bool]:
        seen: dict[GemmFact, bool] = {}
        for number, flags in entries.met.items():
            fact = self._facts[number][column]
            if fact is not None:
                seen[fact] = seen.get(fact, False) or bool(flags >> column & 1)
        return seen

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs in an iteration; raises IterationError if it has not run."""
        self._iterations.require("precision", iteration)

        def fields(entries: _Entries) -> Iterator[_Fields]:
            for span in self._spans(entries):
                since, until = span[4], span[5]
                if since <= iteration and (until is None or iteration <= until):
                    yield span

        return self._by_layer(fields)

    def spans(self) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs, one entry for each span of iterations; only the last :data:`MOST_SPANS` changes
        of a layer.
        """
        return self._by_layer(lambda entries: self._spans(entries, max(0, len(entries.since) - MOST_SPANS)))

    def whole(self) -> Iterator[GemmPrecision]:
        return self._by_layer(self._whole)

    def _by_layer(self, fields: Callable[[_Entries], Iterable[_Fields]]) -> Iterator[GemmPrecision]:
        """Apply a function to all layers. Most of thousands have the same entries, so each result is computed once."""
        known: dict[object, list[_Fields]] = {}
        for layer, entries in self._layers.items():
            key = entries.key
            if key not in known:
                known[key] = list(fields(entries))
            for values in known[key]:
                yield GemmPrecision(layer, *values)

    def _spans(self, entries: _Entries, first: int = 0) -> Iterator[_Fields]:
        since: list[int | None] = [*entries.since, None]
        for column, gemm in enumerate(GEMMS):
            begin = first
            for fact, alike in itertools.groupby(self._facts[number][column] for number in entries.facts[first:]):
                end = begin + len(list(alike))
                begun, after, flags = since[begin], since[end], entries.flags[begin:end]
                begin = end
                if fact is None or begun is None:
                    continue
                operands, recipe = _joined([fact])
                seen = any(bits >> column & 1 for bits in flags)
                until = None if after is None else after - 1
                yield gemm, operands, seen, fact.not_run, begun, until, recipe, _is_excluded(flags, recipe)

    def _whole(self, entries: _Entries) -> Iterator[_Fields]:
        for column, gemm in enumerate(GEMMS):
            facts = self._met(entries, column)
            ran = [fact for fact in facts if fact.operands]
            if not facts:
                continue
            entry = zip(entries.since, entries.facts, strict=True)
            since = next((since for since, number in entry if self._facts[number][column] is not None), 0)
            if ran:
                operands, recipe = _joined(ran)
                seen = all(facts[fact] for fact in ran)
                yield gemm, operands, seen, "", since, None, recipe, _is_excluded(entries.flags, recipe)
            else:
                reasons = [fact.not_run for fact in facts if fact.is_left_out]
                yield gemm, {}, False, reasons[-1] if reasons else NO_BACKWARD, since, None, "", False


def _joined(facts: Iterable[GemmFact]) -> tuple[dict[str, str], str]:
    """The formats of each operand, and the recipes, joined by arrows in the order of their first iteration."""
    formats: dict[str, dict[Format, None]] = {}
    for tensor, made_formats in (operand for fact in facts for operand in fact.operands):
        formats.setdefault(tensor, {}).update(dict.fromkeys(made_formats))
    texts = {tensor: _arrow(made.text for made in made_formats) for tensor, made_formats in formats.items()}
    return texts, _arrow(made.recipe or HIGH_PRECISION for made_formats in formats.values() for made in made_formats)


def _arrow(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))


def _is_excluded(flags: bytes | bytearray, recipe: str) -> bool:
    return recipe == HIGH_PRECISION and any(bits & _EXCLUDED for bits in flags)
