"""The table of rules of docs/diagnosis.md, made from the rules.

python -m tools.rules_table    # prints the table
"""

from __future__ import annotations

from te_precision_callbacks.diagnosis.rules import RULES


def table() -> str:
    """The table, in Markdown."""
    lines = ["| rule | severity | what is wrong |", "|---|---|---|"]
    for rule in RULES:
        lines.append(f"| `{rule.id}` | {rule.severity} | {rule.title} |")
        lines += [f"| | {variant.severity} | {variant.title} |" for variant in rule.variants]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
