"""The facts about a layer's GEMMs, by iteration.

A layer has a row of entries, each with the iteration since which its facts hold, up to the next one's. Runs are long
and may change precision in every step, so that an entry is a few numbers: facts are kept once and referred to.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from te_precision_callbacks.base.spans import Iterations
from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION, GemmPrecision

_EXCLUDED = 1 << len(GEMMS)

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
    for a forward in a region of ``te.autocast(enabled=False)``."""

    def __init__(self) -> None:
        self.since, self.facts, self.seen = array("q"), array("q"), bytearray()

    def put(self, iteration: int, facts: int, seen: int) -> None:
        """Let facts hold from an iteration on; an entry of the same iteration is replaced."""
        if self.since and self.since[-1] == iteration:
            self.facts[-1], self.seen[-1] = facts, seen | (self.seen[-1] if facts == self.facts[-1] else 0)
        elif self.since and self.facts[-1] == facts:
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

    def now(self, layer: str) -> LayerFacts:
        """The facts of a layer that hold in the last iteration."""
        entries = self._layers.get(layer)
        return (None,) * len(GEMMS) if entries is None or not entries.since else self._facts[entries.facts[-1]]

    def __iter__(self) -> Iterator[GemmPrecision]:
        """All formats that each GEMM had during the run."""
        return self._of_layers(self._whole_run)

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """What is known of all GEMMs in an iteration, in the order in which layers came.

        Raises:
            IterationError: it has not run.
        """
        self._iterations.require("precision", iteration)

        def told(entries: _Entries) -> Iterator[_Told]:
            for one in self._spans(entries):
                since, until = one[4:6]
                if since <= iteration and (until is None or iteration <= until):
                    yield one

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
        return self._of_layers(lambda entries: self._spans(entries, max(0, len(entries.since) - MOST_SPANS)))

    def _spans(self, entries: _Entries, first: int = 0) -> Iterator[_Told]:
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

    def _whole_run(self, entries: _Entries) -> Iterator[_Told]:
        entries_that_differ = dict.fromkeys(zip(entries.facts, entries.seen, strict=True))
        for column, gemm in enumerate(GEMMS):
            facts = [(self._facts[number][column], bits >> column & 1) for number, bits in entries_that_differ]
            known = [(fact, seen) for fact, seen in facts if fact is not None]
            if not known:
                continue
            since = next(
                since
                for since, number in zip(entries.since, entries.facts, strict=True)
                if self._facts[number][column] is not None
            )
            formats: dict[str, dict[Format, bool]] = {}
            for fact, seen in known:
                for tensor, found in fact.operands:
                    of_tensor = formats.setdefault(tensor, {})
                    for each in found:
                        of_tensor[each] = of_tensor.get(each, False) or bool(seen)
            operands, recipe = joined(formats.items())
            not_run = "" if formats else known[-1][0].not_run
            are_seen = bool(formats) and all(all(found.values()) for found in formats.values())
            yield gemm, operands, are_seen, not_run, since, None, recipe, _is_excluded(entries.seen, recipe)

    def _number(self, before: LayerFacts, facts: Mapping[GemmName, GemmFact]) -> int:
        """The number of the facts of a layer, where some of them are new."""
        found = tuple(facts.get(gemm, fact) for gemm, fact in zip(GEMMS, before, strict=True))
        number = self._numbers.get(found)
        if number is None:
            number = len(self._facts)
            self._facts.append(found)
            self._numbers[found] = number
        return number
