"""Diagnosis of live and recorded runs: rules, the engine that checks them, findings, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
    from te_precision_callbacks.diagnosis.finding import Finding, NotChecked, Verdict
    from te_precision_callbacks.diagnosis.replay import diagnose
    from te_precision_callbacks.diagnosis.rule import Rule
    from te_precision_callbacks.diagnosis.rules import RULES

__all__ = ["RULES", "Finding", "NotChecked", "PrecisionFindingError", "Rule", "Verdict", "diagnose"]

__getattr__, __dir__ = lazy_names(__name__)
