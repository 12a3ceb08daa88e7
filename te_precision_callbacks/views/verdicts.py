"""A verdict in words: what ``show``, ``report`` and ``compare`` print of a run before all else.

not_judged_in_words(verdict)        # "Not checked: growth, stale-scale."
"""

from __future__ import annotations

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.finding import Verdict

MOST_FINDINGS = 5
"""The findings at the top of an output."""


def not_judged_in_words(verdict: Verdict) -> str:
    """The rules that were not checked, in one line; empty if all were."""
    return f"Not checked: {', '.join(each.rule for each in verdict.not_judged)}." if verdict.not_judged else ""


def more_findings(count: int, shown: int = MOST_FINDINGS) -> str:
    """The number of findings left out of an output; empty for none."""
    return f"and {many(count - shown, 'more finding')}" if count > shown else ""
