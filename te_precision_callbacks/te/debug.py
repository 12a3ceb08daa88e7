"""Transformer Engine's debug path: its state, its quantizers, and its buffers of statistics.

Importing this module imports Transformer Engine. Read from 2.20.2: ``debug/pytorch`` and ``debug/features/utils``.
"""

from __future__ import annotations

import torch
from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS
from transformer_engine.debug.pytorch import debug_quantization
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.debug.pytorch.utils import any_feature_enabled

from te_precision_callbacks.te.state import cached_weights

STATE = TEDebugState, ("debug_enabled", "weight_tensor_tp_group_reduce", "layers_initialized")
"""The owner of the global state, and its attributes."""


STATE_NAME = TEDebugState.__name__


def is_debugging() -> bool:
    return bool(TEDebugState.debug_enabled)


def begin_debugging() -> None:
    """Enable the debug path, as a class attribute also in modules built before.

    Modules built from now on would otherwise raise an error that debugging started too late.
    """
    TEDebugState.debug_enabled = True


def restore_log_stats() -> None:
    """Remove a replaced ``STATS_BUFFERS.log_stats``."""
    vars(STATS_BUFFERS).pop("log_stats", None)


def drop_debug_weights(module: torch.nn.Module) -> None:
    """Drop cached weights quantized under debugging, which would keep the session's quantizers alive."""
    cached = cached_weights(module)
    for name, weight in list(cached.items()):
        if isinstance(weight, debug_quantization.DebugQuantizedTensor):
            del cached[name]
