"""Precision debugging for Accelerate: one object around the training loop.

Usage::

    from te_precision_callbacks.accelerate import PrecisionDebugger

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with PrecisionDebugger(accelerator, model, "config.yaml") as debugger:
        for batch in loader:
            with accelerator.accumulate(model):
                ...
            debugger.step()
"""

from __future__ import annotations

from te_precision_callbacks.base.errors import MissingExtraError

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise MissingExtraError("te_precision_callbacks.accelerate", "accelerate") from error

from te_precision_callbacks.accelerate.debugger import STATE_FILE, PrecisionDebugger, scales_loss
from te_precision_callbacks.accelerate.unconverted import convert_to_te, unconverted_layers, warn_of_unconverted

__all__ = [
    "STATE_FILE",
    "PrecisionDebugger",
    "convert_to_te",
    "scales_loss",
    "unconverted_layers",
    "warn_of_unconverted",
]
