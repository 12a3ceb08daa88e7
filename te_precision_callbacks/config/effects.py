"""Effects of features on the GEMMs of a layer, and conflicts between features.

Both operands of a GEMM are quantized, or both are in high precision. So features that quantize an operand conflict with
features that run the GEMM in high precision. Only one feature can replace a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from te_precision_callbacks.base.suggestions import shown
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule, any_due

NAMESPACE = "transformer_engine"

BASE = "base"
"""nvidia-dlfw-inspect's own namespace, whose features are in a section without a namespace."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Effect:
    """The effect of a feature on the GEMMs of a layer.

    Attributes:
        modifies: replaced tensors, each with the GEMM that reads the replacement.
        quantizes: whether replacements are quantized.
        high_precision: GEMMs that run in high precision.
        needs_recipe: the required recipe of the layer, if any.
        schedules: GEMM and tensor (empty for all) -> the steps when the feature acts. An empty mapping: every step.
    """

    modifies: tuple[Pair, ...] = ()
    quantizes: bool = False
    high_precision: tuple[str, ...] = ()
    needs_recipe: str = ""
    schedules: Mapping[Pair, Schedule] = field(default_factory=dict, hash=False)

    @property
    def gemms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.high_precision, *dict(self.modifies))))

    def steps(self, gemm: str, tensor: str = "") -> tuple[Schedule, ...]:
        acting = []
        for (effect_gemm, effect_tensor), schedule in self.schedules.items():
            is_for_tensor = not tensor or effect_tensor in ("", tensor)
            if is_for_tensor and effect_gemm in ("", gemm):
                acting.append(schedule)
        return tuple(dict.fromkeys(acting)) or (EVERY_STEP,)

    def format_steps(self, gemm: str) -> str:
        """Format the steps of the effect on a GEMM: ``steps 0 to 99 and steps 500 on``."""
        return " and ".join(map(str, self.steps(gemm)))

    def at(self, iteration: int) -> Effect:
        if not self.schedules:
            return self
        return replace(
            self,
            modifies=tuple(pair for pair in self.modifies if any_due(self.steps(*pair), iteration)),
            high_precision=tuple(gemm for gemm in self.high_precision if any_due(self.steps(gemm), iteration)),
            schedules={},
        )


def spans_of(effects: Iterable[Effect]) -> dict[str, int]:
    """Find spans of steps with the same effects: text of the span -> a step in it.

    The span with the fewest changes comes first; equal spans are merged.
    """
    acting = list(effects)
    bounds: set[float] = {0, math.inf}
    for effect in acting:
        for schedule in effect.schedules.values():
            for start, end in schedule.intervals:
                bounds |= {start, end + 1}
    intervals_of_effects: dict[tuple[Effect, ...], list[tuple[int, float]]] = {}
    for begin, following in itertools.pairwise(sorted(bounds)):
        first = int(begin)
        step_effects = tuple(effect.at(first) for effect in acting)
        intervals = intervals_of_effects.setdefault(step_effects, [])
        if intervals and intervals[-1][1] == first - 1:
            first = intervals.pop()[0]
        intervals.append((first, following - 1))
    spans = sorted(
        intervals_of_effects.items(),
        key=lambda entry: sum(len(effect.modifies) + len(effect.high_precision) for effect in entry[0]),
    )
    return {str(Schedule(intervals=tuple(intervals))): intervals[0][0] for _, intervals in spans}


def _meets(some: Iterable[Schedule], other_schedules: Sequence[Schedule]) -> bool:
    return any(schedule.meets(other) for schedule, other in itertools.product(some, other_schedules))


class Acting(Protocol):
    @property
    def effects(self) -> Mapping[str, Effect]: ...

    def place(self, *keys: str | int) -> str: ...


def conflicts(sections: Iterable[Acting], layers: str) -> Iterator[str]:
    """Yield a message for each pair of features that conflict in the same layers.

    Upstream calls only one of two features that modify a tensor. If a feature quantizes both operands of a GEMM,
    upstream ignores a feature that forbids it; if a feature quantizes one operand, the GEMM fails.
    """
    acting: list[tuple[Acting, str, Effect]] = []
    for section in sections:
        acting += [(section, feature, effect) for feature, effect in section.effects.items()]
    for number, (section, feature, effect) in enumerate(acting):
        for owner, other, other_effect in acting[:number]:
            here = section.place(NAMESPACE, feature)
            there = owner.place(NAMESPACE, other)
            shared = [pair for pair in effect.modifies if pair in other_effect.modifies]
            both = next((pair for pair in shared if _meets(effect.steps(*pair), other_effect.steps(*pair))), None)
            if both is not None:
                gemm, tensor = both
                yield (
                    f"{here}: {shown(feature)} modifies the tensor {tensor!r} of the GEMM {gemm!r} in {layers}, and"
                    f" so does {shown(other)} in {there}. Remove the tensor or the GEMM from one feature, or give the"
                    " two different layers or steps."
                )
                continue
            disputed = _find_conflict(effect, other_effect)
            if disputed is not None:
                verb = "quantizes tensors of"
                opposite = "runs that GEMM in high precision"
                if not effect.quantizes:
                    verb = "runs in high precision"
                    opposite = "quantizes tensors of that GEMM"
                yield (
                    f"{here}: {shown(feature)} {verb} the GEMM {disputed!r} in {layers}, and {shown(other)} in"
                    f" {there} {opposite}. Remove the GEMM from one feature, or give the two different layers or"
                    " steps."
                )


def _find_conflict(first: Effect, other: Effect) -> str | None:
    """Return a GEMM that one feature runs in high precision while the other quantizes its tensors."""
    for quantizing, forbidding in ((first, other), (other, first)):
        if quantizing.quantizes:
            for gemm, tensor in quantizing.modifies:
                if gemm in forbidding.high_precision and _meets(quantizing.steps(gemm, tensor), forbidding.steps(gemm)):
                    return gemm
    return None
