"""Activation overflow detection, under the name in ``transformers.debug_utils``.

Everything is in :mod:`te_precision_callbacks.overflow`.
"""

from te_precision_callbacks.overflow import (
    AbortAfterBatch,
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
    detect_overflow,
)

__all__ = [
    "AbortAfterBatch",
    "ActivationOverflowError",
    "DebugActivationOverflow",
    "DetectionFailedError",
    "OverflowDetectorError",
    "OverflowOptionError",
    "detect_overflow",
]
