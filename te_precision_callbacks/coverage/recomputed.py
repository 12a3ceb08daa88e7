"""Knows which layers of Transformer Engine a checkpoint computes again outside of the autocast that they first ran in.

A reentrant checkpoint of torch keeps no autocast of Transformer Engine: where it stands outside of the checkpointed
part, as in Accelerate, the forward that the backward belongs to runs in high precision.
"""

from __future__ import annotations

import torch

from te_precision_callbacks.coverage.gemm_events import GemmEvent
from te_precision_callbacks.layers.forwards import NO_BACKWARD, ForwardKind


class Recomputed:
    """Compares the two forwards of reentrant checkpoints, in the step in which products are counted.

    Attributes:
        outside: the layers whose second forward had no recipe, though the first one had.
    """

    def __init__(self) -> None:
        self.outside: set[str] = set()
        self._in_recipe: set[str] = set()

    def note(self, event: GemmEvent) -> None:
        """Note a GEMM; those of forwards count."""
        if event.gemm != "fprop":
            return
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        if event.kind is ForwardKind.SILENT and event.recipe and not in_backward:
            self._in_recipe.add(event.layer)
        elif event.kind is ForwardKind.OBSERVED and not event.recipe and in_backward and event.layer in self._in_recipe:
            self.outside.add(event.layer)
