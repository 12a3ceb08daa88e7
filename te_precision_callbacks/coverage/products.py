"""The matrix products that ran, and their sums over the calls of a step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName
from te_precision_callbacks.coverage.coverage import ESTIMATED, Family, Product, ProductName, Reason
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_INPUT_GRADIENT, join_with_arrows
from te_precision_callbacks.coverage.marks import Weight
from te_precision_callbacks.coverage.matrix_products import Role, Sizes
from te_precision_callbacks.coverage.micro_batches import Kind, ModelCall, Parts

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


UNFUSED = "UnfusedDotProductAttention"
"""Transformer Engine's attention in torch: it multiplies by ``baddbmm`` first, then by ``bmm`` (2.20.2,
``pytorch/attention/dot_product_attention/backends.py``)."""

UNFUSED_KERNEL = "Transformer Engine's unfused attention"
FUSED = "Transformer Engine's fused attention"
OTHER_KERNEL = "another kernel of Transformer Engine's attention, counted by its sizes"


@dataclass(slots=True, eq=False)
class SeenProduct:
    """A product that has run.

    Attributes:
        layer: the path of its module, with the name of the weight unless it is ``weight``.
        role: its purpose, if known; ``wgrad`` and ``dgrad`` only if the forward has a weight.
        kind: the kernel or class, as named in a reason.
        of: for a product of a backward by torch, the forward product.
        gradients: the number of its products that have run in the backward, except dgrad.
        not_counted: the operator and the reason if it is not counted.
        after: the number of Transformer Engine's GEMMs of the step that had run for the first time before it.
    """

    layer: str
    family: Family
    role: Role = ""
    formats: tuple[str, str] = ("", "")
    sizes: Sizes = (0, 0, 0, 0)
    kind: str = ""
    weight: Weight | None = None
    of: SeenProduct | None = None
    backward: bool = False
    gradients: int = 0
    call: ModelCall | None = None
    not_counted: str = ""
    sequences: tuple[Sizes, ...] | None = None
    after: int = 0

    @property
    def is_of_backward(self) -> bool:
        return self.backward or self.gemm in ("dgrad", "wgrad")

    def detached(self) -> list[SeenProduct]:
        """The product without references to its step; packed sequences become a product each."""
        alone = replace(self, of=None, call=None, backward=self.is_of_backward, sequences=None)
        if self.weight is not None:
            alone.weight = replace(self.weight, owner=None)
        if self.gemm != "other":
            alone.role = self.gemm
        if self.sequences is None:
            return [alone]
        return [replace(alone, sizes=sizes) for sizes in self.sequences]

    @property
    def reason(self) -> Reason | None:
        if self.family == "lookup":
            return None
        if self.kind in (UNFUSED_KERNEL, OTHER_KERNEL):
            return Reason.ATTENTION
        return Reason.NOT_TE

    @property
    def gemm(self) -> ProductName:
        if self.role or self.of is None:
            return self.role or "other"
        return self.of.gemm


def kind_of(module: torch.nn.Module) -> str:
    kind = type(module)
    if kind.__name__ == UNFUSED:
        return UNFUSED_KERNEL
    if kind.__module__.startswith("torch.nn."):
        return f"torch.nn.{kind.__name__}"
    return kind.__name__


class PlacedProduct(NamedTuple):
    """A product of a step, and its place among the step's products of Transformer Engine, counted from 0."""

    place: float
    product: Product


def sum_products(seen: Iterable[tuple[SeenProduct, float]]) -> Iterator[PlacedProduct]:
    """Sum the calls of a step by product, given each call's product and how often it ran."""
    by_name = group_by_key(((call.layer, call.gemm, call.is_of_backward), (call, times)) for call, times in seen)
    has_backward = any(backward for _, _, backward in by_name)
    for (layer, gemm, backward), runs in by_name.items():
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
        )
        if product.is_low:
            product = replace(product, reason=None, reason_ref="")
        place = calls[0].after - 0.5
        yield PlacedProduct(place, product)
        weight = first.weight
        if weight is None or gemm != "fprop" or not has_backward:
            continue
        if (layer, "dgrad", True) not in by_name:
            yield PlacedProduct(place, Product.left_out(layer, first.family, "dgrad", NO_INPUT_GRADIENT))
        if not weight.trains:
            yield PlacedProduct(place, Product.left_out(layer, first.family, "wgrad", FROZEN))


class _CountedCalls(NamedTuple):
    """The counted calls of a kind: one call, or several if sizes depend on the values of tensors."""

    seen: Sequence[SeenProduct]
    calls: int
    backwards: int

    @property
    def sizes(self) -> Counter[object]:
        return Counter((seen.layer, seen.gemm, seen.is_of_backward, seen.sizes) for seen in self.seen)

    def step_runs(self, forwards: int, backwards: int) -> Iterator[tuple[SeenProduct, float]]:
        for seen in self.seen:
            if seen.is_of_backward:
                yield seen, backwards / max(self.backwards, 1)
            else:
                yield seen, forwards / max(self.calls, 1)


class CountedKinds:
    """The products of each kind of call of a model, as they were counted.

    Attributes:
        changes: number of changes so far.
    """

    def __init__(self, root: str) -> None:
        self.changes = 0
        self._root = root
        self._counted: dict[Kind, _CountedCalls] = {}

    def put(
        self,
        kind: Kind,
        counted: Sequence[tuple[ModelCall, Sequence[SeenProduct]]],
        differ_in_integers: Callable[[Kind, Kind], bool],
    ) -> bool | None:
        """Keep the products of counted calls of a kind.

        Returns:
            Whether a new kind has the same products as the known kind that differs from it only in integers of the
            input; None without such a kind.
        """
        before = self._counted.get(kind)
        calls = [(call, seen) for call, seen in counted if call.may_have_backward] or counted[:1]
        if any(call.has_data_dependent_sizes for call, _ in counted):
            calls = counted
        backwards = sum(call.may_have_backward for call, _ in calls)
        if before is not None and (before.backwards or not backwards):
            return None
        other = next((other for other in self._counted if differ_in_integers(kind, other)), None)
        seen = []
        for product in itertools.chain.from_iterable(products for _, products in calls):
            seen += product.detached()
        self._counted[kind] = _CountedCalls(seen, len(calls), backwards)
        self.changes += 1
        if before is not None or other is None:
            return None
        return self._counted[kind].sizes == self._counted[other].sizes

    def has_backward(self, kind: Kind) -> bool | None:
        counted = self._counted.get(kind)
        if counted is None:
            return None
        return any(seen.is_of_backward for seen in reversed(counted.seen))  # they come last

    def products(self, parts: Parts, steps: int = 1) -> tuple[list[PlacedProduct], list[Product]]:
        """Return torch's products of a step with these calls, or their mean over several steps, and uncounted ones."""
        weighted: list[tuple[SeenProduct, float]] = []
        uncounted: dict[tuple[str, str, bool], Product] = {}
        unknown = 0
        lacking = 0
        for kind, (forwards, backwards) in parts.items():
            counted = self._counted.get(kind)
            if counted is None:
                unknown += forwards
                alike = [self._counted[other] for other in self._counted if other.form == kind.form]
                alike = alike or list(self._counted.values())
            else:
                alike = [counted]
                lacking += 0 if counted.backwards else backwards
            for known in alike:
                for seen, times in known.step_runs(forwards, backwards):
                    if seen.not_counted:
                        product = Product.uncounted(seen.layer, seen.family, seen.not_counted, backward=seen.backward)
                        uncounted.setdefault((seen.layer, seen.not_counted, seen.backward), product)
                    elif times:
                        weighted.append((seen, times / len(alike) / steps))
        whole = sum(forwards for forwards, _ in parts.values())
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
        return list(sum_products(weighted)), [*uncounted.values(), *map(self.uncounted, texts)]

    def uncounted(self, why: str) -> Product:
        return Product.uncounted(self._root, "functional", why)
