"""The matrix products of a run's model by step: Transformer Engine's from the table of each step, and torch's."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import EXCLUDED, NOT_OBSERVED, Coverage, Product, Reason, StateRow
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION
from te_precision_callbacks.coverage.micro_batches import Parts
from te_precision_callbacks.coverage.other_steps import ProductSpan
from te_precision_callbacks.coverage.products import CountedKinds
from te_precision_callbacks.coverage.step_table import NO_GEMMS, StepGemms, StepTable
from te_precision_callbacks.statistics.schedule import Schedule, any_due

_OVERRIDE = "NVTE_BACKWARD_OVERRIDE"

MOST_TABLES = 64
"""The most steps that differ in their products. Later ones are kept as means, of the steps with the same formats."""

MOST_SPANS = 64
"""The most changes of products that are listed, counted from the last one; nothing is listed of earlier steps."""


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


NO_FACTS = HighPrecisionFacts({})


class CountedStep(NamedTuple):
    """The products of a step.

    Attributes:
        gemms: those of Transformer Engine; :data:`NO_GEMMS` if some may be missing.
        parts: the calls of the model, by kind.
        kinds: torch's products in each kind of call.
        state: the rows of state, in the first step.
        why_not: the reason if torch's products are not counted; else empty.
    """

    gemms: StepGemms
    parts: Parts
    kinds: CountedKinds
    state: tuple[StateRow, ...] | None
    why_not: str = ""

    @property
    def has_backward(self) -> bool:
        if self.gemms is NO_GEMMS:
            return any(backward for _, backward in self.parts)
        return self.gemms.has_backward or any(
            backward and self.kinds.has_backward(kind) is not False for kind, backward in self.parts
        )


@dataclass(eq=False)
class StepProducts:
    """The products of steps alike, or the sum over steps with other sizes.

    Attributes:
        step: the first of these steps, with the sum of their counts.
        facts: layer -> facts about it.
        since: the iteration of the first step.
        steps: the number of steps that the counts sum up.
    """

    table: StepTable
    step: CountedStep
    facts: Mapping[str, HighPrecisionFacts]
    since: int
    steps: int = 1
    _products: tuple[tuple[int, int], tuple[Product, ...]] | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        version = self.step.kinds.changes, self.steps
        if self._products is None or self._products[0] != version:
            self._products = version, tuple(self._make_products())
        return self._products[1]

    def _make_products(self) -> Iterator[Product]:
        gemms = self.step.gemms
        torch_products, uncounted = self.step.kinds.products(self.step.parts, self.steps)
        placed = [*torch_products, *self.table.products(gemms, self.steps)]
        for _, product in sorted(placed, key=lambda entry: entry.place):
            if product.recipe:
                product = explain(
                    product,
                    self.facts.get(product.layer, NO_FACTS),
                    self.since,
                    excluded=product.layer in gemms.excluded,
                )
            yield product
        yield from uncounted
        yield from self.table.uncounted(gemms)
        if self.step.why_not:
            yield self.step.kinds.uncounted(self.step.why_not)

    @property
    def counts(self) -> Counter[object]:
        """The multiply-adds of each GEMM, in any precision."""
        counts: Counter[object] = Counter()
        for product in self.products:
            counts[product.layer, product.gemm, product.backward] += product.macs
        return counts

    def add(self, step: CountedStep) -> None:
        gemms = self.step.gemms.plus(step.gemms)
        self.step = self.step._replace(gemms=gemms, parts=self.step.parts + step.parts)
        self.steps += 1


class _Span(NamedTuple):
    """Consecutive steps.

    Attributes:
        since: their first iteration.
        counts_since: the first iteration of the steps up to these with the same multiply-adds.
    """

    since: int
    of_step: StepProducts
    counts_since: int


class CoverageHistory:
    """The matrix products of each step, kept as changes: a step like an earlier one takes a few bytes.

    Attributes:
        state: the dtypes of the state of the model and its optimizers, after the first step.
        other_ranks_products: products of pipeline stages on other ranks.
        unconverted: layer -> why the trainer's conversion to Transformer Engine skipped it.
        changes: number of changes so far.
    """

    def __init__(self, table: StepTable) -> None:
        self.state: tuple[StateRow, ...] = ()
        self.other_ranks_products: tuple[Product, ...] = ()
        self.unconverted: Mapping[str, str] = {}
        self.changes = 0
        self._table = table
        self._spans: list[_Span] = []
        self._tables: dict[object, StepProducts] = {}
        self._kinds_changes = 0
        self._unobserved: tuple[Product, ...] = ()

    @property
    def has_changed(self) -> bool:
        return len(self._spans) > 1

    def put(self, iteration: int, step: CountedStep, facts: Callable[[], Mapping[str, HighPrecisionFacts]]) -> None:
        """Record the products of a step, which are valid until a step differs.

        A step without a backward, such as a skipped batch, is treated like the step before it; before the first
        backward, like the step after it.
        """
        while self._spans and self._spans[-1].since >= iteration:
            self._spans.pop()
        self.state = step.state or self.state
        last = self._spans[-1].of_step if self._spans else None
        has_backward = step.has_backward
        counts_more = step.kinds.changes != self._kinds_changes
        self._kinds_changes = step.kinds.changes
        if last is not None and last.step.kinds is step.kinds:
            if step.gemms is NO_GEMMS:
                step = step._replace(gemms=last.step.gemms)
            if counts_more:
                self.changes += 1  # earlier steps may have had calls of the newly counted kind
                last.facts = facts()
            if not has_backward and last.step.has_backward:
                return
            if has_backward and not last.step.has_backward:
                iteration = self._spans.pop().since
            elif last.steps == 1 and last.step._replace(state=None) == step._replace(state=None):
                return
        step_products = self._find(iteration, step, facts)
        last_span = self._spans[-1] if self._spans else None
        if last_span is None or last_span.of_step is not step_products:
            since = iteration
            if last_span is not None and last_span.of_step.counts == step_products.counts:
                since = last_span.counts_since
            self._spans.append(_Span(iteration, step_products, since))

    def _find(
        self, iteration: int, step: CountedStep, facts: Callable[[], Mapping[str, HighPrecisionFacts]]
    ) -> StepProducts:
        """Return the products of an earlier step like this one, or new ones."""
        kinds = id(step.kinds)
        like = kinds, step.gemms.key, frozenset(step.parts.items()), step.why_not
        key: object = like
        if key not in self._tables and len(self._tables) >= MOST_TABLES:
            key = kinds, step.gemms.forms
            if key not in self._tables and len(self._tables) >= 2 * MOST_TABLES:
                key = kinds
        step_products = self._tables.get(key)
        if step_products is None:
            step_products = StepProducts(self._table, step, facts(), iteration)
            last = self._spans[-1].of_step if self._spans else None
            if key is like and last is not None and last.products == step_products.products:
                step_products = last
            else:
                self.changes += 1
            self._tables[key] = step_products
        elif key is not like:
            step_products.add(step)
            # At powers of two: a change rewrites the record.
            self.changes += not step_products.steps & (step_products.steps - 1)
        return step_products

    def put_other_ranks(self, products: Iterable[Product]) -> None:
        rank_layers = {product.layer for span in self._spans for product in span.of_step.products}
        self.other_ranks_products = tuple(product for product in products if product.layer not in rank_layers)

    def put_unobserved(self, layers: Mapping[str, str]) -> None:
        """Record the layers of Transformer Engine that ran without being observed, with the reasons."""
        products = (Product.uncounted(layer, "te", f"{NOT_OBSERVED}{why}") for layer, why in layers.items())
        self._unobserved = tuple(products)
        self.changes += 1

    def by_span(self) -> Iterator[ProductSpan]:
        """Yield each product once for each span of steps without a change of it."""
        begun: dict[Product, ProductSpan] = {}
        for span in self._spans[-MOST_SPANS:]:
            orders = {self._convert(product): order for order, product in enumerate(span.of_step.products)}
            for product in [product for product in begun if product not in orders]:
                yield begun.pop(product)._replace(until=span.since - 1)
            for product, order in orders.items():
                if product not in begun:
                    begun[product] = ProductSpan(product, order, span.since, None)
        yield from begun.values()
        for order, product in enumerate((*self.other_ranks_products, *self._unobserved)):
            yield ProductSpan(product, order, 0, None)

    def at(self, iteration: int, last: int) -> Coverage:
        """Return the products of an iteration; ``last`` is the run's last iteration."""
        if not self._spans:
            return Coverage(self._unobserved)
        number = max(0, bisect_right(self._spans, iteration, key=lambda span: span.since) - 1)
        products = map(self._convert, self._spans[number].of_step.products)
        return Coverage((*products, *self._unobserved), state=self.state, steps=self._steps(number, last))

    def _convert(self, product: Product) -> Product:
        """Return a product of torch with the reason why its layer was not converted, if known."""
        if product.layer in self.unconverted and product.reason is Reason.NOT_TE and not product.is_low:
            return replace(product, reason=Reason.NOT_CONVERTED, reason_ref=self.unconverted[product.layer])
        return product

    def _steps(self, number: int, last: int) -> str:
        """Return the steps with the multiply-adds of a span; empty if all steps have them."""
        span = self._spans[number]
        since = span.counts_since
        if since == self._spans[0].since == self._spans[-1].counts_since:
            return ""
        later = (following.since for following in self._spans[number:] if following.counts_since != since)
        until = next(later, max(since, last) + 1) - 1
        steps = f"steps {since} to {until}"
        if since == until:
            steps = f"step {since}"
        if span.of_step.steps > 1:
            return f"the mean of {steps}"
        return steps


def explain(product: Product, facts: HighPrecisionFacts, since: int, *, excluded: bool = False) -> Product:
    """Return a product of Transformer Engine with the reason if it is in high precision."""
    if product.is_low:
        return product
    reason, ref = _reason(product, facts, since, excluded=excluded)
    return replace(product, reason=reason, reason_ref=ref)


def _reason(product: Product, facts: HighPrecisionFacts, since: int, *, excluded: bool) -> tuple[Reason, str]:
    if product.recipe == HIGH_PRECISION:
        if facts.recomputed_outside:
            return Reason.RECOMPUTED, Reason.RECOMPUTED.value
        if excluded:
            return Reason.NO_AUTOCAST, EXCLUDED
        return Reason.NO_AUTOCAST, Reason.NO_AUTOCAST.value
    for feature in facts.kept.get(product.gemm, ()):
        if any_due(feature.schedules, since):
            return Reason.SECTION, feature.feature
    if facts.backward_override and product.gemm != "fprop":
        if os.environ.get(_OVERRIDE) == facts.backward_override:  # the default of all recipes
            return Reason.ENVIRONMENT, f"{_OVERRIDE}={facts.backward_override}"
        return Reason.BACKWARD_OVERRIDE, f"backward_override={facts.backward_override!r}"
    return Reason.RECIPE_EXCEPTION, f"the recipe {product.recipe} leaves it in high precision"


def kept_by_sections(sections: Iterable[Acting]) -> dict[str, tuple[KeepingFeature, ...]]:
    features: dict[str, tuple[KeepingFeature, ...]] = {}
    for section in sections:
        for feature, effect in section.effects.items():
            gemms = dict.fromkeys(effect.high_precision)
            if not effect.quantizes:
                gemms |= dict.fromkeys(dict(effect.modifies))
            for gemm in gemms:
                text = f"{feature} in {section.place()}"
                if effect.schedules:
                    text += f", {effect.format_steps(gemm)}"
                features[gemm] = (*features.get(gemm, ()), KeepingFeature(text, effect.steps(gemm)))
    return features
