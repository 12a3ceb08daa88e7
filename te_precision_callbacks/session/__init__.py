"""One inspect session: start, name, step, stop.

Usage::

    with InspectSession("config.yaml", model=model) as session:
        for batch in loader:
            ...
            session.step()
"""

from __future__ import annotations

from te_precision_callbacks.errors import (
    FeatureLoadError,
    ObservationError,
    ResumeAuditError,
    SessionError,
    TransformerEngineUnavailableError,
)
from te_precision_callbacks.records.coverage import Coverage, Product, Reason
from te_precision_callbacks.records.precision import GemmPrecision
from te_precision_callbacks.records.state import StateRow
from te_precision_callbacks.session.contract import PrecisionContractError
from te_precision_callbacks.session.outcome import SessionOutcome
from te_precision_callbacks.session.session import InspectSession, running_session

__all__ = [
    "Coverage",
    "FeatureLoadError",
    "GemmPrecision",
    "InspectSession",
    "ObservationError",
    "PrecisionContractError",
    "Product",
    "Reason",
    "ResumeAuditError",
    "SessionError",
    "SessionOutcome",
    "StateRow",
    "TransformerEngineUnavailableError",
    "running_session",
]
