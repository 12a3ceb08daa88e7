"""The sweep: the effect of each group of GEMMs in low precision, with all others in high precision.

Blocks come first, then the layers of blocks with large effects, the GEMMs of such layers, and the operands of such
GEMMs. A group is split if it has more than a tenth of the sum of the effects on its level, so at most ten groups of a
level are. This bounds the passes, for each batch: 3 + blocks + layers of 10 blocks + 50.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from te_precision_callbacks.search.measuring import GradientEffect
from te_precision_callbacks.search.units import (
    LayerGroup,
    merged,
    split_by_block,
    split_by_gemm,
    split_by_operand,
)

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


def sweep(
    atoms: Sequence[LayerGroup],
    measure: Callable[[str, Sequence[LayerGroup]], list[GradientEffect] | None],
    *,
    by_gemm: bool,
) -> list[MeasuredGroup]:
    """Measure groups, level by level; a level that cannot be completed in time is left out.

    Args:
        measure: returns the effects of the groups of a level, each in low precision alone; None if the time is up.
        by_gemm: whether layers with large effects are split.
    """
    blocks = split_by_block(atoms)
    splits: dict[str, Callable[[LayerGroup], list[LayerGroup]]] = {"block": lambda block: blocks[block.name]}
    if by_gemm:
        splits |= {"layer": split_by_gemm, "gemm": split_by_operand}
    groups = list(map(merged, blocks, blocks.values()))
    measured: list[MeasuredGroup] = []
    parents: list[int] = []
    for level in ("block", "layer", "gemm", "operand"):
        effects = measure(level, groups)
        if effects is None:
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
