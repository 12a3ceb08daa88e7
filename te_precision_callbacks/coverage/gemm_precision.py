"""The observed precision of each GEMM of a run, by iteration.

A run may change precision in every step; to save memory, changes share equal facts across layers.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.spans import AnyIteration, Iterations

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
        seen: whether the formats were read from the tensors passed to the GEMM; False if it has not run.
        not_run: the reason if the GEMM has not run in training: :data:`FROZEN`, :data:`NO_INPUT_GRADIENT`,
            :data:`NO_GRADIENT` or :data:`NO_BACKWARD`; else empty.
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


def format_operands(operands: Mapping[str, str]) -> str:
    """Format both operands, as ``FP8 E5M2 * E4M3``; equal formats once, an operand with several ones in brackets."""
    return _format_formats(tuple(operands.values()))


@functools.cache
def _format_formats(formats: tuple[str, ...]) -> str:
    if len(set(formats)) == 1:
        return formats[0]
    texts = list(formats)
    for place, text in enumerate(formats):
        if "->" in text:
            texts[place] = f"({text})"
    joined = " * ".join(texts)
    kind = formats[0].partition(" ")[0]
    if all(text.startswith(f"{kind} ") for text in texts):
        return joined.replace(f"* {kind} ", "* ")
    return joined


class Precision(AnyIteration[GemmPrecision]):
    """The observed precision of each GEMM of a run; calling the object returns the precision in one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # the formats in iteration 120, with first and last iteration

    A layer without a forward in the iteration keeps its previous precision; so do the GEMMs of the backward in an
    iteration without one, such as a skipped batch.
    """


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


LayerFacts = tuple[GemmFact | None, ...]

_UNKNOWN: LayerFacts = (None,) * len(GEMMS)


class _Change(NamedTuple):
    """The facts of a layer from an iteration on; ``excluded``: a forward was inside ``te.autocast(enabled=False)``."""

    since: int
    facts: LayerFacts
    excluded: bool


class _Span(NamedTuple):
    """A fact about a GEMM, with the first and the last iteration (None while it holds)."""

    gemm: GemmName
    fact: GemmFact
    excluded: bool
    since: int
    until: int | None


class PrecisionHistory:
    """The precision of every GEMM in each iteration, kept as changes.

    Attributes:
        iterations: the iterations that have run.
        changes: number of changes so far.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.iterations = iterations
        self._layers: dict[str, list[_Change]] = {}
        self._facts: dict[LayerFacts, LayerFacts] = {}  # each once, for all layers and iterations
        self.changes = 0

    @property
    def has_changed(self) -> bool:
        return any(len(changes) > 1 for changes in self._layers.values())

    def ran(self, iteration: int) -> None:
        if self.iterations.ran(iteration):
            for layer, changes in self._layers.items():
                self._layers[layer] = [change for change in changes if change.since < iteration]

    def put(self, layer: str, iteration: int, facts: Mapping[GemmName, GemmFact], *, excluded: bool) -> None:
        """Record facts about some GEMMs of a layer from the last iteration on; facts about its other GEMMs continue.

        ``excluded``: a forward ran inside ``te.autocast(enabled=False)``.
        """
        before = self.last_facts(layer)
        after = tuple(map(facts.get, GEMMS, before))
        after = self._facts.setdefault(after, after)
        self.changes += after != before
        changes = self._layers.setdefault(layer, [])
        if changes and changes[-1].facts == after:
            iteration, _, excluded_before = changes.pop()
            excluded |= excluded_before
        elif changes and changes[-1].since == iteration:
            changes.pop()
        changes.append(_Change(iteration, after, excluded))

    def last_facts(self, layer: str) -> LayerFacts:
        changes = self._layers.get(layer)
        if changes:
            return changes[-1].facts
        return _UNKNOWN

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs in an iteration; raises IterationError if it has not run."""
        self.iterations.require("precision", iteration)

        def here(changes: Sequence[_Change]) -> Iterator[Sequence[_Span]]:
            for span in _spans(changes):
                if span.since <= iteration and (span.until is None or iteration <= span.until):
                    yield (span,)

        return self._by_layer(here)

    def spans(self) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs, one entry for each span of iterations; only the last :data:`MOST_SPANS` changes
        of a layer.
        """
        return self._by_layer(lambda changes: ((span,) for span in _spans(changes[-MOST_SPANS:])))

    def whole_run(self) -> Iterator[GemmPrecision]:

        def by_gemm(changes: Sequence[_Change]) -> Iterator[Sequence[_Span]]:
            for _, spans in itertools.groupby(_spans(changes), key=lambda span: span.gemm):
                yield tuple(spans)

        return self._by_layer(by_gemm)

    def _by_layer(self, grouped: Callable[[Sequence[_Change]], Iterable[Sequence[_Span]]]) -> Iterator[GemmPrecision]:
        """Yield an entry for each group of spans. Layers with the same changes, often thousands, are grouped once."""
        known: dict[object, list[_Fields]] = {}
        for layer, changes in self._layers.items():
            key = tuple((since, id(facts), excluded) for since, facts, excluded in changes)
            if key not in known:
                known[key] = list(map(_merge_spans, grouped(changes)))
            for fields in known[key]:
                yield GemmPrecision(layer, *fields)


def _spans(changes: Sequence[_Change]) -> Iterator[_Span]:
    for column, gemm in enumerate(GEMMS):
        begin = 0
        for fact, alike in itertools.groupby(change.facts[column] for change in changes):
            end = begin + len(list(alike))
            excluded = any(change.excluded for change in changes[begin:end])
            until = None
            if end < len(changes):
                until = changes[end].since - 1
            if fact is not None:
                yield _Span(gemm, fact, excluded, changes[begin].since, until)
            begin = end


_Fields = tuple[GemmName, Mapping[str, str], bool, str, int, int | None, str, bool]


def _merge_spans(spans: Sequence[_Span]) -> _Fields:
    """Merge the facts about one GEMM: all of its formats, or else its last reason for not running."""
    ran: dict[GemmFact, None] = {}
    not_run = NO_BACKWARD
    excluded = False
    for span in spans:
        excluded |= span.excluded
        if span.fact.operands:
            ran[span.fact] = None
        elif span.fact.is_left_out:
            not_run = span.fact.not_run
    if ran:
        not_run = ""
    operands, recipe = _join_facts(ran)
    in_one_span = len(spans) == 1 and HIGH_PRECISION in recipe.split(" -> ")  # of some of its micro-batches
    excluded &= recipe == HIGH_PRECISION or in_one_span
    return spans[0].gemm, operands, bool(ran), not_run, spans[0].since, spans[-1].until, recipe, excluded


def _join_facts(facts: Iterable[GemmFact]) -> tuple[dict[str, str], str]:
    """The formats of each operand, and the recipes, joined by arrows in the order of their first iteration."""
    texts: dict[str, list[str]] = defaultdict(list)
    recipes: dict[str, list[str]] = defaultdict(list)
    for fact in facts:
        for tensor, formats in fact.operands:
            for text, recipe in formats:
                texts[tensor].append(text)
                recipes[tensor].append(recipe or HIGH_PRECISION)
    joined = {tensor: join_with_arrows(alike) for tensor, alike in texts.items()}
    return joined, join_with_arrows(itertools.chain.from_iterable(recipes.values()))


def join_with_arrows(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))
