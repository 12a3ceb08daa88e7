"""Precision debugging for NVIDIA Transformer Engine, one callback away.

Usage::

    import lightning as L
    from te_precision_callbacks import PrecisionDebugCallback

    trainer = L.Trainer(callbacks=[PrecisionDebugCallback("config.yaml")])

Importing this package is quick and imports no framework; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_precision_callbacks.accelerate import PrecisionDebugger
    from te_precision_callbacks.config import ConfigError, load_config
    from te_precision_callbacks.errors import PrecisionDebugError
    from te_precision_callbacks.lightning import PrecisionDebugCallback
    from te_precision_callbacks.session import InspectSession
    from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback

__all__ = [
    "ConfigError",
    "InspectSession",
    "PrecisionDebugCallback",
    "PrecisionDebugError",
    "PrecisionDebugTrainerCallback",
    "PrecisionDebugger",
    "load_config",
]

_HOMES = {
    "ConfigError": "te_precision_callbacks.config",
    "InspectSession": "te_precision_callbacks.session",
    "PrecisionDebugCallback": "te_precision_callbacks.lightning",
    "PrecisionDebugError": "te_precision_callbacks.errors",
    "PrecisionDebugTrainerCallback": "te_precision_callbacks.transformers",
    "PrecisionDebugger": "te_precision_callbacks.accelerate",
    "load_config": "te_precision_callbacks.config",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
