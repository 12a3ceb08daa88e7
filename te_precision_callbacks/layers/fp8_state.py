"""The state of delayed scaling in modules and operations of Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def delayed_states(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the states of delayed scaling of a module or operation, with scale and amax history.

    Read from Transformer Engine 2.20.2: ``DelayedScalingRecipeState``, and a ``CustomRecipeState`` that contains one.
    """
    for meta in metas_of(module):
        for key in ("scaling_fwd", "scaling_bwd"):
            state = delayed_state(meta, key)
            if state is not None:
                yield state


def metas_of(module: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield the FP8 metadata of a module (``fp8_meta``) or an operation (``_fp8_metas``)."""
    attributes = vars(module)
    yield from filter(None, (attributes.get("fp8_meta"), *(attributes.get("_fp8_metas") or {}).values()))


def delayed_state(meta: Mapping[str, Any] | None, direction: str) -> Any:
    """Return the state of delayed scaling in an ``fp8_meta``, if any.

    Args:
        direction: ``scaling_fwd`` or ``scaling_bwd``.
    """
    state = (meta or {}).get(direction)
    if getattr(state, "amax_history", None) is None:
        return None
    return state


def is_in_checkpoints(module: torch.nn.Module) -> bool:
    """Return whether a module's ``_extra_state`` contains its state of delayed scaling: after a forward in FP8.

    Read from Transformer Engine 2.20.2, ``pytorch/module/base.py: get_extra_state``.
    """
    attributes = vars(module)
    meta = attributes.get("fp8_meta") or {}
    return bool(meta.get("fp8_checkpoint") or attributes.get("fp8") or attributes.get("fp8_calibration"))
