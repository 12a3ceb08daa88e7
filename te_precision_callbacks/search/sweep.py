"""The sweep: the effect of each group of GEMMs in low precision, with all others in high precision.

Blocks come first, then the layers of blocks with large effects, the GEMMs of such layers, and the operands of such
GEMMs. A group is split if it has more than a tenth of the sum of the effects on its level, so at most ten groups of a
level are. This bounds the passes, for each batch: 3 + blocks + layers of 10 blocks + 50.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from te_precision_callbacks.search.factory import custom_recipe
from te_precision_callbacks.search.measuring import EffectMeasurement, GradientEffect, Make
from te_precision_callbacks.search.results import Results
from te_precision_callbacks.search.units import (
    Choice,
    LayerGroup,
    Units,
    merged,
    split_by_block,
    split_by_gemm,
    split_by_operand,
)

Progress = Callable[[Sequence[Any], str], Iterable[Any]]
"""Shows the progress over a sequence, with its name."""

_LARGE = 0.1
"""Share of the effects of a level above which a group is split."""


@dataclass(frozen=True)
class MeasuredGroup:
    """A group and its effect in low precision alone.

    Attributes:
        level: ``block``, ``layer``, ``gemm`` or ``operand``.
        is_split: whether its parts were measured too.
    """

    group: LayerGroup
    level: str
    effect: GradientEffect
    is_split: bool = False


class Sweep:
    """Measures choices, each once; results are kept in a file.

    Args:
        is_late: whether the time is up, equal on all ranks.
    """

    def __init__(
        self,
        units: Units,
        measurement: EffectMeasurement,
        results: Results,
        progress: Progress,
        is_late: Callable[[], bool],
    ) -> None:
        self._all = merged("", units.atoms((), whole_modules=False)).switches
        self._measurement = measurement
        self._results = results
        self._progress = progress
        self._is_late = is_late

    def effect(self, choice: Choice, operand: str = "") -> GradientEffect:
        """Measure a choice of GEMMs in high precision, unless the file has it; of the others, one operand or both."""
        text = ",".join(sorted(f"{name} {gemm}" for name, gemm in choice)) + operand
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self._results.effects:
            make: Make = custom_recipe
            if operand:
                from te_precision_callbacks.search.operands import operand_recipe

                make = functools.partial(operand_recipe, operand=operand)
            self._results.effects[key] = self._measurement.measure(choice, make)
            self._results.save()
        return self._results.effects[key]

    def run(self, atoms: Sequence[LayerGroup], *, by_gemm: bool) -> list[MeasuredGroup]:
        """Measure groups, level by level; a level that cannot be completed in time is left out."""
        blocks = split_by_block(atoms)
        splits: dict[str, Callable[[LayerGroup], list[LayerGroup]]] = {"block": lambda block: blocks[block.name]}
        if by_gemm:
            splits |= {"layer": split_by_gemm, "gemm": split_by_operand}
        groups = [merged(name, members) for name, members in blocks.items()]
        measured: list[MeasuredGroup] = []
        parents: list[int] = []
        for level in ("block", "layer", "gemm", "operand"):
            effects = self._level(level, groups)
            if effects is None:
                if level == "block":
                    self._results.stop_in("the blocks")
                break
            for number in parents:
                measured[number] = replace(measured[number], is_split=True)
            parents.clear()
            total = sum(effect.error for effect in effects) or 1.0
            parts: list[LayerGroup] = []
            for group, effect in zip(groups, effects, strict=True):
                if level in splits and effect.error > _LARGE * total:
                    parents.append(len(measured))
                    parts += splits[level](group)
                measured.append(MeasuredGroup(group, level, effect))
            groups = parts
        return measured

    def _level(self, kind: str, groups: Sequence[LayerGroup]) -> list[GradientEffect] | None:
        effects = []
        for group in self._progress(groups, f"{kind}s"):
            if self._is_late():
                return None
            effects.append(self.effect(self._all - group.switches, group.operand))
        return effects
