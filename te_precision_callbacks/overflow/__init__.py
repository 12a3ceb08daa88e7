"""Activation overflow: finds the first inf or nan in activations and gradients, and reports the frames before it.

Usage::

    from te_precision_callbacks.debug_utils import DebugActivationOverflow

    debug_overflow = DebugActivationOverflow(model)

See :class:`DebugActivationOverflow`, and :func:`detect_overflow` for checks inside a forward.
"""

from te_precision_callbacks.overflow.detector import DebugActivationOverflow, detect_overflow
from te_precision_callbacks.overflow.errors import (
    AbortAfterBatch,
    ActivationOverflowError,
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
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
