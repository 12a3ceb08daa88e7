"""The exception of the reader of traces."""

from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class TraceError(PrecisionDebugError, ValueError):
    """A file is no trace of torch.profiler, is cut off, or is of another run."""
