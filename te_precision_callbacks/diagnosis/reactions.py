"""Reactions to findings of chosen rules: ``on_finding={"nonfinite": "dump"}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.diagnosis.finding import Finding
from te_precision_callbacks.diagnosis.rules import RULE_OF_ID, RULES

WARN = "warn"
STOP = "stop"
DUMP = "dump"
HIGH_PRECISION = "high precision"
PROTECT = "protect checkpoint"

_STEPS = {DUMP: 1, HIGH_PRECISION: 100, PROTECT: 0, STOP: 0, WARN: 0}
"""Reaction -> its usual number of steps."""

_ONLY_NOTES = frozenset(rule.id for rule in RULES if rule.severity == "note")

_REACTION = re.compile(r"\s*([a-z ]*[a-z])\s*(?::\s*([1-9]\d{0,8})\s*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Action:
    """A reaction to a finding that all ranks carry out together.

    Attributes:
        kind: :data:`DUMP`, :data:`HIGH_PRECISION` or :data:`PROTECT`.
        layers, tensor: of the finding.
    """

    kind: str
    rule: str
    layers: tuple[str, ...]
    tensor: str
    steps: int


def calls_for_reaction(finding: Finding) -> bool:
    """Return False for a note of a rule with warnings or errors: healthy runs have it too."""
    return finding.severity != "note" or finding.rule in _ONLY_NOTES


def read_reactions(on_finding: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return rule -> its reactions -> their number of steps; raises OptionError."""
    reactions: dict[str, dict[str, int]] = {}
    for rule, text in on_finding.items():
        try:
            if rule not in RULE_OF_ID:
                raise OptionError(f"there is no rule {rule!r}.{suggestion(str(rule), RULE_OF_ID)}")
            reactions[rule] = _read(text)
        except OptionError as error:
            raise OptionError(f"on_finding={dict(on_finding)!r}, {rule!r}: {error}") from None
    return reactions


def _read(text: object) -> dict[str, int]:
    """Return reactions -> their number of steps."""
    if not isinstance(text, str):
        raise OptionError(
            f"the reactions must be a text with commas, such as 'dump, protect checkpoint', not {text!r}."
        )
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _REACTION.fullmatch(part)
        name = match[1] if match else part.strip()
        if match is None or name not in _STEPS or (match[2] and name != HIGH_PRECISION):
            raise OptionError(
                f"{part.strip()!r} is not a reaction. Reactions: {', '.join(map(repr, _STEPS))}; 'high precision: 50'"
                f" lasts for 50 steps, and at least one.{suggestion(name, _STEPS)}"
            )
        if name in found:
            raise OptionError(f"{name!r} is given twice.")
        found[name] = int(match[2] or _STEPS[name])
    without_effect = [name for name in (WARN, DUMP, HIGH_PRECISION) if name in found]
    if STOP in found and without_effect:
        raise OptionError(
            f"'stop' ends the training, so {without_effect[0]!r} would have no effect. Remove one of them."
        )
    return found
