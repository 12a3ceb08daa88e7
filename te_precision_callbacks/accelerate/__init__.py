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

from te_precision_callbacks.accelerate.debugger import PrecisionDebugger
from te_precision_callbacks.accelerate.unconverted import convert_to_te, unconverted_layers

__all__ = ["PrecisionDebugger", "convert_to_te", "unconverted_layers"]
