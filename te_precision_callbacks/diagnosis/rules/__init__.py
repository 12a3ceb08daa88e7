"""The rule book: each rule with its condition, its source and its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules import (
    parameters,
    quantized,
    settings,
    tensors,
    training,
)

_MODULES = (quantized, parameters, tensors, training, settings)

ROWS: Sequence[Rule] = [row for module in _MODULES for row in module.RULES]
"""All rules and their variants. Of two findings of one severity in one step, that of the earlier row comes first."""

RULE_OF_ID: Mapping[str, Rule] = {
    rule: replace(first, variants=tuple(variants))
    for rule, (first, *variants) in group_by_key((row.id, row) for row in ROWS).items()
}

RULES: Sequence[Rule] = tuple(RULE_OF_ID.values())
"""All rules, each with its variants."""
