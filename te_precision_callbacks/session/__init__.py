"""The inspect session, for any training loop.

Usage::

    with InspectSession("config.yaml", model=model) as session:
        for batch in loader:
            ...
            session.step()
"""

from __future__ import annotations

from te_precision_callbacks.base.errors import (
    FeatureLoadError,
    ObservationError,
    ResumeAuditError,
    SessionError,
    TransformerEngineUnavailableError,
)
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason, StateRow
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
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
    "StateRow",
    "TransformerEngineUnavailableError",
    "running_session",
]
