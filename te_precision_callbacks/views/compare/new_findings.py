"""Findings of one run that the other run does not have."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs import RecordedRun


@dataclass(frozen=True)
class ComparedVerdicts:
    """The verdicts of two runs.

    Attributes:
        only_a, only_b: the findings that the other run does not have, by rule, tensor and layer; with these layers
            only.
        not_judged_in_a: the rules of ``only_b`` that were not checked in A.
    """

    a: Verdict
    b: Verdict
    only_a: tuple[Finding, ...]
    only_b: tuple[Finding, ...]
    not_judged_in_a: tuple[str, ...]

    @property
    def summary(self) -> str:
        partial = " and ".join(name for name, verdict in (("A", self.a), ("B", self.b)) if verdict.is_partial)
        unread = f" A part of {partial} cannot be read." if partial else ""
        if not self.b.judged:
            return f"Not enough checked in B.{unread}"
        gone = f" A has {many(len(self.only_a), 'finding')} that B has not." if self.only_a else ""
        new = many(len(self.only_b), "finding") if self.only_b else "no finding"
        return f"B has {new} that A has not.{gone}{unread}"

    def in_words(self) -> Iterator[str]:
        for finding in self.only_b:
            unknown = " This rule was not checked in A." if finding.rule in self.not_judged_in_a else ""
            yield f"{finding.severity}: {finding}.{unknown} {finding.remedy}."

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "a": self.a.summary,
            "b": self.b.summary,
            "only_a": [finding.as_json() for finding in self.only_a],
            "only_b": [finding.as_json() for finding in self.only_b],
            "not_judged_in_a": list(self.not_judged_in_a),
        }


def compare_verdicts(a: RecordedRun, b: RecordedRun) -> ComparedVerdicts:
    ours, theirs = diagnose(a), diagnose(b)
    only_b = tuple(_beyond(theirs, ours, "A"))
    unknown = dict.fromkeys(finding.rule for finding in only_b if finding.rule not in ours.judged)
    return ComparedVerdicts(ours, theirs, tuple(_beyond(ours, theirs, "B")), only_b, tuple(unknown))


def _beyond(findings: Iterable[Finding], others: Iterable[Finding], name: str) -> Iterator[Finding]:
    known: dict[tuple[str, str], set[str]] = defaultdict(set)
    for other in others:
        known[other.rule, other.tensor] |= set(other.layers or [""])
    for finding in findings:
        has = known[finding.rule, finding.tensor]
        layers = tuple(layer for layer in finding.layers if layer not in has)
        if layers == finding.layers and not (not layers and "" in has):
            yield finding
        elif layers:  # the described layer may be among those of the other run
            seen = f"{finding.seen_in_words}; {name} has it too in other layers"
            yield dataclasses.replace(finding, layers=layers, seen=seen, seen_at=None)
