"""The exceptions of dumps."""

from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class DumpError(PrecisionDebugError, RuntimeError):
    """A tensor cannot be dumped, or a dump cannot be written, read or used."""


class NotADumpError(DumpError):
    """A file is not a dump: of another kind or version, truncated, or damaged."""
