"""What is wrong with a run: rules, one engine for live and recorded runs, and the verdict."""

from __future__ import annotations

from te_precision_callbacks.diagnosis.finding import Finding, NotJudged, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules import RULES

__all__ = ["RULES", "Finding", "NotJudged", "Rule", "Verdict", "diagnose"]
