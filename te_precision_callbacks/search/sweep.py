"""The sweep: the effect of each group of GEMMs in low precision, with all others in high precision.

Blocks come first, then the layers of blocks with large effects, then the GEMMs of such layers. A group is split if it
has more than a tenth of the sum of the effects on its level, so at most ten groups of a level are. This bounds the
passes, for each batch: 3 + blocks + layers of 10 blocks + 30.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.search.measuring import EffectMeasurement, GradientEffect
from te_precision_callbacks.search.results import Results
from te_precision_callbacks.search.units import Choice, LayerGroup, Units, merged, split_by_block, split_by_gemm

Progress = Callable[[Sequence[Any], str], Iterable[Any]]
"""Shows the progress over a sequence, with its name."""

_LARGE = 0.1
"""Share of the effects of a level above which a group is split."""


@dataclass(frozen=True)
class MeasuredGroup:
    """A group and its effect in low precision alone.

    Attributes:
        level: ``block``, ``layer`` or ``gemm``.
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

    def effect(self, choice: Choice) -> GradientEffect:
        """Measure a choice of GEMMs in high precision, unless the file has it."""
        text = ",".join(sorted(f"{name} {gemm}" for name, gemm in choice))
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self._results.effects:
            self._results.effects[key] = self._measurement.measure(choice)
            self._results.save()
        return self._results.effects[key]

    def run(self, atoms: Sequence[LayerGroup], *, by_gemm: bool) -> list[MeasuredGroup]:
        """Measure groups, level by level; a level that cannot be completed in time is left out."""
        blocks = split_by_block(atoms)
        parts: dict[tuple[str, str], list[LayerGroup]] = {}  # a block of one layer has the layer's name
        level = [merged(name, members) for name, members in blocks.items()]
        measured: list[MeasuredGroup] = []
        for kind in ("block", "layer", "gemm"):
            effects = self._level(kind, level)
            if effects is None:
                if kind == "block":
                    self._results.stop_in("the blocks")
                break
            total = sum(effect.error for effect in effects) or 1.0
            large = [effect.error > _LARGE * total for effect in effects]
            for group, effect, is_large in zip(level, effects, large, strict=True):
                measured.append(MeasuredGroup(group, kind, effect))
                parts[kind, group.name] = []
                if is_large and kind == "block":
                    parts[kind, group.name] = blocks[group.name]
                elif is_large and kind == "layer" and by_gemm:
                    parts[kind, group.name] = split_by_gemm(group)
            level = [part for group in level for part in parts[kind, group.name]]
            if not level:
                break
        seen = {entry.group.name for entry in measured if entry.level != "block"}
        return [
            MeasuredGroup(entry.group, entry.level, entry.effect, _is_split(parts[entry.level, entry.group.name], seen))
            for entry in measured
        ]

    def _level(self, kind: str, groups: Sequence[LayerGroup]) -> list[GradientEffect] | None:
        effects = []
        for group in self._progress(groups, f"{kind}s"):
            if self._is_late():
                return None
            effects.append(self.effect(self._all - group.switches))
        return effects


def _is_split(parts: Sequence[LayerGroup], seen: set[str]) -> bool:
    return bool(parts) and all(part.name in seen for part in parts)
