"""Values of ``on_finding=``: the reaction of a session to a finding.

"warn"                          # a warning, once for each finding
"stop"                          # errors and warnings stop the training, on all ranks together
"stop: error"                   # only findings of this severity or a worse one
"stop: nonfinite, overflow"     # only findings of these rules
lambda finding: ...             # called with each finding, also with notes; "stop" as its result stops the training
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.config.problems import suggestion
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding
from te_precision_callbacks.diagnosis.rules import RULES

OnFinding = str | Callable[[Finding], Any]


class PrecisionFindingError(PrecisionDebugError, RuntimeError):
    """A finding stops the training, by ``on_finding=``; ``findings`` may be empty on other ranks."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def reads_stop(on_finding: OnFinding) -> Callable[[Finding], bool]:
    """Return a function that selects the findings that stop the training; raises OptionError."""
    if callable(on_finding) or on_finding == "warn":
        return lambda finding: False  # what a function returns is not known before
    word, _, chosen = on_finding.partition(":") if isinstance(on_finding, str) else ("", "", "")
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    known = [*SEVERITIES, *(rule.id for rule in RULES)]
    if word.strip() != "stop" or (":" in str(on_finding) and not names):
        raise OptionError(
            f"on_finding= must be 'warn', 'stop', 'stop: ' with severities or rules, such as 'stop: error', or a"
            f" function of the finding, not {on_finding!r}."
        )
    for name in names:
        if name not in known:
            raise OptionError(f"on_finding={on_finding!r}: there is no rule {name!r}.{suggestion(name, known)}")
    if not names:
        return lambda finding: finding.severity != "note"
    least = max((SEVERITIES.index(name) for name in names if name in SEVERITIES), default=-1)
    return lambda finding: SEVERITIES.index(finding.severity) <= least or finding.rule in names
