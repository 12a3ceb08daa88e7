"""The rule book: each rule with its condition, its source and its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules import (
    gemms,
    gradients,
    jumps,
    losses,
    outcome,
    parameters,
    precision,
    scales,
    settings,
    siblings,
    training,
    updates,
)

RULES: Sequence[Rule] = (
    *losses.RULES,
    *scales.RULES,
    *gemms.RULES,
    *updates.RULES,
    *parameters.RULES,
    *siblings.RULES,
    *gradients.RULES,
    *training.RULES,
    *jumps.RULES,
    *precision.RULES,
    *settings.RULES,
    *outcome.RULES,
)
"""All rules. Of two findings of one severity in one step, that of the earlier rule comes first."""


def table() -> str:
    """The table of docs/diagnosis.md, in Markdown."""
    lines = ["| rule | severity | what is wrong | needs |", "|---|---|---|---|"]
    lines += [f"| `{rule.id}` | {rule.severity} | {rule.title} | {rule.needs} |" for rule in RULES]
    return "\n".join(lines)
