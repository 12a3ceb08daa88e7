"""The exceptions of this package, from one base class.

Each part derives its own from :class:`PrecisionDebugError`, so that ``except PrecisionDebugError`` catches all that
this package raises on purpose, and nothing else.
"""

from __future__ import annotations


class PrecisionDebugError(Exception):
    """Base class of every exception that this package raises on purpose."""
