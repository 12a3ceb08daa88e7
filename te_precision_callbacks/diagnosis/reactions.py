"""Reactions to findings of chosen rules: ``on_finding={"nonfinite": "dump"}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis.rules import RULES

WARN = "warn"
STOP = "stop"
DUMP = "dump"
HIGH_PRECISION = "high precision"
PROTECT = "protect checkpoint"

_STEPS = {DUMP: 1, HIGH_PRECISION: 100, PROTECT: 0, STOP: 0, WARN: 0}
"""Reaction -> its usual number of steps."""

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


def read_reactions(on_finding: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return rule -> its reactions -> their number of steps; raises OptionError."""
    from te_precision_callbacks.config.problems import suggestion

    rules = [rule.id for rule in RULES]
    reactions: dict[str, dict[str, int]] = {}
    for rule, text in on_finding.items():
        if rule not in rules:
            more = suggestion(str(rule), rules)
            raise OptionError(f"on_finding={dict(on_finding)!r}: there is no rule {rule!r}.{more}")
        if not isinstance(text, str):
            raise OptionError(
                f"on_finding={dict(on_finding)!r}: the reactions to {rule!r} must be a text with commas, such as"
                f" 'dump, protect checkpoint', not {text!r}."
            )
        reactions[rule] = {}
        for part in str(text).split(","):
            match = _REACTION.fullmatch(part)
            name = match[1] if match else part.strip()
            if match is None or name not in _STEPS or (match[2] and name != HIGH_PRECISION):
                raise OptionError(
                    f"on_finding={dict(on_finding)!r}: {part.strip()!r} is not a reaction to {rule!r}. Reactions:"
                    f" {', '.join(map(repr, _STEPS))}; 'high precision: 50' lasts for 50 steps."
                    f"{suggestion(name, _STEPS)}"
                )
            reactions[rule][name] = int(match[2] or _STEPS[name])
    return reactions
