"""The rule book: each rule with its condition, its source and its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules import (
    between_steps,
    gradients,
    jumps,
    kernels,
    lost_elements,
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
    *lost_elements.RULES,
    *scales.RULES,
    *kernels.RULES,
    *updates.RULES,
    *parameters.RULES,
    *siblings.RULES,
    *gradients.RULES,
    *training.RULES,
    *jumps.RULES,
    *between_steps.RULES,
    *precision.RULES,
    *settings.RULES,
    *outcome.RULES,
)
"""All rules. Of two findings of one severity in one step, that of the earlier rule comes first."""

RULE_OF_ID: Mapping[str, Rule] = {rule.id: rule for rule in RULES}
