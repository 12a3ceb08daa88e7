"""The observed precision of each GEMM of a run, by iteration.

A run may change precision in every step; to save memory, changes share equal facts.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.spans import Iterations

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
    for index, text in enumerate(formats):
        if "->" in text:
            texts[index] = f"({text})"
    joined = " * ".join(texts)
    kind = formats[0].partition(" ")[0]
    if all(text.startswith(f"{kind} ") for text in texts):
        return joined.replace(f"* {kind} ", "* ")
    return joined


class Precision(tuple[GemmPrecision, ...]):
    """The observed precision of each GEMM of a run; calling the object returns the precision in one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # the formats in iteration 120, with first and last iteration

    A layer without a forward in the iteration keeps its previous precision; so do the GEMMs of the backward in an
    iteration without one, such as a skipped batch.
    """

    _at: Callable[[int], Iterable[GemmPrecision]]

    def __new__(cls, gemms: Iterable[GemmPrecision], at: Callable[[int], Iterable[GemmPrecision]]) -> Precision:
        precision = super().__new__(cls, gemms)
        precision._at = at
        return precision

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self._at

    def __call__(self, *, at: int) -> tuple[GemmPrecision, ...]:
        """Return the precision in a debug iteration; raises IterationError if it has not run in this session."""
        return tuple(self._at(at))


class Format(NamedTuple):
    text: str
    recipe: str = ""


class GemmFact(NamedTuple):
    """The operands of a GEMM in an iteration, each with its formats; or the reason why the GEMM did not run.

    ``excluded``: a forward ran inside ``te.autocast(enabled=False)``.
    """

    operands: tuple[tuple[str, tuple[Format, ...]], ...] = ()
    not_run: str = ""
    excluded: bool = False


class _Change(NamedTuple):
    """A fact about a GEMM from an iteration on."""

    since: int
    fact: GemmFact


class PrecisionHistory:
    """The precision of every GEMM in each iteration, kept as changes.

    Attributes:
        iterations: the iterations that have run.
        changes: number of changes so far.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.iterations = iterations
        self.changes = 0
        self._gemms: dict[tuple[str, GemmName], list[_Change]] = {}
        self._facts: dict[GemmFact, GemmFact] = {}  # each once, for all layers and iterations

    @property
    def has_changed(self) -> bool:
        return any(len(changes) > 1 for changes in self._gemms.values())

    def ran(self, iteration: int) -> None:
        if self.iterations.ran(iteration):
            for changes in self._gemms.values():
                changes[:] = [change for change in changes if change.since < iteration]

    def put(self, layer: str, gemm: GemmName, iteration: int, fact: GemmFact) -> None:
        """Record a fact about a GEMM from the last iteration on."""
        for name in GEMMS:
            self._gemms.setdefault((layer, name), [])
        changes = self._gemms[layer, gemm]
        self.changes += not changes or changes[-1].fact != fact
        if changes and changes[-1].since == iteration:
            changes.pop()
        if not changes or changes[-1].fact != fact:
            changes.append(_Change(iteration, self._facts.setdefault(fact, fact)))

    def last_fact(self, layer: str, gemm: GemmName) -> GemmFact:
        changes = self._gemms.get((layer, gemm))
        if not changes:
            return GemmFact()
        return changes[-1].fact

    def at(self, iteration: int) -> Iterator[GemmPrecision]:
        """The precision of all GEMMs in an iteration; raises IterationError if it has not run."""
        self.iterations.require("precision", iteration)
        for (layer, gemm), changes in self._gemms.items():
            number = bisect_right(changes, iteration, key=lambda change: change.since)
            if number:
                until = None
                if number < len(changes):
                    until = changes[number].since - 1
                yield replace(_merge((changes[number - 1],)), layer=layer, gemm=gemm, until=until)

    def whole_run(self) -> Iterator[GemmPrecision]:
        for (layer, gemm), changes in self._gemms.items():
            if changes:
                yield replace(_merge(tuple(changes)), layer=layer, gemm=gemm)


@functools.lru_cache(256)
def _merge(changes: tuple[_Change, ...]) -> GemmPrecision:
    """Merge the facts about one GEMM: all of its formats, or else its last reason for not running; without its name."""
    ran = dict.fromkeys(change.fact for change in changes if change.fact.operands)
    reasons = [change.fact.not_run for change in changes if change.fact.not_run not in ("", NO_BACKWARD)]
    texts: dict[str, list[str]] = defaultdict(list)
    recipes = []
    for fact in ran:
        for tensor, formats in fact.operands:
            texts[tensor] += [text for text, _ in formats]
            recipes += [recipe or HIGH_PRECISION for _, recipe in formats]
    recipe = join_with_arrows(recipes)
    in_one_span = len(changes) == 1 and HIGH_PRECISION in recipes  # of some of its micro-batches
    return GemmPrecision(
        "",
        "fprop",
        {tensor: join_with_arrows(tensor_texts) for tensor, tensor_texts in texts.items()},
        bool(ran),
        "" if ran else [NO_BACKWARD, *reasons][-1],
        changes[0].since,
        recipe=recipe,
        excluded=any(change.fact.excluded for change in changes) and (recipe == HIGH_PRECISION or in_one_span),
    )


def join_with_arrows(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))
