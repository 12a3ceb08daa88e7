"""The number of findings at the top of ``show`` and ``compare``."""

from __future__ import annotations

from te_precision_callbacks.base.counts import many

MOST_FINDINGS = 5


def more_findings(count: int) -> str:
    return f"and {many(count - MOST_FINDINGS, 'more finding')}" if count > MOST_FINDINGS else ""
