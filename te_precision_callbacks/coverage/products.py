"""The matrix products that ran, and their sums over the calls of a step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.coverage.coverage import ESTIMATED, Family, Product, ProductName, Reason, StateRow
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_INPUT_GRADIENT, join_with_arrows
from te_precision_callbacks.coverage.marks import Weight
from te_precision_callbacks.coverage.matrix_products import Role, Sizes
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED, OUTSIDE, Kind, ModelCall, Parts

OPERAND_NAMES: Mapping[ProductName, tuple[str, str]] = {
    "fprop": OPERANDS["fprop"],
    "dgrad": OPERANDS["dgrad"],
    "wgrad": OPERANDS["wgrad"],
    "qk": ("query", "key"),
    "pv": ("probabilities", "value"),
    "other": ("a", "b"),
    "lookup": ("indices", "weight"),
}

_OF_BACKWARD = ("gradient", "saved")


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
        if self.family in ("te", "te_ops", "lookup"):
            return None
        if self.kind in (UNFUSED_KERNEL, FUSED, OTHER_KERNEL):
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


def sum_products(seen: Iterable[tuple[SeenProduct, float]]) -> Iterator[Product]:
    """Sum the calls of a step by product, given each call's product and how often it ran."""
    by_name = group_by_key(((call.layer, call.gemm, call.is_of_backward), (call, times)) for call, times in seen)
    has_backward = any(backward for _, _, backward in by_name)
    for (layer, gemm, backward), runs in by_name.items():
        calls, times = zip(*runs, strict=True)
        # Sizes come from the largest call: others may have no rows, as for an expert without tokens.
        first: SeenProduct = max(calls, key=lambda call: math.prod(call.sizes))
        n, m, k, batch = first.sizes
        names = OPERAND_NAMES[gemm]
        if backward and gemm not in OPERANDS:
            names = _OF_BACKWARD
        formats = map(join_with_arrows, zip(*(call.formats for call in calls), strict=True))
        yield Product(
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
            dict(zip(names, formats, strict=True)),
            reason=first.reason,
            reason_ref=first.kind,
        )
        weight = first.weight
        if weight is None or gemm != "fprop" or not has_backward:
            continue
        if (layer, "dgrad", True) not in by_name:
            yield Product.left_out(layer, first.family, "dgrad", NO_INPUT_GRADIENT)
        if not weight.trains:
            yield Product.left_out(layer, first.family, "wgrad", FROZEN)


class _CountedCalls(NamedTuple):
    """The counted calls of a kind: one call, or several if sizes depend on the values of tensors."""

    seen: Sequence[SeenProduct]
    calls: int
    backwards: int
    may_lack_backward: bool

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
        lacks = kind.form != OUTSIDE and not backwards
        self._put(kind, itertools.chain.from_iterable(products for _, products in calls), len(calls), backwards, lacks)
        if before is not None or other is None:
            return None
        return self._counted[kind].sizes == self._counted[other].sizes

    def put_failed(self, kind: Kind, seen: Iterable[SeenProduct]) -> None:
        self._put(kind, seen, 1, 1, False)

    def _put(self, kind: Kind, products: Iterable[SeenProduct], calls: int, backwards: int, lacks: bool) -> None:
        seen = []
        for product in products:
            seen += product.detached()
        self._counted[kind] = _CountedCalls(seen, calls, backwards, lacks)
        self.changes += 1

    def has_backward(self, kind: Kind) -> bool | None:
        counted = self._counted.get(kind)
        if counted is None:
            return None
        return any(seen.is_of_backward for seen in reversed(counted.seen))  # they come last

    def products(self, parts: Parts, steps: int = 1) -> tuple[Product, ...]:
        """The products of a step with these calls, or their mean over several steps; uncounted products last."""
        weighted: list[tuple[SeenProduct, float]] = []
        left: dict[tuple[str, str, bool], Product] = {}
        unknown = 0
        lacking = 0
        texts: dict[str, None] = {}
        for kind, (forwards, backwards) in parts.items():
            counted = self._counted.get(kind)
            if counted is None:
                unknown += forwards
                alike = [self._counted[other] for other in self._counted if other.form == kind.form]
                alike = alike or [self._counted[other] for other in self._counted if other.form != OUTSIDE]
            else:
                alike = [counted]
                lacking += backwards * counted.may_lack_backward
            for known in alike:
                for seen, times in known.step_runs(forwards, backwards):
                    if seen.not_counted:
                        left_out = Product.uncounted(seen.layer, seen.family, seen.not_counted, backward=seen.backward)
                        left.setdefault((seen.layer, seen.not_counted, seen.backward), left_out)
                    elif times:
                        weighted.append((seen, times / len(alike) / steps))
            if isinstance(kind.form, str) and kind.form != OUTSIDE:
                texts[kind.form] = None
        whole = sum(forwards for forwards, _ in parts.values())
        if unknown:
            texts[
                f"{ESTIMATED}{unknown} of {whole} micro-batches have other layers, sizes or operations than the"
                " counted ones"
            ] = None
        if lacking:
            texts[
                f"{ESTIMATED}the backward of {lacking} of {whole} micro-batches, because no backward of this kind was"
                " counted"
            ] = None
        if all(kind.form == OUTSIDE for kind in parts):
            texts[NOT_CALLED] = None
        return (
            *sum_products(weighted),
            *left.values(),
            *(Product.uncounted(self._root, "functional", what) for what in texts),
        )


class CountedStep(NamedTuple):
    """A step: its calls by kind, the products of kinds, and in the first step the rows of state."""

    parts: Parts
    kinds: CountedKinds
    state: tuple[StateRow, ...] | None

    @property
    def has_backward(self) -> bool:
        return any(
            backwards and self.kinds.has_backward(kind) is not False for kind, (_, backwards) in self.parts.items()
        )
