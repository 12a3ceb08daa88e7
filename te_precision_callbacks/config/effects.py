"""The effects of features on the GEMMs of a layer, and which features exclude each other.

A GEMM multiplies two quantized tensors, or two in high precision. So a feature that quantizes one of its tensors and
one that keeps it in high precision exclude each other, on whichever tensors they act; and a tensor has one value, so
that one feature replaces it.
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
        modifies: the tensors that it replaces, each with the GEMM that gets it.
        quantizes: whether what it puts in their place is quantized.
        high_precision: the GEMMs that it runs in high precision.
    """

    modifies: tuple[Pair, ...] = ()
    quantizes: bool = False
    high_precision: tuple[str, ...] = ()


class Acting(Protocol):
    """A section of a config, with what its features do."""

    @property
    def effects(self) -> Mapping[str, Effect]:
        """Feature, as written -> what it does."""

    def place(self, *keys: str | int) -> str:
        """Where a key of the section stands."""


def conflicts(sections: Iterable[Acting], layers: str) -> Iterator[str]:
    """What is wrong with the features that meet in some layers: one text for each two that exclude each other.

    Upstream calls one of two that modify a tensor. Where one quantizes both operands of a GEMM, it does not ask the one
    that forbids it; where it quantizes one of them, the run ends in the GEMM.

    Args:
        sections: what meets in the layers.
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
    """A GEMM of which one feature quantizes tensors, and which the other runs in high precision."""
    for quantizing, forbidding in ((one, other), (other, one)):
        if quantizing.quantizes:
            for gemm, _ in quantizing.modifies:
                if gemm in forbidding.high_precision:
                    return gemm
    return None
