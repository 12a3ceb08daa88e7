"""The exceptions of a session."""

from __future__ import annotations

from te_precision_callbacks.errors import PrecisionDebugError


class SessionError(PrecisionDebugError, RuntimeError):
    """A session was used in an order that cannot work, or could not be started."""


class TransformerEngineUnavailableError(SessionError):
    """Transformer Engine cannot be imported, so there is nothing to observe."""


class FeatureLoadError(SessionError):
    """A feature file or class could not be loaded."""


class ObservationError(PrecisionDebugError, RuntimeError):
    """A failure in observation, raised with ``strict=True``; otherwise it is reported once and training goes on."""
