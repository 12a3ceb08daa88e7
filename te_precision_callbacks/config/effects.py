"""The effects of features on the GEMMs of a layer, and which features exclude each other.

A GEMM multiplies two quantized tensors, or two in high precision. So a feature that quantizes a tensor of a GEMM and a
feature that runs the GEMM in high precision exclude each other, on whichever tensors they act. A tensor has one value,
so only one feature can replace it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from te_precision_callbacks.config.problems import shown
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule

NAMESPACE = "transformer_engine"
"""The namespace whose features have schemas."""

BASE = "base"
"""nvidia-dlfw-inspect's own namespace, whose features are in a section without a namespace."""

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
        schedules: GEMM and tensor -> the steps in which the feature acts there, an empty name for all. Without any, it
            acts in every step.
    """

    modifies: tuple[Pair, ...] = ()
    quantizes: bool = False
    high_precision: tuple[str, ...] = ()
    needs_recipe: str = ""
    schedules: Mapping[Pair, Schedule] = field(default_factory=dict)

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs that it changes."""
        return tuple(dict.fromkeys((*self.high_precision, *(gemm for gemm, _ in self.modifies))))

    def steps(self, gemm: str, tensor: str = "") -> tuple[Schedule, ...]:
        """The steps in which the feature acts on a GEMM, or on a tensor of it: those of any of the schedules."""
        found = [
            schedule
            for (of_gemm, of_tensor), schedule in self.schedules.items()
            if of_gemm in ("", gemm) and (not tensor or of_tensor in ("", tensor))
        ]
        return tuple(dict.fromkeys(found)) or (EVERY_STEP,)

    def steps_in_words(self, gemm: str = "") -> str:
        """The steps in which the feature acts, or acts on a GEMM: ``steps 0 to 99 and steps 500 on``."""
        found = self.steps(gemm) if gemm else dict.fromkeys(self.schedules.values()) or (EVERY_STEP,)
        return " and ".join(map(str, found))

    def at(self, iteration: int) -> Effect:
        """The effect in an iteration."""
        if not self.schedules:
            return self
        return replace(
            self,
            modifies=tuple(pair for pair in self.modifies if _in_any(self.steps(*pair), iteration)),
            high_precision=tuple(gemm for gemm in self.high_precision if _in_any(self.steps(gemm), iteration)),
            schedules={},
        )


def spans_of(effects: Iterable[Effect]) -> dict[str, int]:
    """The spans of steps in which features do the same, in words -> a step of the span.

    The span in which least is changed comes first. Spans that are apart and alike are one.

    Args:
        effects: the features' effects.
    """
    acting = list(effects)
    schedules = {schedule for effect in acting for schedule in effect.schedules.values()}
    bounds = {bound for schedule in schedules for start, end in schedule.intervals for bound in (start, end + 1)}
    firsts = sorted({0, *(int(bound) for bound in bounds if not math.isinf(bound))})
    alike: dict[tuple[tuple[tuple[Pair, ...], tuple[str, ...]], ...], list[tuple[int, float]]] = {}
    for first, following in zip(firsts, [*firsts[1:], math.inf], strict=True):
        doing = tuple((now.modifies, now.high_precision) for now in (effect.at(first) for effect in acting))
        intervals = alike.setdefault(doing, [])
        if intervals and intervals[-1][1] == first - 1:
            first = intervals.pop()[0]
        intervals.append((first, following - 1))
    found = sorted(alike.items(), key=lambda entry: sum(len(pairs) + len(high) for pairs, high in entry[0]))
    return {str(Schedule(intervals=tuple(intervals))): intervals[0][0] for _, intervals in found}


def _in_any(schedules: Iterable[Schedule], iteration: int) -> bool:
    return any(schedule.at(iteration)[0] for schedule in schedules)


def _meet(some: Iterable[Schedule], others: Sequence[Schedule]) -> bool:
    """Whether a step is in one of the first schedules and in one of the others."""
    return any(one.meets(other) for one in some for other in others)


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
            shared = (pair for pair in effect.modifies if pair in others.modifies)
            both = next((pair for pair in shared if _meet(effect.steps(*pair), others.steps(*pair))), None)
            if both is not None:
                gemm, tensor = both
                yield (
                    f"{here}: {shown(feature)} modifies the tensor {tensor!r} of the GEMM {gemm!r} in {layers}, and so"
                    f" does {shown(other)} in {there}. Only one feature can modify it: take the tensor or the GEMM out"
                    " of the other feature, or make their layers or their steps differ."
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
                    " their layers or their steps differ."
                )


def _both_ways(one: Effect, other: Effect) -> str | None:
    """A GEMM that one feature runs in high precision while the other quantizes its tensors."""
    for quantizing, forbidding in ((one, other), (other, one)):
        if quantizing.quantizes:
            for gemm, tensor in quantizing.modifies:
                if gemm in forbidding.high_precision and _meet(quantizing.steps(gemm, tensor), forbidding.steps(gemm)):
                    return gemm
    return None
