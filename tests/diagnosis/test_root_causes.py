"""The order of findings: each follows the one that can explain it."""

from te_precision_callbacks.diagnosis import Finding
from te_precision_callbacks.diagnosis.finding import Severity, root_causes_first

CAUSES = {"stale-scale": ("growth",), "underflow": ("stale-scale",)}


def finding(rule: str, since: int | None, last_good: int | None = None, severity: Severity = "warning") -> Finding:
    return Finding(rule, severity, "", (f"of {rule}",), "", "", since, since, last_good, None, "", "", "", "", "", "")


def order(*findings: Finding) -> list[tuple[str, str]]:
    return [(item.rule, item.caused_by) for item in root_causes_first(findings, CAUSES)]


def test_a_chain_of_causes_begins_with_its_root() -> None:
    chain = [finding("underflow", 8, 6), finding("stale-scale", 6, 4), finding("growth", 4, 2)]
    by_growth, by_scale = "growth of of growth", "stale-scale of of stale-scale"
    assert order(*chain) == [("growth", ""), ("stale-scale", by_growth), ("underflow", by_scale)]


def test_a_cause_may_be_seen_a_collection_step_later() -> None:
    """It has begun after the last step without it."""
    assert order(finding("stale-scale", 8, 6), finding("growth", 10, 8))[0] == ("growth", "")
    assert order(finding("stale-scale", 8, 6), finding("growth", 12, 10)) == [("stale-scale", ""), ("growth", "")]


def test_a_note_explains_no_warning_and_the_worst_group_comes_first() -> None:
    assert order(
        finding("growth", 1, severity="note"), finding("stale-scale", 4, 3), finding("hole", 9, 8, "error")
    ) == [("hole", ""), ("stale-scale", ""), ("growth", "")]
