"""The matrix products of a run's model by step: the products of its calls, in the precision of the step."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import LOW_PRECISION
from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import (
    ESTIMATED,
    EXCLUDED,
    NOT_OBSERVED,
    Coverage,
    Product,
    ProductName,
    Reason,
    StateRow,
    precision_of,
)
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION, GemmPrecision
from te_precision_callbacks.coverage.micro_batches import Kind, Parts
from te_precision_callbacks.coverage.other_steps import ProductSpan
from te_precision_callbacks.coverage.products import CountedKinds, CountedStep
from te_precision_callbacks.statistics.schedule import Schedule, any_due

_OVERRIDE = "NVTE_BACKWARD_OVERRIDE"

MOST_SPANS = 64
"""The most parts of a run with different calls; the steps after them are one part, with their mean."""

_OF_TE = ("te", "te_ops")

MIXED = f"{ESTIMATED}micro-batches of one step differ in precision"


@dataclass(frozen=True)
class KeepingFeature:
    feature: str
    schedules: tuple[Schedule, ...]


@dataclass(frozen=True)
class HighPrecisionFacts:
    """Facts about a layer that explain high precision.

    Attributes:
        kept: GEMM -> the features that keep it in high precision.
        backward_override: the override of its recipe, or empty.
        recomputed_outside: whether a checkpoint recomputed its forward outside of its autocast.
    """

    kept: Mapping[str, tuple[KeepingFeature, ...]]
    backward_override: str = ""
    recomputed_outside: bool = False


@dataclass
class CountedSteps:
    """The products of consecutive steps with equal calls, and the facts about layers.

    Attributes:
        since, until: the first and the last step; ``until`` is None while the span is open.
        parts: kind -> the number of calls and backwards in a step; if steps differ, in all ``steps`` together.
        steps: the number of steps that ``parts`` sums up.
    """

    since: int
    kinds: CountedKinds
    parts: Parts
    layers: Mapping[str, HighPrecisionFacts]
    state: tuple[StateRow, ...]
    steps: int = 1
    until: int | None = None
    _products: tuple[tuple[int, int], tuple[Product, ...]] | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        version = self.kinds.changes, self.steps
        if self._products is None or self._products[0] != version:
            self._products = version, self.kinds.products(self.parts, self.steps)
        return self._products[1]

    @property
    def has_backward(self) -> bool:
        return any(backwards for _, backwards in self.parts.values())

    def add(self, parts: Parts) -> None:
        added = dict(self.parts)
        for key, (calls, backwards) in parts.items():
            before = self.parts.get(key, (0, 0))
            added[key] = before[0] + calls, before[1] + backwards
        self.parts = added
        self.steps += 1


class CoverageHistory:
    """The matrix products of each step, kept as changes: a step like the one before takes no memory.

    Attributes:
        other_ranks_products: products of pipeline stages on other ranks.
        changes: number of changes so far.
    """

    def __init__(self) -> None:
        self._counted: list[CountedSteps] = []
        self._met: set[tuple[int, frozenset[tuple[Kind, tuple[int, int]]]]] = set()
        self._kinds_changes = 0
        self.other_ranks_products: tuple[Product, ...] = ()
        self._unobserved: tuple[Product, ...] = ()
        self.changes = 0

    def put(
        self,
        iteration: int,
        step: CountedStep,
        facts: Callable[[], Mapping[str, HighPrecisionFacts]],
    ) -> None:
        """Record the calls of a step, which are valid until a step differs.

        A step without a backward, such as a skipped batch, is treated like the step before it; before the first
        backward, like the step after it.
        """
        while self._counted and self._counted[-1].since >= iteration:
            self._counted.pop()
        last = next(reversed(self._counted), None)
        now = CountedSteps(iteration, step.kinds, step.parts, {}, step.state or (), 1)
        if step.kinds.changes != self._kinds_changes and last is not None and last.kinds is step.kinds:
            self._kinds_changes = step.kinds.changes
            self.changes += 1  # earlier steps may have had calls of the newly counted kind
            last.layers = facts()
        if last is not None and last.kinds is step.kinds:
            if not now.has_backward and last.has_backward:
                return
            if now.has_backward and not last.has_backward:
                now.since = last.since
                now.state = step.state or last.state
                self._counted.pop()
            elif last.steps == 1 and last.parts == step.parts:
                return
            elif len(self._counted) >= MOST_SPANS:
                last.add(step.parts)
                self.changes += not last.steps & (last.steps - 1)  # at powers of two: a change rewrites the record
                return
            else:
                now.state = last.state
        if self._counted and self._counted[-1].kinds is now.kinds and self._counted[-1].products == now.products:
            return
        now.layers = facts()
        self._counted.append(now)
        met = id(step.kinds), frozenset(step.parts.items())
        self.changes += met not in self._met
        self._met.add(met)
        self._kinds_changes = step.kinds.changes

    def put_other_ranks(self, products: Iterable[Product]) -> None:
        own: set[str] = set()
        for counted in self._counted:
            own.update(product.layer for product in counted.products)
        self.other_ranks_products = tuple(product for product in products if product.layer not in own)

    def put_unobserved(self, layers: Mapping[str, str]) -> None:
        """Record the layers of Transformer Engine that ran without being observed, with the reasons."""
        products = (Product.uncounted(layer, "te", f"{NOT_OBSERVED}{why}") for layer, why in layers.items())
        self._unobserved = tuple(products)
        self.changes += 1

    def spans(self) -> list[CountedSteps]:
        for counted, following in itertools.pairwise(self._counted):
            counted.until = following.since - 1
        return list(self._counted)

    def by_span(self, precision: Iterable[GemmPrecision], unconverted: Mapping[str, str]) -> Iterator[ProductSpan]:
        """Yield each product once for each span of steps without a change of it.

        ``precision`` is ``PrecisionAudit.spans``; ``unconverted``: layer -> why the trainer's conversion to Transformer
        Engine skipped it.
        """
        spans: dict[tuple[str, ProductName], list[GemmPrecision]]
        spans = group_by_key(((entry.layer, entry.gemm), entry) for entry in precision)
        for counted in self.spans():
            left = dict(spans)
            for order, product in enumerate(counted.products):
                left.pop((product.layer, product.gemm), None)
                entries: Sequence[GemmPrecision] = ()
                if product.family in _OF_TE:
                    entries = spans.get((product.layer, product.gemm), ())
                yield from _split_by_precision(product, order, counted, entries, unconverted)
            for layer_entries in left.values():
                last = layer_entries[-1]
                if last.not_run:
                    left_out = Product.left_out(last.layer, "te", last.gemm, last.not_run)
                    yield ProductSpan(left_out, len(counted.products), last, last.since, last.until)
        for order, product in enumerate((*self.other_ranks_products, *self._unobserved)):
            yield ProductSpan(product, order, None, 0, None)

    def at(
        self, iteration: int, last: int, precision: Iterable[GemmPrecision], unconverted: Mapping[str, str]
    ) -> Coverage:
        """The products of an iteration; ``last`` is the run's last iteration, ``precision`` is as of ``iteration``."""
        if not self._counted:
            return Coverage(self._unobserved)
        number = max(0, bisect_right(self._counted, iteration, key=lambda counted: counted.since) - 1)
        counted = self._counted[number]
        products = apply_precision(counted.products, counted.layers, list(precision), unconverted)
        return Coverage((*products, *self._unobserved), state=counted.state, steps=self._steps(number, last))

    def _steps(self, number: int, last: int) -> str:
        if len(self._counted) < 2:
            return ""
        since = self._counted[number].since
        until = max(since, last)
        if number + 1 < len(self._counted):
            until = self._counted[number + 1].since - 1
        steps = f"steps {since} to {until}"
        if since == until:
            steps = f"step {since}"
        if self._counted[number].steps > 1:
            return f"the mean of {steps}"
        return steps


def _split_by_precision(
    product: Product,
    order: int,
    counted: CountedSteps,
    entries: Sequence[GemmPrecision],
    unconverted: Mapping[str, str],
) -> Iterator[ProductSpan]:
    facts = counted.layers.get(product.layer)
    if not entries:
        for part in _apply_precision(product, None, facts, unconverted):
            yield ProductSpan(part, order, None, counted.since, counted.until)
    for place, entry in enumerate(entries):
        since = entry.since
        until = entry.until
        if not place and since <= counted.since + 1:
            since = counted.since  # in the first step, the precision may become known one step late
        elif not place:  # older changes were dropped, so the precision before this one is unknown
            before = since - 1
            if counted.until is not None:
                before = min(before, counted.until)
            yield ProductSpan(replace(product, operands={}), order, None, counted.since, before)
        if until is None:
            until = counted.until
        elif counted.until is not None:
            until = min(until, counted.until)
        since = max(since, counted.since)
        if until is None or until >= since:
            for part in _apply_precision(product, entry, facts, unconverted):
                yield ProductSpan(part, order, entry, since, until)


def apply_precision(
    products: Iterable[Product],
    layers: Mapping[str, HighPrecisionFacts],
    precision: Sequence[GemmPrecision],
    unconverted: Mapping[str, str],
) -> Iterator[Product]:
    entries: dict[tuple[str, ProductName], GemmPrecision] = {(entry.layer, entry.gemm): entry for entry in precision}
    for product in products:
        entry = None
        if product.family in _OF_TE:
            entry = entries.pop((product.layer, product.gemm), None)
        facts = layers.get(product.layer)
        yield from _apply_precision(product, entry, facts, unconverted)
        if entry is not None and _is_guessed(product, entry) and not (facts and facts.recomputed_outside):
            yield Product.uncounted(product.layer, product.family, MIXED)
    for entry in entries.values():
        if entry.not_run:
            yield Product.left_out(entry.layer, "te", entry.gemm, entry.not_run)


def _apply_precision(
    product: Product,
    entry: GemmPrecision | None,
    facts: HighPrecisionFacts | None,
    unconverted: Mapping[str, str],
) -> Iterator[Product]:
    """Yield a product with its precision in a step; two, if some of its calls were outside of ``te.autocast``."""
    if product.family not in _OF_TE:
        if product.is_low:
            product = replace(product, reason=None, reason_ref="")
        elif product.layer in unconverted and product.reason is Reason.NOT_TE:
            product = replace(product, reason=Reason.NOT_CONVERTED, reason_ref=unconverted[product.layer])
        yield product
    elif entry is None or (product.is_low and product.reason is None and product.operands == entry.operands):
        yield product
    elif entry.not_run:
        yield replace(product, macs=0, calls=0, operands={}, runs="never", not_run=entry.not_run)
    elif entry.outside and not (facts and facts.recomputed_outside):
        yield from _split_calls(product, entry, facts)
    else:
        yield _with_reason(replace(product, operands=entry.operands), entry, facts)


def _is_guessed(product: Product, entry: GemmPrecision) -> bool:
    """Return whether micro-batches of a step differ in precision, and their shares do not follow from their number."""
    if entry.outside:
        return product.macs != product.n * product.m * product.k * product.batch * product.calls
    return " -> " in entry.recipe


def _split_calls(product: Product, entry: GemmPrecision, facts: HighPrecisionFacts | None) -> Iterator[Product]:
    outside = replace(entry, recipe=HIGH_PRECISION)
    calls = round(product.calls * entry.outside)
    macs = round(product.macs * entry.outside)
    for is_low, of_part, part in (
        (True, entry, replace(product, calls=product.calls - calls, macs=product.macs - macs)),
        (False, outside, replace(product, calls=calls, macs=macs)),
    ):
        operands = {}
        for tensor, text in entry.operands.items():
            formats = text.split(" -> ")
            fitting = [one for one in formats if (precision_of(one) in LOW_PRECISION["quantized"]) is is_low]
            operands[tensor] = " -> ".join(fitting or formats)
        yield _with_reason(replace(part, operands=operands), of_part, facts)


def _with_reason(product: Product, entry: GemmPrecision, facts: HighPrecisionFacts | None) -> Product:
    if product.is_low:
        return product
    reason, ref = _reason(entry, facts)
    return replace(product, reason=reason, reason_ref=ref)


def _reason(entry: GemmPrecision, facts: HighPrecisionFacts | None) -> tuple[Reason, str]:
    if facts is None:
        facts = HighPrecisionFacts({})
    if facts.recomputed_outside and HIGH_PRECISION in entry.recipe.split(" -> "):
        return Reason.RECOMPUTED, Reason.RECOMPUTED.value
    if entry.recipe == HIGH_PRECISION:
        if entry.excluded:
            return Reason.NO_AUTOCAST, EXCLUDED
        return Reason.NO_AUTOCAST, Reason.NO_AUTOCAST.value
    for feature in facts.kept.get(entry.gemm, ()):
        if any_due(feature.schedules, entry.since):
            return Reason.SECTION, feature.feature
    if facts.backward_override and entry.gemm != "fprop":
        if os.environ.get(_OVERRIDE) == facts.backward_override:  # the default of all recipes
            return Reason.ENVIRONMENT, f"{_OVERRIDE}={facts.backward_override}"
        return Reason.BACKWARD_OVERRIDE, f"backward_override={facts.backward_override!r}"
    if entry.recipe:
        return Reason.RECIPE_EXCEPTION, f"the recipe {entry.recipe} leaves it in high precision"
    return Reason.UNKNOWN, ""


def kept_by_sections(sections: Iterable[Acting]) -> dict[str, tuple[KeepingFeature, ...]]:
    kept: dict[str, tuple[KeepingFeature, ...]] = {}
    for section in sections:
        for feature, effect in section.effects.items():
            gemms = dict.fromkeys(effect.high_precision)
            if not effect.quantizes:
                gemms |= dict.fromkeys(dict(effect.modifies))
            for gemm in gemms:
                text = f"{feature} in {section.place()}"
                if effect.schedules:
                    text += f", {effect.format_steps(gemm)}"
                kept[gemm] = (*kept.get(gemm, ()), KeepingFeature(text, effect.steps(gemm)))
    return kept
