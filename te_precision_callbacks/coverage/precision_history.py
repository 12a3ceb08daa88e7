"""The facts about a layer's GEMMs, by iteration.

A layer has a row of entries, each with the iteration since which its facts hold, up to the next one's. Runs are long
and may change precision in every step, so that an entry is a few numbers: facts are kept once and referred to.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from te_precision_callbacks.base.spans import Iterations
from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION, GemmPrecision

_DOUBT = 1 << len(GEMMS)
_EXCLUDED = _DOUBT << 1

MOST_SPANS = 64
"""The most changes of a layer that :meth:`PrecisionHistory.spans` gives."""


class Format(NamedTuple):
    """The format of a GEMM's operand, and the recipe under which its layer ran; no recipe in high precision."""

    text: str
    recipe: str = ""


class GemmFact(NamedTuple):
    """The operands of a GEMM in an iteration: tensors and the formats of each, or why the GEMM did not run."""

    operands: tuple[tuple[str, tuple[Format, ...]], ...] = ()
    not_run: str = ""


def joined(operands: Iterable[tuple[str, Iterable[Format]]]) -> tuple[dict[str, str], str]:
    """The formats of each operand, and the recipes of all, each joined by an arrow in the order of their coming."""
    all_formats = {tensor: tuple(formats) for tensor, formats in operands}
    texts = {tensor: _arrow(made.text for made in formats) for tensor, formats in all_formats.items()}
    return texts, _arrow(made.recipe or HIGH_PRECISION for formats in all_formats.values() for made in formats)


def _arrow(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))


def _is_excluded(seen: bytes | bytearray, recipe: str) -> bool:
    """Whether a forward of entries in high precision ran in a region of ``te.autocast(enabled=False)``."""
    return recipe == HIGH_PRECISION and any(bits & _EXCLUDED for bits in seen)


_Told = tuple[GemmName, Mapping[str, str], bool, str, int, int | None, str, bool]
"""What is known of a GEMM of a layer: the fields of :class:`GemmPrecision` after the layer."""

LayerFacts = tuple[GemmFact | None, ...]
"""A fact for each of :data:`GEMMS`; None of a GEMM that nothing is known of."""


class _Entries:
    """Those of one layer: of each the first iteration, the number of its facts, and which GEMMs were seen; with a bit
    for a doubt, and one for a forward in a region of ``te.autocast(enabled=False)``."""

    def __init__(self) -> None:
        self.since, self.facts, self.seen = array("q"), array("q"), bytearray()

    def put(self, iteration: int, facts: int, seen: int) -> None:
        """Let facts hold from an iteration on; an entry of the same iteration is replaced."""
        if self.since and self.since[-1] == iteration:
            self.facts[-1], self.seen[-1] = facts, seen | (self.seen[-1] if facts == self.facts[-1] else 0)
        elif self.since and self.facts[-1] == facts and not (self.seen[-1] | seen) & _DOUBT:
            self.seen[-1] |= seen
        else:
            try:
                self.since.append(iteration)
                self.facts.append(facts)
                self.seen.append(seen)
            except BaseException:  # a whole entry, or none
                self.cut(iteration)
                raise

    @property
    def history(self) -> tuple[bytes, bytes, bytes]:
        """Equal for layers with equal entries."""
        return self.since.tobytes(), self.facts.tobytes(), bytes(self.seen)

    def cut(self, iteration: int) -> None:
        number = bisect_left(self.since, iteration)
        del self.since[number:], self.facts[number:], self.seen[number:]


class PrecisionHistory:
    """The facts of all layers over a run's iterations.

    Attributes:
        changes: how often the facts of a layer became others.
    """

    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations
        self._layers: dict[str, _Entries] = {}
        self._facts: list[LayerFacts] = []
        self._numbers: dict[LayerFacts, int] = {}
        self.changes = 0

    @property
    def has_changed(self) -> bool:
        """Whether the facts of a layer have become others in a later iteration."""
        return any(len(entries.since) > 1 for entries in self._layers.values())

    @property
    def last(self) -> int | None:
        """The last iteration that has run; None if none has."""
        return self._iterations.last

    def ran(self, iteration: int) -> None:
        """Note that an iteration has run; what is known of later ones, which ran before a return to a checkpoint, is
        dropped."""
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
        """Let facts of some of a layer's GEMMs hold from an iteration on; those of the others go on.

        Args:
            layer: its name.
            iteration: the last one that has run.
            facts: GEMM -> what it computed with in the iteration.
            seen: the GEMMs whose operands were seen in it.
            excluded: whether the layer's forward ran in a region of ``te.autocast(enabled=False)``.
        """
        bits = sum(1 << GEMMS.index(gemm) for gemm in seen) | (_EXCLUDED if excluded else 0)
        before = self.now(layer)
        number = self._number(before, facts)
        self.changes += self._facts[number] != before
        self._layers.setdefault(layer, _Entries()).put(iteration, number, bits)

    def doubt(self, layer: str, iteration: int, *, excluded: bool) -> None:
        """Note that facts other than the previous ones may hold in an iteration, even if only in that one."""
        entries = self._layers.get(layer)
        if entries is not None and entries.since:
            entries.put(iteration, entries.facts[-1], _DOUBT | (_EXCLUDED if excluded else 0))

    def settle(self, layer: str, iteration: int) -> None:
        """Let the facts of the last iteration also hold in a doubtful iteration."""
        entries = self._layers.get(layer)
        number = -1 if entries is None else bisect_right(entries.since, iteration) - 1
        if entries is not None and number >= 0 and entries.seen[number] & _DOUBT:
            entries.facts[number], entries.seen[number] = entries.facts[-1], entries.seen[number] & _EXCLUDED

    def now(self, layer: str) -> LayerFacts:
        """The facts of a layer that hold in the last iteration."""
        entries = self._layers.get(layer)
        return (None,) * len(GEMMS) if entries is None or not entries.since else self._facts[entries.facts[-1]]

    def since(self, layer: str, gemm: GemmName) -> int:
        """The first iteration of which something is known of a GEMM."""
        entries, column = self._layers.get(layer), GEMMS.index(gemm)
        for since, number in () if entries is None else zip(entries.since, entries.facts, strict=True):
            if self._facts[number][column] is not None:
                return since
        return 0

    def is_excluded(self, layer: str, recipe: str) -> bool:
        """Whether a layer that has only run under this recipe, or none, did so in ``te.autocast(enabled=False)``."""
        entries = self._layers.get(layer)
        return entries is not None and _is_excluded(entries.seen, recipe)

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """What is known of all GEMMs in an iteration, in the order in which layers came.

        Raises:
            IterationError: it has not run.
        """
        self._iterations.require("precision", iteration)

        def told(entries: _Entries) -> Iterator[_Told]:
            number = bisect_right(entries.since, iteration) - 1
            if number >= 0:
                yield from (entry for gemm in GEMMS for entry in self._entry(gemm, entries, number))

        return self._of_layers(told)

    def _of_layers(self, told: Callable[[_Entries], Iterable[_Told]]) -> Iterator[GemmPrecision]:
        """What is known of all layers. Most of thousands have the same history, which is read once."""
        known: dict[tuple[bytes, bytes, bytes], list[_Told]] = {}
        for layer, entries in self._layers.items():
            history = entries.history
            found = known.get(history)
            if found is None:
                found = known[history] = list(told(entries))
            for one in found:
                yield GemmPrecision(layer, *one)

    def spans(self) -> Iterator[GemmPrecision]:
        """What is known of all GEMMs, by layer and GEMM, each as often as it was another; of a layer that has changed
        more often than :data:`MOST_SPANS` times, only the last changes."""
        return self._of_layers(self._spans)

    def _spans(self, entries: _Entries) -> Iterator[_Told]:
        first = max(0, len(entries.since) - MOST_SPANS)
        since = [*entries.since[first:], None]
        of_layer = [self._facts[number] for number in entries.facts[first:]]
        for column, gemm in enumerate(GEMMS):
            facts = [fact[column] for fact in of_layer]
            begins = [place for place, fact in enumerate(facts) if not place or fact != facts[place - 1]]
            for begin, end in zip(begins, [*begins[1:], len(facts)], strict=True):
                fact, begun, after = facts[begin], since[begin], since[end]
                if fact is None or begun is None:
                    continue
                found = entries.seen[first + begin : first + end]
                seen = any(bits >> column & 1 for bits in found)
                operands, recipe = joined(fact.operands)
                until = None if after is None else after - 1
                yield gemm, operands, seen, fact.not_run, begun, until, recipe, _is_excluded(found, recipe)

    def _entry(self, gemm: GemmName, entries: _Entries, number: int) -> Iterator[_Told]:
        column = GEMMS.index(gemm)
        facts = [self._facts[of_layer][column] for of_layer in entries.facts]
        fact = facts[number]
        if fact is None:
            return
        first, after = number, number + 1
        while first and facts[first - 1] == fact:
            first -= 1
        while after < len(facts) and facts[after] == fact:
            after += 1
        found = entries.seen[first:after]
        seen = any(bits >> column & 1 for bits in found) and not entries.seen[number] & _DOUBT
        until = entries.since[after] - 1 if after < len(facts) else None
        operands, recipe = joined(fact.operands)
        excluded = _is_excluded(found, recipe)
        yield gemm, operands, seen, fact.not_run, entries.since[first], until, recipe, excluded

    def _number(self, before: LayerFacts, facts: Mapping[GemmName, GemmFact]) -> int:
        """The number of the facts of a layer, where some of them are new."""
        found = tuple(facts.get(gemm, fact) for gemm, fact in zip(GEMMS, before, strict=True))
        number = self._numbers.get(found)
        if number is None:
            number = len(self._facts)
            self._facts.append(found)
            self._numbers[found] = number
        return number
