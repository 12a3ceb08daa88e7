"""The exceptions of this package, from one base class.

Each part derives its own from :class:`PrecisionDebugError`, so that ``except PrecisionDebugError`` catches all that
this package raises on purpose, and nothing else.
"""

from __future__ import annotations

__all__ = ["FeatureError", "MissingExtraError", "OptionError", "PrecisionDebugError"]


class PrecisionDebugError(Exception):
    """Base class of every exception that this package raises on purpose."""


class OptionError(PrecisionDebugError, TypeError):
    """A keyword that does not exist, or a value that it does not take."""


class FeatureError(PrecisionDebugError, RuntimeError):
    """A debug feature failed while it was called.

    Args:
        message: the whole of it.
        feature, call, layer: which feature failed, in which call, for which layer; empty where it is not of one.
        failure: what went wrong, in words that are the same in each layer; the message where nothing is given.
    """

    def __init__(self, message: str, *, feature: str = "", call: str = "", layer: str = "", failure: str = "") -> None:
        super().__init__(message)
        self.feature = feature
        self.call = call
        self.layer = layer
        self.failure = failure or message

    @property
    def kind(self) -> tuple[str, str, str]:
        """What is equal for the same failure in other layers."""
        return self.feature, self.call, self.failure


class MissingExtraError(PrecisionDebugError, ImportError):
    """A module was imported whose optional dependency is not installed.

    Args:
        module: what was imported.
        extra: the extra of this package that brings the dependency.
    """

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module} needs a package that is not installed. Install it with:"
            f" pip install 'te-precision-callbacks[{extra}]'"
        )
