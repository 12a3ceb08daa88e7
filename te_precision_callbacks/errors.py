"""The exceptions of this package, from one base class.

Each part derives its exceptions from :class:`PrecisionDebugError`, so ``except PrecisionDebugError`` catches everything
that this package raises on purpose, and nothing else.
"""

from __future__ import annotations

__all__ = ["FeatureError", "MissingExtraError", "OptionError", "PrecisionDebugError"]


class PrecisionDebugError(Exception):
    """Base class of every exception that this package raises on purpose."""


class OptionError(PrecisionDebugError, TypeError):
    """A keyword does not exist, or does not accept the given value."""


class FeatureError(PrecisionDebugError, RuntimeError):
    """A debug feature failed while it was called.

    Args:
        message: the full message.
        feature: the feature that failed; empty where no single one did.
        call: the call in which it failed.
        layer: the layer for which it failed.
        failure: what went wrong, in words that are the same for each layer; the default is the message.
    """

    def __init__(self, message: str, *, feature: str = "", call: str = "", layer: str = "", failure: str = "") -> None:
        super().__init__(message)
        self.feature = feature
        self.call = call
        self.layer = layer
        self.failure = failure or message

    @property
    def kind(self) -> tuple[str, str, str]:
        """A key that is equal for the same failure in different layers."""
        return self.feature, self.call, self.failure


class MissingExtraError(PrecisionDebugError, ImportError):
    """A module was imported whose optional dependency is not installed.

    Args:
        module: the module that was imported.
        extra: the extra of this package that installs the dependency.
    """

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module} needs a package that is not installed. Install it with:"
            f" pip install 'te-precision-callbacks[{extra}]'"
        )
