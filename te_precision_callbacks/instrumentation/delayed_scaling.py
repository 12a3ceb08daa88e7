"""The state of delayed scaling: layers that ran before they had a scale, and layers that only a CUDA graph runs.

In a layer's first step the scale is 1, so most of a small gradient underflows. The layer's state before its first
forward shows this: a resumed run may have the scales of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.layers.fp8_state import delayed_state, delayed_states
from te_precision_callbacks.layers.naming import NamedModule


class _Look(NamedTuple):
    """State of a module that was new in an iteration, and whether its scale is still the initial one."""

    scale: torch.Tensor
    iteration: int
    is_empty: torch.Tensor


class DelayedScalingLayers:
    """Reads each state of delayed scaling once, in the first forward with features that uses it."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}

    def look(self, module: torch.nn.Module, iteration: int) -> None:
        """Read a module's state in a training forward, without waiting for the device."""
        states = list(delayed_states(module)) if module.fp8 else []
        known = self._looks.get(id(module))
        if states and (known is None or known.scale is not states[0].scale):
            is_empty = torch.stack([_is_empty(state) for state in states]).any()
            self._looks[id(module)] = _Look(states[0].scale, iteration, is_empty)

    def unscaled(self, iteration: int, modules: Iterable[NamedModule], layers: Collection[str]) -> frozenset[str]:
        """Return the layers with a new, empty state in a step.

        Args:
            layers: the layers with statistics; layers of other ranks count if one of this rank does.
        """
        ours = {layer.name: id(module.module) for module in modules for layer in module.layers}
        new = {key: look.is_empty for key, look in self._looks.items() if look.iteration == iteration}
        if not new:
            return frozenset()
        device = next(iter(new.values())).device
        empty = torch.stack([flag.to(device) for flag in new.values()]).tolist()
        without = {key for key, is_empty in zip(new, empty, strict=True) if is_empty}
        unscaled = frozenset(name for name, key in ours.items() if key in without)
        return unscaled.union(layer for layer in layers if layer not in ours) if unscaled else unscaled


def _is_empty(state: Any) -> torch.Tensor:
    """Return whether all scales are 1, and the history has no amax of an earlier step.

    The history's first row holds the current amaxes until the scales are updated. Read from Transformer Engine 2.20.2,
    ``common/recipe/delayed_scaling.cu`` and ``quantization.py: _update_amax_history``.
    """
    has_scale: torch.Tensor = (state.scale != 1).any() | state.amax_history[1:].any()
    return ~has_scale


_STATES = (("scaling_fwd", "activation", 0), ("scaling_fwd", "weight", 1), ("scaling_bwd", "gradient", 0))
"""State, tensor, and its position among the tensors of a layer (2.20.2, ``quantization.py: FP8FwdTensorIdx``)."""


def scales_in_graph(module: torch.nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``<layer>_<tensor>_scale_inv_max`` and ``_cur_amax`` of layers whose replays update them in place.

    The history's last row has the amaxes of the last forward and backward, once the scales are updated.

    Args:
        layers: the names of the module's layers.
    """
    for direction, tensor, position in _STATES:
        state = delayed_state(vars(module).get("fp8_meta"), direction)
        if state is not None:
            scales, histories = state.scale.chunk(len(layers)), state.amax_history.chunk(len(layers), 1)
            for layer, scale, history in zip(layers, scales, histories, strict=True):
                yield f"{layer}_{tensor}_scale_inv_max", 1 / scale[position]
                if len(history) > 1:
                    yield f"{layer}_{tensor}_cur_amax", history[-1, position]
