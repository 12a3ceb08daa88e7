"""Precision debugging for NVIDIA Transformer Engine, one callback away.

Usage::

    import lightning as L
    from te_precision_callbacks import PrecisionDebugCallback

    trainer = L.Trainer(callbacks=[PrecisionDebugCallback("config.yaml")])

Importing this package is quick and imports no framework; each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.accelerate import PrecisionDebugger
    from te_precision_callbacks.base.errors import PrecisionDebugError
    from te_precision_callbacks.config import ConfigError, load_config
    from te_precision_callbacks.fabric import PrecisionDebugFabricCallback
    from te_precision_callbacks.lightning import PrecisionDebugCallback
    from te_precision_callbacks.session import InspectSession
    from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback

__all__ = [
    "ConfigError",
    "InspectSession",
    "PrecisionDebugCallback",
    "PrecisionDebugError",
    "PrecisionDebugFabricCallback",
    "PrecisionDebugTrainerCallback",
    "PrecisionDebugger",
    "load_config",
]

__getattr__, __dir__ = lazy_names(__name__)
