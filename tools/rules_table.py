"""The tables of docs/rules.md, made from the rules: one for each thing that a user sees.

python -m tools.rules_table    # prints the tables
"""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.diagnosis.rules import RULE_OF_ID

GROUPS = {
    "Loss": ("diverging-loss", "gradient-norm", "learning-rate", "kept-gradient", "no-reduction"),
    "NaN, and values that are lost": (
        "nonfinite",
        "overflow",
        "underflow",
        "stale-scale",
        "growth",
        "sibling",
        "dead-gradient",
        "zeros-in-wgrad",
        "wrong-codes",
        "wrong-gemm",
    ),
    "Weights": (
        "lost-updates",
        "below-eps",
        "missing-gradient",
        "frozen-weight",
        "frozen-layer",
        "uncalled-layer",
        "replicas-differ",
        "stale-weights",
        "weight-jump",
        "resume",
    ),
    "Precision": (
        "no-low-precision",
        "hole",
        "contract",
        "mxfp8-hybrid",
        "nvfp4-tail",
        "bf16-state",
        "grad-scaler",
        "ignored-argument",
    ),
    "Set-up": ("evaluation-mode", "failed-run", "observation"),
}
"""Heading of docs/rules.md -> its rules."""


def tables() -> dict[str, str]:
    """Heading -> its table, in Markdown."""
    different = RULE_OF_ID.keys() ^ {rule for rules in GROUPS.values() for rule in rules}
    if different:
        raise LookupError(f"GROUPS in tools/rules_table.py and the rules differ in {sorted(different)}")
    return {heading: _table(rules) for heading, rules in GROUPS.items()}


def _table(rules: Sequence[str]) -> str:
    lines = ["| rule | severity | what is wrong |", "|---|---|---|"]
    for rule in map(RULE_OF_ID.__getitem__, rules):
        lines.append(f"| `{rule.id}` | {rule.severity} | {rule.title} |")
        lines += [f"| | {variant.severity} | {variant.title} |" for variant in rule.variants]
    return "\n".join(lines)


if __name__ == "__main__":
    for heading, table in tables().items():
        print(f"## {heading}\n\n{table}\n")
