"""The operands of each layer's GEMMs, by iteration.

A run may be long and change precision in every step, so an entry of a layer is a few numbers that refer to facts, which
are shared.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from te_precision_callbacks.base.spans import Iterations
from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION, NO_BACKWARD, GemmPrecision

_DOUBT = 1 << len(GEMMS)
_EXCLUDED = _DOUBT << 1

MOST_SPANS = 64
"""The most changes of a layer that :meth:`PrecisionHistory.spans` returns."""


class Format(NamedTuple):
    """The format of a GEMM operand, and the recipe of its layer; an empty recipe means high precision."""

    text: str
    recipe: str = ""


class GemmFact(NamedTuple):
    """The operands of a GEMM in an iteration, each with its formats; or the reason why the GEMM did not run."""

    operands: tuple[tuple[str, tuple[Format, ...]], ...] = ()
    not_run: str = ""

    @property
    def is_left_out(self) -> bool:
        """Whether the backward skips the GEMM. A missing backward skips nothing."""
        return self.not_run not in ("", NO_BACKWARD)


_Fields = tuple[GemmName, Mapping[str, str], bool, str, int, int | None, str, bool]
"""The fields of :class:`GemmPrecision` after the layer."""

LayerFacts = tuple[GemmFact | None, ...]
"""One fact for each of :data:`GEMMS`; None if nothing is known of the GEMM."""

_UNKNOWN: LayerFacts = (None,) * len(GEMMS)


class _Entries:
    """The entries of one layer: first iteration, number of its facts, and flags.

    A flag is set for each GEMM whose operands were seen, for a doubt, and for a forward inside
    ``te.autocast(enabled=False)``.

    Attributes:
        met: all numbers of facts in the order of their first iteration, with the union of their flags.
    """

    def __init__(self) -> None:
        self.since, self.facts, self.flags = array("q"), array("q"), bytearray()
        self.met: dict[int, int] = {}

    def put(self, iteration: int, facts: int, flags: int) -> None:
        """Add facts that hold from an iteration on; replaces an entry of the same iteration."""
        if not flags & _DOUBT:
            self.met[facts] = self.met.get(facts, 0) | flags
        if self.since and self.since[-1] == iteration:
            self.facts[-1], self.flags[-1] = facts, flags | (self.flags[-1] if facts == self.facts[-1] else 0)
        elif self.since and self.facts[-1] == facts and not (self.flags[-1] | flags) & _DOUBT:
            self.flags[-1] |= flags
        else:
            try:
                self.since.append(iteration)
                self.facts.append(facts)
                self.flags.append(flags)
            except BaseException:  # a complete entry, or none
                self.cut(iteration)
                raise

    @property
    def key(self) -> tuple[bytes, bytes, bytes, tuple[int, ...]]:
        """Equal for layers with equal entries."""
        return self.since.tobytes(), self.facts.tobytes(), bytes(self.flags), tuple(self.met.values())

    def cut(self, iteration: int) -> None:
        """Remove the entries of an iteration and of later ones."""
        number = bisect_left(self.since, iteration)
        del self.since[number:], self.facts[number:], self.flags[number:]


class PrecisionHistory:
    """The facts about all layers, by iteration.

    Attributes:
        changes: how often the facts about a layer changed.
    """

    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations
        self._layers: dict[str, _Entries] = {}
        self._facts: list[LayerFacts] = []
        self._numbers: dict[LayerFacts, int] = {}
        self.changes = 0

    @property
    def has_changed(self) -> bool:
        """Whether the facts about a layer changed after their first iteration."""
        return any(len(entries.since) > 1 for entries in self._layers.values())

    @property
    def last(self) -> int | None:
        """The last iteration that ran; None if none ran."""
        return self._iterations.last

    def ran(self, iteration: int) -> None:
        """Record that an iteration ran. Drops later iterations, which ran before a return to a checkpoint."""
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
        """Record facts about some GEMMs of a layer from an iteration on; facts about its other GEMMs continue.

        Args:
            layer: the layer.
            iteration: the last iteration that ran.
            facts: GEMM -> its operands.
            seen: the GEMMs whose operands were seen.
            excluded: whether the forward ran inside ``te.autocast(enabled=False)``.
        """
        flags = sum(1 << GEMMS.index(gemm) for gemm in seen) | (_EXCLUDED if excluded else 0)
        before = self.now(layer)
        after = tuple(facts.get(gemm, fact) for gemm, fact in zip(GEMMS, before, strict=True))
        number = self._numbers.setdefault(after, len(self._facts))
        if number == len(self._facts):
            self._facts.append(after)
        self.changes += after != before
        self._layers.setdefault(layer, _Entries()).put(iteration, number, flags)

    def doubt(self, layer: str, iteration: int, *, excluded: bool) -> None:
        """Mark an iteration in which the layer may have had other facts than before."""
        entries = self._layers.get(layer)
        if entries is not None and entries.since:
            entries.put(iteration, entries.facts[-1], _DOUBT | (_EXCLUDED if excluded else 0))

    def settle(self, layer: str, iteration: int) -> None:
        """Replace the facts of a doubtful iteration by those of the last one."""
        entries = self._layers.get(layer)
        number = -1 if entries is None else bisect_right(entries.since, iteration) - 1
        if entries is not None and number >= 0 and entries.flags[number] & _DOUBT:
            entries.facts[number], entries.flags[number] = entries.facts[-1], entries.flags[number] & _EXCLUDED

    def now(self, layer: str) -> LayerFacts:
        """The facts about a layer in the last iteration."""
        entries = self._layers.get(layer)
        return _UNKNOWN if entries is None or not entries.since else self._facts[entries.facts[-1]]

    def met(self, layer: str, gemm: GemmName) -> list[GemmFact]:
        """All facts about a GEMM so far, in the order of their first iteration."""
        entries = self._layers.get(layer)
        return [] if entries is None else list(self._met(entries, GEMMS.index(gemm)))

    def _met(self, entries: _Entries, column: int) -> dict[GemmFact, bool]:
        """Fact about a GEMM -> whether its operands were seen."""
        found: dict[GemmFact, bool] = {}
        for number, flags in entries.met.items():
            fact = self._facts[number][column]
            if fact is not None:
                found[fact] = found.get(fact, False) or bool(flags >> column & 1)
        return found

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs in an iteration, in the order of their layers.

        Raises:
            IterationError: the iteration has not run.
        """
        self._iterations.require("precision", iteration)

        def fields(entries: _Entries) -> Iterator[_Fields]:
            number = bisect_right(entries.since, iteration) - 1
            in_doubt = number >= 0 and bool(entries.flags[number] & _DOUBT)
            for span in self._spans(entries):
                since, until = span[4], span[5]
                if since <= iteration and (until is None or iteration <= until):
                    yield (span[0], span[1], span[2] and not in_doubt, *span[3:])

        return self._by_layer(fields)

    def spans(self) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs, one entry for each span of iterations, in the order of layers and GEMMs.

        Only the last :data:`MOST_SPANS` changes of a layer are included.
        """
        return self._by_layer(lambda entries: self._spans(entries, max(0, len(entries.since) - MOST_SPANS)))

    def whole(self) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs over the run, with all formats that an operand had."""
        return self._by_layer(self._whole)

    def _by_layer(self, fields: Callable[[_Entries], Iterable[_Fields]]) -> Iterator[GemmPrecision]:
        """Apply a function to all layers. Most of thousands have the same entries, so each result is computed once."""
        known: dict[object, list[_Fields]] = {}
        for layer, entries in self._layers.items():
            key = entries.key
            if key not in known:
                known[key] = list(fields(entries))
            for one in known[key]:
                yield GemmPrecision(layer, *one)

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
        in_doubt = any(flags & _DOUBT for flags in entries.flags)
        for column, gemm in enumerate(GEMMS):
            facts = self._met(entries, column)
            ran = [fact for fact in facts if fact.operands]
            if not facts:
                continue
            entry = zip(entries.since, entries.facts, strict=True)
            since = next((since for since, number in entry if self._facts[number][column] is not None), 0)
            if ran:
                operands, recipe = _joined(ran)
                seen = all(facts[fact] for fact in ran) and not in_doubt
                yield gemm, operands, seen, "", since, None, recipe, _is_excluded(entries.flags, recipe)
            else:
                reasons = [fact.not_run for fact in facts if fact.is_left_out]
                yield gemm, {}, False, reasons[-1] if reasons else NO_BACKWARD, since, None, "", False


def _joined(facts: Iterable[GemmFact]) -> tuple[dict[str, str], str]:
    """The formats of each operand, and the recipes, each joined by arrows in the order of their first iteration."""
    formats: dict[str, dict[Format, None]] = {}
    for tensor, found in (operand for fact in facts for operand in fact.operands):
        formats.setdefault(tensor, {}).update(dict.fromkeys(found))
    texts = {tensor: _arrow(made.text for made in found) for tensor, found in formats.items()}
    return texts, _arrow(made.recipe or HIGH_PRECISION for found in formats.values() for made in found)


def _arrow(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))


def _is_excluded(flags: bytes | bytearray, recipe: str) -> bool:
    """Whether a forward in high precision ran inside ``te.autocast(enabled=False)``."""
    return recipe == HIGH_PRECISION and any(bits & _EXCLUDED for bits in flags)
