"""The matrix products of a run's model: those of its first step, in the precision of any step."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import NOTHING, Coverage, Product, ProductName, Reason, StateRow, is_low
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION, GemmPrecision
from te_precision_callbacks.coverage.other_steps import ProductSpan
from te_precision_callbacks.statistics.schedule import Schedule

_OVERRIDE = "NVTE_BACKWARD_OVERRIDE"

_EXCLUDED = "runs inside te.autocast(enabled=False)"


@dataclass(frozen=True)
class Kept:
    """A feature that keeps a GEMM in high precision.

    Attributes:
        feature: its name, with the place of its section, and its steps if these are not all.
        schedules: the steps in which it does.
    """

    feature: str
    schedules: tuple[Schedule, ...]

    def acts_in(self, iteration: int) -> bool:
        """Whether it does in an iteration."""
        return any(schedule.at(iteration)[0] for schedule in self.schedules)


@dataclass(frozen=True)
class LayerFacts:
    """The facts about a layer of Transformer Engine that say why a GEMM of it is not in low precision.

    Attributes:
        kept: GEMM -> the features that keep it in high precision.
        backward_override: that of its recipe; empty if there is none.
        recomputed_outside: whether a checkpoint has computed its forward again outside of its autocast.
    """

    kept: Mapping[str, tuple[Kept, ...]]
    backward_override: str = ""
    recomputed_outside: bool = False


@dataclass(frozen=True)
class Counted:
    """The products of a step, and the facts about layers then.

    Attributes:
        since: the iteration of the step.
        products: as they were counted.
        layers: the facts about layers of Transformer Engine.
        state: what the model and its optimizers keep.
        until: the last iteration for which that holds; None while it holds.
    """

    since: int
    products: tuple[Product, ...]
    layers: Mapping[str, LayerFacts]
    state: tuple[StateRow, ...]
    until: int | None = None


class CoverageHistory:
    """The matrix products of a run's model, and of those that followed it.

    Attributes:
        of_other_ranks: the products of layers that other ranks alone have, as they ran there in their first step.
        changes: how often this rank's were put.
    """

    def __init__(self) -> None:
        self._counted: list[Counted] = []
        self.of_other_ranks: tuple[Product, ...] = ()
        self.changes = 0

    def put(
        self,
        iteration: int,
        products: tuple[Product, ...],
        layers: Mapping[str, LayerFacts],
        state: tuple[StateRow, ...] = (),
    ) -> None:
        """Let products, and what is kept, be those of an iteration and of the following ones, until others are put."""
        self.changes += 1
        self._counted = [counted for counted in self._counted if counted.since < iteration]
        self._counted.append(Counted(iteration, products, layers, state))

    def put_of_ranks(self, products: Iterable[Product]) -> None:
        """Keep the products of layers that other ranks alone have.

        Args:
            products: those of all ranks.
        """
        own = {product.layer for counted in self._counted for product in counted.products}
        self.of_other_ranks = tuple(product for product in products if product.layer not in own)

    def spans(self) -> list[Counted]:
        """All that was put, with the iterations for which it holds."""
        ends = [counted.since - 1 for counted in self._counted[1:]]
        found = [replace(counted, until=end) for counted, end in zip(self._counted, ends, strict=False)]
        return found + self._counted[-1:]

    def by_span(self, precision: Iterable[GemmPrecision], unconverted: Mapping[str, str]) -> Iterator[ProductSpan]:
        """Each product as often as it was another.

        Args:
            precision: that of the layers' GEMMs in all iterations, as ``PrecisionAudit.spans`` gives it.
            unconverted: layers that a trainer left without Transformer Engine, and why.
        """
        spans: dict[tuple[str, str], list[GemmPrecision]] = defaultdict(list)
        for entry in precision:
            spans[entry.layer, entry.gemm].append(entry)
        for counted in self.spans():
            known = {(product.layer, product.gemm) for product in counted.products}
            for order, product in enumerate(counted.products):
                of_te = product.family in ("te", "te_ops")
                entries = spans.get((product.layer, product.gemm), []) if of_te else []
                yield from _in_spans(product, order, counted, entries, unconverted)
            for (layer, gemm), entries in spans.items():
                last = entries[-1]
                if (layer, gemm) not in known and last.not_run:
                    left_out = Product.left_out(layer, "te", last.gemm, last.not_run)
                    yield ProductSpan(left_out, len(counted.products), last, last.since, last.until)
        for order, product in enumerate(self.of_other_ranks):
            yield ProductSpan(product, order, None, 0, None)

    def at(self, iteration: int, precision: Iterable[GemmPrecision], unconverted: Mapping[str, str]) -> Coverage:
        """The products of an iteration.

        Args:
            iteration: one that has run.
            precision: that of the layers' GEMMs in it.
            unconverted: layers that a trainer left without Transformer Engine, and why.
        """
        if not self._counted:
            return NOTHING
        number = max(0, bisect_right([counted.since for counted in self._counted], iteration) - 1)
        counted = self._counted[number]
        products = in_precision(counted.products, counted.layers, list(precision), unconverted)
        return Coverage(products, state=counted.state)


def _in_spans(
    product: Product,
    order: int,
    counted: Counted,
    entries: Sequence[GemmPrecision],
    unconverted: Mapping[str, str],
) -> Iterator[ProductSpan]:
    """A product as it was counted, as often as its precision was another.

    Args:
        entries: those of its GEMM.
    """
    if not entries:
        (found,) = in_precision([product], counted.layers, [], unconverted)
        yield ProductSpan(found, order, None, counted.since, counted.until)
    for place, entry in enumerate(entries):
        since, until = entry.since, entry.until
        if not place and since <= counted.since + 1:
            since = counted.since  # the first step, of which a GEMM's precision may be known a step later
        elif not place:  # the first of more changes than are kept: before them the precision is not known
            before = since - 1 if counted.until is None else min(since - 1, counted.until)
            yield ProductSpan(replace(product, operands={}), order, None, counted.since, before)
        ends = [end for end in (until, counted.until) if end is not None]
        since, until = max(since, counted.since), min(ends, default=None)
        if until is None or until >= since:
            (found,) = in_precision([product], counted.layers, [entry], unconverted)
            yield ProductSpan(found, order, entry, since, until)


def in_precision(
    products: Iterable[Product],
    layers: Mapping[str, LayerFacts],
    precision: Sequence[GemmPrecision],
    unconverted: Mapping[str, str],
) -> Iterator[Product]:
    """The products in the precision of an iteration, each with the reason why it is not in low precision.

    Args:
        products: the products.
        layers: the facts about layers of Transformer Engine.
        precision: that of the layers' GEMMs.
        unconverted: layers that a trainer left without Transformer Engine, and why.
    """
    entries: dict[tuple[str, ProductName], GemmPrecision] = {(entry.layer, entry.gemm): entry for entry in precision}
    seen = set()
    for product in products:
        if product.family not in ("te", "te_ops"):
            why = unconverted.get(product.layer)
            if why is not None and product.reason is Reason.NOT_TE:
                product = replace(product, reason=Reason.NOT_CONVERTED, reason_ref=why)
            yield product if not product.is_low else replace(product, reason=None, reason_ref="")
            continue
        entry = entries.get((product.layer, product.gemm))
        seen.add((product.layer, product.gemm))
        if entry is None or (product.is_low and product.reason is None and product.operands == entry.operands):
            yield product
        elif entry.not_run:
            yield replace(product, macs=0, calls=0, operands={}, runs="never", not_run=entry.not_run)
        elif is_low(entry.operands):
            yield replace(product, operands=entry.operands)
        else:
            reason, ref = _reason(entry, layers.get(entry.layer))
            yield replace(product, operands=entry.operands, reason=reason, reason_ref=ref)
    for entry in precision:
        if entry.not_run and (entry.layer, entry.gemm) not in seen:
            yield Product.left_out(entry.layer, "te", entry.gemm, entry.not_run)


def _reason(entry: GemmPrecision, facts: LayerFacts | None) -> tuple[Reason, str]:
    """Why a GEMM of Transformer Engine runs in high precision."""
    if facts is not None and facts.recomputed_outside and HIGH_PRECISION in entry.recipe.split(" -> "):
        return Reason.RECOMPUTED, Reason.RECOMPUTED.value
    if entry.recipe == HIGH_PRECISION:
        return Reason.NO_AUTOCAST, _EXCLUDED if entry.excluded else Reason.NO_AUTOCAST.value
    kept = () if facts is None else facts.kept.get(entry.gemm, ())
    keeping = next((feature for feature in kept if feature.acts_in(entry.since)), None)
    if keeping is not None:
        return Reason.SECTION, keeping.feature
    if facts is not None and facts.backward_override and entry.gemm != "fprop":
        if os.environ.get(_OVERRIDE) == facts.backward_override:  # the default of all recipes
            return Reason.ENVIRONMENT, f"{_OVERRIDE}={facts.backward_override}"
        return Reason.BACKWARD_OVERRIDE, f"backward_override={facts.backward_override!r}"
    if entry.recipe:
        return Reason.RECIPE_EXCEPTION, f"the recipe {entry.recipe} leaves it in high precision"
    return Reason.UNKNOWN, ""


def kept_by_sections(sections: Iterable[Acting]) -> dict[str, tuple[Kept, ...]]:
    """GEMM -> the features of a layer's sections that keep it in high precision."""
    kept: dict[str, tuple[Kept, ...]] = {}
    for section in sections:
        for feature, effect in section.effects.items():
            replaced = () if effect.quantizes else tuple(gemm for gemm, _ in effect.modifies)
            for gemm in dict.fromkeys((*effect.high_precision, *replaced)):
                steps = f", {effect.steps_in_words(gemm)}" if effect.schedules else ""
                found = Kept(f"{feature} in {section.place()}{steps}", effect.steps(gemm))
                kept[gemm] = (*kept.get(gemm, ()), found)
    return kept
