"""Which layers ran delayed scaling before it had a scale.

Its scale follows from the amaxes of earlier steps. In a layer's first step there are none, and it is 1: most of a small
gradient underflows. The tensors of a run that resumes have the scales of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from te_precision_callbacks.naming import NamedModule


class DelayedScalingLayers:
    """Follows which layers run delayed scaling, from one step with statistics to the next."""

    def __init__(self) -> None:
        self._before: frozenset[str] | None = None

    def unscaled(self, iteration: int, modules: Iterable[NamedModule], layers: Collection[str]) -> frozenset[str]:
        """The layers that had no scale in a step: those of iteration 0, and those that ran something else before.

        Args:
            iteration: the debug iteration of the step.
            modules: those of this rank.
            layers: those with statistics. What another rank's layers run is not known here; they are taken as ours.
        """
        ours = {layer.name: module for module in modules for layer in module.layers}
        delayed = frozenset(name for name, module in ours.items() if _runs_delayed_scaling(module.module))
        before, self._before = self._before, delayed
        if before is None:
            before = frozenset() if iteration == 0 else delayed
        found = delayed - before
        return found.union(layer for layer in layers if layer not in ours) if found else found


def _runs_delayed_scaling(module: torch.nn.Module) -> bool:
    """Whether its last forward did. Read from TE 2.20.2, ``pytorch/module/base.py: init_fp8_metadata``."""
    recipe = getattr(module, "fp8_meta", {}).get("recipe")
    return bool(getattr(module, "fp8", False)) and recipe is not None and bool(recipe.delayed())
