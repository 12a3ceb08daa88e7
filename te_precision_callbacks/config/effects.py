"""The effects of features on the GEMMs of a layer, and which features exclude each other.

A GEMM multiplies two quantized tensors, or two in high precision. So a feature that quantizes a tensor of a GEMM and a
feature that runs the GEMM in high precision exclude each other, on whichever tensors they act. A tensor has one value,
so only one feature can replace it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from te_precision_callbacks.config.problems import shown

NAMESPACE = "transformer_engine"
"""The namespace whose features have schemas."""

Pair = tuple[str, str]
"""A GEMM and one of its tensors."""


@dataclass(frozen=True)
class Effect:
    """What a feature does to the GEMMs of a layer.

    Attributes:
        modifies: the tensors that the feature replaces, each with the GEMM that gets the replacement.
        quantizes: whether the replacements are quantized.
        high_precision: the GEMMs that the feature runs in high precision.
        needs_recipe: the recipe that the layer has to run; empty if any will do.
    """

    modifies: tuple[Pair, ...] = ()
    quantizes: bool = False
    high_precision: tuple[str, ...] = ()
    needs_recipe: str = ""


class Acting(Protocol):
    """A section of a config, with the effects of its features."""

    @property
    def effects(self) -> Mapping[str, Effect]:
        """Feature, as written -> its effect."""

    def place(self, *keys: str | int) -> str:
        """The place of a key of the section."""


def conflicts(sections: Iterable[Acting], layers: str) -> Iterator[str]:
    """The conflicts between features that act on the same layers: one text for each pair that exclude each other.

    Upstream calls only one of two features that modify a tensor. If a feature quantizes both operands of a GEMM,
    upstream does not ask the feature that forbids it; if a feature quantizes one operand, the run fails in the GEMM.

    Args:
        sections: the sections that act on the layers.
        layers: these layers, for the text.
    """
    acting = [(section, feature, effect) for section in sections for feature, effect in section.effects.items()]
    for number, (section, feature, effect) in enumerate(acting):
        for owner, other, others in acting[:number]:
            here, there = section.place(NAMESPACE, feature), owner.place(NAMESPACE, other)
            both = next((pair for pair in effect.modifies if pair in others.modifies), None)
            if both is not None:
                gemm, tensor = both
                yield (
                    f"{here}: {shown(feature)} modifies the tensor {tensor!r} of the GEMM {gemm!r} in {layers}, and so"
                    f" does {shown(other)} in {there}. Only one feature can modify it: take the tensor or the GEMM out"
                    " of the other feature, or make their layers differ."
                )
                continue
            disputed = _both_ways(effect, others)
            if disputed is not None:
                verb, opposite = ("quantizes tensors of", "runs that GEMM in high precision")
                if not effect.quantizes:
                    verb, opposite = ("runs in high precision", "quantizes tensors of that GEMM")
                yield (
                    f"{here}: {shown(feature)} {verb} the GEMM {disputed!r} in {layers}, and {shown(other)} in {there}"
                    f" {opposite}. A GEMM runs in one way only: take the GEMM out of one of the two features, or make"
                    " their layers differ."
                )


def _both_ways(one: Effect, other: Effect) -> str | None:
    """A GEMM that one feature runs in high precision while the other quantizes its tensors."""
    for quantizing, forbidding in ((one, other), (other, one)):
        if quantizing.quantizes:
            for gemm, _ in quantizing.modifies:
                if gemm in forbidding.high_precision:
                    return gemm
    return None
