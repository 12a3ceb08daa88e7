"""The matrix products that ran, and their sums over the calls of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName
from te_precision_callbacks.coverage.coverage import ESTIMATED, Family, Product, ProductName, Reason
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_INPUT_GRADIENT, join_with_arrows
from te_precision_callbacks.coverage.marks import UNFUSED_KERNEL, Weight
from te_precision_callbacks.coverage.matrix_products import Role, Sizes
from te_precision_callbacks.coverage.micro_batches import Kind, ModelCall, ModelCalls, Parts

OPERAND_NAMES: Mapping[ProductName, tuple[str, str]] = {
    "fprop": OPERANDS["fprop"],
    "dgrad": OPERANDS["dgrad"],
    "wgrad": OPERANDS["wgrad"],
    "qk": ("query", "key"),
    "pv": ("probabilities", "value"),
    "other": ("a", "b"),
    "lookup": ("indices", "weight"),
}

ATTENTION: tuple[Literal["qk", "pv"], ...] = ("qk", "pv")


def operand_names(gemm: ProductName, *, backward: bool) -> tuple[str, str]:
    if backward and gemm not in OPERANDS:
        return "gradient", "saved"
    return OPERAND_NAMES[gemm]


def gemm_sizes(tokens: int, in_features: int, out_features: int) -> Mapping[GemmName, tuple[int, int, int]]:
    """Return n, m and k of each GEMM of a layer."""
    return {
        "fprop": (tokens, out_features, in_features),
        "dgrad": (tokens, in_features, out_features),
        "wgrad": (out_features, in_features, tokens),
    }


FUSED = "Transformer Engine's fused attention"
OTHER_KERNEL = "another kernel of Transformer Engine's attention, counted by its sizes"


@dataclass(slots=True, eq=False)
class SeenProduct:
    """A product that has run.

    Attributes:
        layer: the path of its module, with the name of the weight unless it is ``weight``.
        role: its purpose, if known; ``wgrad`` and ``dgrad`` only if the forward has a weight.
        kind: see :func:`te_precision_callbacks.coverage.marks.kind_of`.
        gradients: the number of its products that have run in the backward, except dgrad.
        not_counted: the operator and the reason if it is not counted.
        place: its place among the step's GEMMs of Transformer Engine, counted from 0.
        recipe: the recipe of a GEMM of Transformer Engine; else empty.
    """

    layer: str
    family: Family
    role: Role = ""
    formats: tuple[str, str] = ("", "")
    sizes: Sizes = (0, 0, 0, 0)
    kind: str = ""
    weight: Weight | None = None
    backward: bool = False
    gradients: int = 0
    call: ModelCall | None = None
    not_counted: str = ""
    sequences: tuple[Sizes, ...] | None = None
    place: float = 0
    recipe: str = ""

    def detached(self) -> list[SeenProduct]:
        """The product without references to its step; packed sequences become a product each."""
        without_call = replace(self, call=None, sequences=None)
        if self.sequences is None:
            return [without_call]
        return [replace(without_call, sizes=sizes) for sizes in self.sequences]

    @property
    def reason(self) -> Reason | None:
        if self.family == "lookup" or self.recipe:
            return None
        if self.kind in (UNFUSED_KERNEL, FUSED, OTHER_KERNEL):
            return Reason.ATTENTION
        return Reason.NOT_TE

    @property
    def gemm(self) -> ProductName:
        return self.role or "other"


class PlacedProduct(NamedTuple):
    """A product of a step, and its place, as of a :class:`SeenProduct`."""

    place: float
    product: Product


def sum_products(seen: Iterable[tuple[SeenProduct, float]]) -> Iterator[PlacedProduct]:
    """Sum the calls of a step by product, from each call's product and its number of runs.

    Products of Transformer Engine with other recipes or formats are other products.
    """
    by_name = group_by_key(
        ((call.layer, call.gemm, call.backward, call.recipe, call.recipe and call.formats), (call, times))
        for call, times in seen
    )
    in_backward = {(layer, gemm) for layer, gemm, backward, *_ in by_name if backward}
    for (layer, gemm, backward, recipe, _), runs in by_name.items():
        calls, times = zip(*runs, strict=True)
        # Sizes come from the largest call: others may have no rows, as for an expert without tokens.
        first: SeenProduct = max(calls, key=lambda call: math.prod(call.sizes))
        n, m, k, batch = first.sizes
        formats = map(join_with_arrows, zip(*(call.formats for call in calls), strict=True))
        product = Product(
            layer,
            first.family,
            gemm,
            backward,
            n,
            m,
            k,
            batch,
            round(sum(times)),
            round(sum(number * math.prod(call.sizes) for call, number in runs)),
            dict(zip(operand_names(gemm, backward=backward), formats, strict=True)),
            reason=first.reason,
            reason_ref=first.kind,
            recipe=recipe,
        )
        if product.reason is not None and product.is_low:
            product = replace(product, reason=None, reason_ref="")
        order = calls[0].place
        yield PlacedProduct(order, product)
        weight = first.weight
        if weight is None or gemm != "fprop" or not in_backward:
            continue
        if (layer, "dgrad") not in in_backward:
            yield PlacedProduct(order, Product.left_out(layer, first.family, "dgrad", NO_INPUT_GRADIENT))
        if not weight.trains:
            yield PlacedProduct(order, Product.left_out(layer, first.family, "wgrad", FROZEN))


class _CountedCalls(NamedTuple):
    """The counted calls of a kind: one call, or several if sizes depend on the values of tensors."""

    seen: Sequence[SeenProduct]
    calls: int
    backwards: int

    @property
    def sizes(self) -> Counter[object]:
        return Counter((seen.layer, seen.gemm, seen.backward, seen.sizes) for seen in self.seen)


class CountedKinds:
    """The products of each kind of call of a model, as they were counted.

    Attributes:
        changes: number of changes so far.
    """

    def __init__(self, root: str) -> None:
        self.changes = 0
        self._root = root
        self._counted: dict[Kind, _CountedCalls] = {}

    def put(self, kind: Kind, counted: Sequence[ModelCall], model: ModelCalls) -> None:
        """Keep the products of counted calls of a kind of calls of ``model``."""
        former = self._counted.get(kind)
        calls = [call for call in counted if call.may_have_backward] or counted[:1]
        if any(call.has_data_dependent_sizes for call in counted):
            calls = counted
        backwards = sum(call.may_have_backward for call in calls)
        if former is not None and (former.backwards or not backwards):
            return
        other = next((other for other in self._counted if other != kind and other[1:] == kind[1:]), None)
        seen = [product_kind for call in calls for product in call.seen for product_kind in product.detached()]
        self._counted[kind] = _CountedCalls(seen, len(calls), backwards)
        self.changes += 1
        if former is None and other is not None:
            model.note_integers(kind.base, decide=self._counted[kind].sizes != self._counted[other].sizes)

    def has_backward(self, kind: Kind) -> bool | None:
        counted = self._counted.get(kind)
        if counted is None:
            return None
        return any(seen.backward for seen in reversed(counted.seen))  # they come last

    def products(self, parts: Parts, steps: int = 1) -> tuple[list[PlacedProduct], list[Product]]:
        """Return torch's products of a step with these calls, or their mean over several steps, and uncounted ones."""
        weighted: list[tuple[SeenProduct, float]] = []
        uncounted: dict[Product, None] = {}
        unknown = 0
        lacking = 0
        for kind in dict.fromkeys(kind for kind, _ in parts):
            forwards, backwards = parts[kind, False], parts[kind, True]
            counted = self._counted.get(kind)
            if counted is None:
                unknown += forwards
                counted_kinds = [self._counted[other] for other in self._counted if other.form == kind.form]
                counted_kinds = counted_kinds or list(self._counted.values())
            else:
                counted_kinds = [counted]
                lacking += 0 if counted.backwards else backwards
            for counted_kind in counted_kinds:
                for seen in counted_kind.seen:
                    times = forwards / counted_kind.calls
                    if seen.backward:
                        times = backwards / max(counted_kind.backwards, 1)
                    if seen.not_counted:
                        product = Product.uncounted(seen.layer, seen.family, seen.not_counted, backward=seen.backward)
                        uncounted[product] = None
                    elif times:
                        weighted.append((seen, times / len(counted_kinds) / steps))
        whole = sum(number for (_, backward), number in parts.items() if not backward)
        texts = []
        if unknown:
            texts.append(
                f"{ESTIMATED}{unknown} of {whole} micro-batches have other layers, sizes or operations than the"
                " counted ones"
            )
        if lacking:
            texts.append(
                f"{ESTIMATED}the backward of {lacking} of {whole} micro-batches, because no backward of this kind was"
                " counted"
            )
        return list(sum_products(weighted)), [*uncounted, *map(self.uncounted, texts)]

    def uncounted(self, why: str) -> Product:
        return Product.uncounted(self._root, "functional", why)
