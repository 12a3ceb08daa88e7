"""Finds the layers that ran delayed scaling before they had a scale.

The scale of delayed scaling follows from the amaxes of earlier steps. In a layer's first step there are none, and the
scale is 1: most of a small gradient underflows. Whether it is the first one is read from the layer's state, as its
first forward finds it: a run that resumes has the scales of its checkpoint, or none where the checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.fp8_state import delayed_states
from te_precision_callbacks.naming import NamedModule


class _Look(NamedTuple):
    """The state of a module that was new in an iteration: its scale, and whether it has been made of an amax yet."""

    scale: torch.Tensor
    iteration: int
    is_empty: torch.Tensor


class DelayedScalingLayers:
    """Looks at each state of delayed scaling once, in the first forward with features that meets it."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def look(self, module: torch.nn.Module, iteration: int) -> None:
        """Take note of a module that is going to compute; the device is not waited for.

        Args:
            module: of Transformer Engine, in a forward of training for which it has prepared itself.
            iteration: the debug iteration.
        """
        states = list(delayed_states(module)) if module.fp8 else []
        known = self._looks.get(id(module))
        if states and (known is None or known.scale is not states[0].scale):
            is_empty = torch.stack([_is_empty(state) for state in states]).any()
            self._looks[id(module)] = _Look(states[0].scale, iteration, is_empty)

    def unscaled(self, iteration: int, modules: Iterable[NamedModule], layers: Collection[str]) -> frozenset[str]:
        """The layers that had no scale in a step: in the step in which their state is new, where it was empty.

        Args:
            iteration: the debug iteration of the step.
            modules: those of this rank.
            layers: those with statistics. What another rank's layers run is not known here; they are taken as ours.
        """
        ours = {layer.name: id(module.module) for module in modules for layer in module.layers}
        new = {key: look.is_empty for key, look in self._looks.items() if look.iteration == iteration}
        if not new:
            return frozenset()
        device = next(iter(new.values())).device
        empty = torch.stack([flag.to(device) for flag in new.values()]).tolist()
        without = {key for key, is_empty in zip(new, empty, strict=True) if is_empty}
        found = frozenset(name for name, key in ours.items() if key in without)
        return found.union(layer for layer in layers if layer not in ours) if found else found


def _is_empty(state: Any) -> torch.Tensor:
    """Whether no scale of a state has been made of an amax yet: all are 1, and the history has none of an earlier step.

    Its first row gathers the amaxes of now, those of an evaluation among them, until the scales are made. Read from
    Transformer Engine 2.20.2, ``common/recipe/delayed_scaling.cu`` and ``quantization.py: _update_amax_history``.
    """
    has_scale: torch.Tensor = (state.scale != 1).any() | (state.amax_history[1:] != 0).any()
    return ~has_scale
