"""What a comparison cannot be made of."""

from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class ComparisonError(PrecisionDebugError, ValueError):
    """Runs or steps that cannot be compared: nothing pairs, or there is no such step."""
