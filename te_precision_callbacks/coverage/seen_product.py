"""A matrix product that was seen in a step, and what the calls of it amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.coverage.coverage import Family, Product, ProductName, Reason
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_INPUT_GRADIENT
from te_precision_callbacks.coverage.marks import Weight
from te_precision_callbacks.coverage.matrix_products import PackedSequence, Role, Sizes
from te_precision_callbacks.coverage.micro_batches import ModelCall

OPERAND_NAMES: Mapping[ProductName, tuple[str, str]] = {
    "fprop": OPERANDS["fprop"],
    "dgrad": OPERANDS["dgrad"],
    "wgrad": OPERANDS["wgrad"],
    "qk": ("query", "key"),
    "pv": ("probabilities", "value"),
    "other": ("a", "b"),
    "lookup": ("indices", "weight"),
}
"""The names of the operands of a product of the forward, and of dgrad and wgrad."""

_OF_BACKWARD = ("gradient", "saved")
"""Those of a product of the backward without a weight."""


UNFUSED = "UnfusedDotProductAttention"
"""Transformer Engine's attention in torch: it multiplies by ``baddbmm`` first, then by ``bmm`` (2.20.2,
``pytorch/attention/dot_product_attention/backends.py``)."""

UNFUSED_KERNEL = "Transformer Engine's unfused attention"
FUSED = "Transformer Engine's fused attention"
OTHER_KERNEL = "another kernel of Transformer Engine's attention, counted by its sizes"
ANY_KERNEL = Reason.ATTENTION.value
"""Of a plan without the GPU, where it is not known which of its kernels Transformer Engine takes in high precision."""


@dataclass(slots=True, eq=False)
class SeenProduct:
    """A product that has run.

    Attributes:
        layer: the path of its module, with the name of the weight where that is not ``weight``.
        family: as ``Product.family``.
        role: what it is for, as far as is known; ``wgrad`` and ``dgrad`` only where the forward has a weight.
        formats: of its operands.
        sizes: n, m, k and batch.
        kind: what computes it, for a reason.
        weight: the parameter that a product of the forward multiplies by.
        of: the product of the forward, for one of a backward that torch has run.
        backward: whether it belongs to a backward.
        gradients: how many products of the backward, but for dgrad, are of this one.
        call: the call of the model in which it has run; None outside of such calls.
        not_counted: the operator, and why it is not counted; empty for a product.
        sequences: as of :class:`MatrixProduct`.
        mask_share: as ``Product.mask_share``; a product of a backward that torch has run has that of its forward.
    """

    layer: str
    family: Family
    role: Role
    formats: tuple[str, str]
    sizes: Sizes
    kind: str = ""
    weight: Weight | None = None
    of: SeenProduct | None = None
    backward: bool = False
    gradients: int = 0
    call: ModelCall | None = None
    not_counted: str = ""
    sequences: tuple[PackedSequence, ...] | None = None
    mask_share: float | None = None

    @property
    def is_of_backward(self) -> bool:
        return self.backward or self.gemm in ("dgrad", "wgrad")

    def alone(self) -> list[SeenProduct]:
        """The product without references to its step (call, forward, module); one for each of packed sequences."""
        weight = None if self.weight is None else replace(self.weight, owner=None)
        made = replace(self, of=None, call=None, weight=weight, backward=self.is_of_backward, sequences=None)
        made.role = self.role if self.gemm == "other" else self.gemm
        made.mask_share = share = self.origin.mask_share if self.mask_share is None else self.mask_share
        if self.sequences is None:
            return [made]
        return [
            replace(made, sizes=each.sizes, mask_share=share if share in (None, 1.0) else each.causal)
            for each in self.sequences
        ]

    @property
    def reason(self) -> Reason | None:
        """Why it does not run in low precision, as far as its place shows."""
        if self.family in ("te", "te_ops", "lookup"):
            return None
        return Reason.ATTENTION if self.kind in (UNFUSED_KERNEL, FUSED, OTHER_KERNEL, ANY_KERNEL) else Reason.NOT_TE

    @property
    def origin(self) -> SeenProduct:
        """The product of the forward that it belongs to, also where it is one of a backward's backward."""
        return self if self.of is None else self.of.origin

    @property
    def gemm(self) -> ProductName:
        return self.role or ("other" if self.of is None else self.of.gemm)


def kind_of(module: torch.nn.Module) -> str:
    """The class of a module, in words for a reason."""
    kind = type(module)
    if kind.__name__ == UNFUSED:
        return UNFUSED_KERNEL
    return f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def summed(seen: Iterable[tuple[SeenProduct, float]]) -> Iterator[Product]:
    """The products of a step, each once, with what its calls amount to.

    Args:
        seen: products, and how often each runs in the step.
    """
    found: dict[tuple[str, ProductName, bool], list[tuple[SeenProduct, float]]] = {}
    for one, times in seen:
        found.setdefault((one.layer, one.gemm, one.is_of_backward), []).append((one, times))
    has_backward = any(backward for _, _, backward in found)
    for (layer, gemm, backward), calls in found.items():
        # The sizes are those of the largest call: another one may have no rows, as that of an expert without tokens.
        first = max((one for one, _ in calls), key=lambda one: math.prod(one.sizes))
        n, m, k, batch = first.sizes
        names = _OF_BACKWARD if backward and gemm not in OPERANDS else OPERAND_NAMES[gemm]
        formats = [" -> ".join(dict.fromkeys(one.formats[side] for one, _ in calls)) for side in (0, 1)]
        yield Product(
            layer,
            first.family,
            gemm,
            backward,
            n,
            m,
            k,
            batch,
            round(sum(times for _, times in calls)),
            round(sum(times * math.prod(one.sizes) for one, times in calls)),
            dict(zip(names, formats, strict=True)),
            reason=first.reason,
            reason_ref=first.kind,
            mask_share=_mask_share(calls),
        )
        weight = first.weight
        if weight is None or gemm != "fprop" or not has_backward:
            continue
        if (layer, "dgrad", True) not in found:
            yield Product.left_out(layer, first.family, "dgrad", NO_INPUT_GRADIENT)
        if not weight.trains:
            yield Product.left_out(layer, first.family, "wgrad", FROZEN)


def _mask_share(calls: Iterable[tuple[SeenProduct, float]]) -> float | None:
    """The share that the masks of calls leave of their multiply-adds; None if one is not known."""
    left = whole = 0.0
    for one, times in calls:
        share = one.origin.mask_share
        if share is None:
            return None
        macs = times * math.prod(one.sizes)
        left, whole = left + share * macs, whole + macs
    return left / whole if whole else None
