"""The incremental engine: rules check each step once, and the verdict is available after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from te_precision_callbacks.base.counts import group_by_key, many, without_exponents
from te_precision_callbacks.base.errors import OptionError, RaisedInTraining
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import (
    NO_CONFIG,
    SEVERITIES,
    Finding,
    NotChecked,
    Verdict,
    first_step,
    root_causes_first,
    severity_order,
    worst_first,
)
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules import ROWS, RULE_OF_ID
from te_precision_callbacks.sinks.step_records import Event

_Key = tuple[str, str, str, bool]
"""The title of a row, the tensor, the key of a sighting, and whether it is beside a finding in reduced values."""


@dataclass
class _FindingRecord:
    """A finding, its place among all findings (iteration and row), and the worst severity that was returned so far."""

    finding: Finding
    order: tuple[int, int]
    returned: int = len(SEVERITIES)


class Diagnosis:
    """Checks a run by the rules. ``set_facts``, ``step``, ``scalars`` and ``event`` return new findings, and findings
    that became more severe.

    ``has_run``: whether a training step has run; without one, no rule is checked.
    """

    def __init__(self, rows: Iterable[Rule] = ROWS) -> None:
        self._checks = [(row, row.check()) for row in rows]
        self._having = {name: self._checks_with(name) for name in ("facts", "step", "scalars", "event")}
        self._order = {row.title: order for order, (row, _) in enumerate(self._checks)}
        self._records: dict[_Key, _FindingRecord] = {}
        self._checked_elsewhere: set[str] = set()
        self._facts = Facts()
        self.has_run = False
        self._checkpoints: dict[str, int] = {}  # file, or the iteration if the file is unknown -> iteration
        self._rank: int | None = None
        self._lost = ""  # why records are missing
        self._collected = 0

    def set_facts(self, facts: Facts, iteration: int) -> list[Finding]:
        self.has_run = self.has_run or facts.has_run
        self._facts = facts
        for _, check in self._checks:
            check.run = facts
        return self._check("facts", iteration, facts)

    def step(self, numbers: StepNumbers) -> list[Finding]:
        self.has_run = True
        self._collected += 1
        self._rank = self._rank if numbers.rank is None else numbers.rank
        numbers.use(self._facts)
        with np.errstate(all="ignore"):
            return self._check("step", numbers.iteration, numbers, rank=numbers.rank)

    def scalars(self, iteration: int, values: Mapping[str, float], rank: int | None = None) -> list[Finding]:
        return self._check("scalars", iteration, iteration, values, rank=rank)

    def event(self, event: Event, rank: int | None = None) -> list[Finding]:
        if event.data.get("is_lost"):
            self._lost = event.text
        return self._check("event", event.iteration, event, rank=rank)

    def adopt(self, finding: Finding) -> None:
        """Add a finding of another rank in its local values, or of a rule of another version."""
        order = finding.seen_at or 0, self._order.get(finding.title, len(self._order))
        self._add((finding.title, finding.tensor, "", False), finding, order)

    def adopt_missing(self, finding: Finding) -> None:
        """Keep an error of one start of a run as a note, where the rules do not find it over all starts."""
        if (finding.title, finding.tensor) not in {(title, tensor) for title, tensor, *_ in self._records}:
            seen = f"an error of one start, and none over all starts: {finding.seen}"
            self.adopt(replace(finding, severity="note", seen=seen))

    def add_rank(self, other: Diagnosis) -> None:
        """Add the findings of another rank in its local values. Findings in reduced values stay apart from those."""
        self._rank = None
        self._checked_elsewhere |= other._checked
        for key, record in other._records.items():
            reduced = self._records.get(key)
            if reduced is not None and not reduced.finding.ranks:
                if set(record.finding.layers) <= set(reduced.finding.layers):
                    continue
                key = (*key[:3], True)
            former = self._records.setdefault(key, record)
            if former is not record:
                former.finding = _merge_findings(former.finding, record.finding)
                former.order = min(former.order, record.order)

    def note_checkpoint(self, iteration: int, file: str = "") -> None:
        """Note a checkpoint of the state before an iteration; it replaces an earlier checkpoint in the same file."""
        self._checkpoints[file or str(iteration)] = iteration

    @property
    def problems(self) -> Mapping[str, int]:
        """Rule -> the number of its errors and warnings so far; cheaper than ``verdict``, for every step."""
        findings = [record.finding for record in self._records.values()]
        return Counter(finding.rule for finding in findings if finding.severity != "note")

    @property
    def verdict(self) -> Verdict:
        checked = self._checked
        missing = []
        for row, check in self._checks:
            if row.title not in checked and (check.failed or check.applies is not False):
                why = self._why_not(row, check)
                collect = "" if why else row.collect
                missing.append(NotChecked(row.id, why or f"needs {row.needs}", collect, row.essential))
        lacking = {rule.rule for rule in missing if rule.essential}
        titles = group_by_key((row.id, row.title) for row, _ in self._checks)
        # Trainers log before or after a step, so the order of calls differs between live and recorded runs.
        records = sorted(self._records.values(), key=attrgetter("order"))
        causes = {row.title: row.consequence_of for row, _ in self._checks}
        return Verdict(
            tuple(root_causes_first([self._complete(record.finding) for record in records], causes)),
            tuple(rule for rule, (first, *_) in titles.items() if first in checked and rule not in lacking),
            tuple(dict.fromkeys(missing)),
            rank=self._rank,
            not_observed=self._not_observed,
        )

    @property
    def _checked(self) -> set[str]:
        """The titles of the rows that were checked."""
        checked = {title for title, *_ in self._records}
        checked |= {row.title for row, check in self._checks if check.checked}
        return checked - {row.title for row, check in self._checks if check.failed} | self._checked_elsewhere

    @property
    def _not_observed(self) -> str:
        """The layers that are not observed, with the reasons, and weights without the values before quantization."""
        layers = list(self._facts)
        reasons = [layer.refused.partition(":")[0] for layer in layers if layer.refused]
        quantized = sum(layer.is_quantized_only for layer in layers)
        parts = []
        if reasons:
            parts.append(f"{len(reasons)} of {many(len(layers), 'layer')} ({', '.join(dict.fromkeys(reasons))})")
        if quantized:
            weights = f"the weights of {many(quantized, 'layer')}, which exist only in quantized form"
            parts.append(f"underflow and overflow in {weights}")
        return ", ".join(parts)

    def _why_not(self, row: Rule, check: RuleCheck) -> str:
        if check.failed:
            return check.failed
        if not self.has_run:
            return "no training step has run"
        if why := self._lost or check.why_not:
            return why
        layers = list(self._facts)
        if NO_CONFIG in row.collect and not self._facts.te_layers_that_ran:
            if refused := self._facts.unobserved:
                return f"no layer was observed: {refused}"
            if self._facts.layers_that_ran:
                return "the model has no Transformer Engine layers, so there are no statistics"
        if layers and not any(layer.calls or layer.forward is not None for layer in layers):
            if refused := next((layer.refused for layer in layers if layer.refused), ""):
                return f"no layer was observed: {refused}"
            if self._facts.settings.are_known:  # else a log, which does not show what ran
                return "no layer of Transformer Engine ran in the session's model"
        # The first collection step lacks the statistics of scales and of FP8.
        if self._collected == 1:
            return "only one collection step has run"
        return ""

    def _complete(self, finding: Finding) -> Finding:
        """Add the last checkpoint before the problem, if it still exists, and advise a new start if there is no step
        before it. Later checkpoints may have the problem, since nothing is measured between two collection steps.
        """
        remedy = finding.remedy
        if finding.since == 0:
            remedy = remedy.replace("Resume from an earlier checkpoint", "Start again")
        good = -1 if finding.last_good is None else finding.last_good
        existing = [saved for file, saved in self._checkpoints.items() if saved <= good and not _is_deleted(file)]
        return replace(finding, remedy=remedy, checkpoint=max(existing, default=finding.checkpoint))

    def _checks_with(self, name: str) -> list[tuple[Rule, RuleCheck]]:
        return [(row, check) for row, check in self._checks if hasattr(check, name)]

    def _check(self, name: str, iteration: int, *arguments: Any, rank: int | None = None) -> list[Finding]:
        """Call a method of all checks that have it."""
        returned: dict[_Key, Finding] = {}
        for row, check in self._having[name]:
            if check.failed:
                continue
            try:
                sightings = list(getattr(check, name)(*arguments))
            except Exception as error:  # a rule must not end a training; the verdict reports it as not checked
                check.failed = f"the rule failed in step {iteration}: {type(error).__name__}: {error}"
                continue
            for sighting in sightings:
                key = row.title, sighting.tensor, sighting.key, False
                if sighting.withdraws:
                    self._records.pop(key, None)
                    continue
                # Facts are collected after they begin, and at different times in live and recorded runs.
                since = sighting.since if name == "facts" else None
                seen_in = iteration if since is None else since
                finding = self._found(row, check, sighting, seen_in, rank)
                record = self._records.get(key)
                if record is not None and sighting.replaces:
                    former = record.finding
                    remedy = finding.remedy if sighting.remedy else former.remedy
                    record.finding = replace(
                        former, severity=finding.severity, seen=finding.seen, seen_at=None, remedy=remedy
                    )
                else:
                    record = self._add(key, finding, (seen_in, self._order[row.title]))
                severity = severity_order(record.finding)
                if severity < record.returned:  # not again after it has become a note
                    record.returned = severity
                    returned[key] = self._complete(record.finding)
        return worst_first(returned.values())

    def _add(self, key: _Key, finding: Finding, order: tuple[int, int]) -> _FindingRecord:
        """Return the record of a key, with a finding, which keeps the ranks that it was found on first."""
        record = self._records.setdefault(key, _FindingRecord(finding, order))
        record.finding = replace(_merge_findings(record.finding, finding), ranks=record.finding.ranks)
        return record

    def _found(self, row: Rule, check: RuleCheck, sighting: Sighting, iteration: int, rank: int | None) -> Finding:
        since = sighting.since
        until = None if since is None else max(iteration, since)
        return Finding(
            rule=row.id,
            severity=sighting.severity or row.severity,
            title=row.title,
            layers=tuple(sorted(sighting.layers, key=lambda layer: self._facts.order_key(layer, sighting.tensor))),
            tensor=sighting.tensor,
            statistic=sighting.statistic,
            since=since,
            until=until,
            last_good=None if since is None else max((step for step in check.steps if step < since), default=None),
            checkpoint=None,
            seen=without_exponents(sighting.seen),
            why=row.why,
            remedy=" ".join((sighting.remedy or row.remedy).split()),
            patch=sighting.patch,
            disproof=row.disproof,
            source=row.source,
            seen_at=until,
            ranks=() if rank is None else (rank,),
        )


def _is_deleted(file: str) -> bool:
    """Return whether a checkpoint was deleted from a readable folder; False for an unknown file."""
    path = Path(file)
    return path.is_absolute() and path.parent.is_dir() and not path.exists()


def _merge_findings(former: Finding, other: Finding) -> Finding:
    """Merge two findings of a subject: the earlier first step, and the text of the more severe finding."""
    first, second = sorted((former, other), key=first_step)
    lead, more = worst_first((first, second))
    return replace(
        lead,
        layers=tuple(dict.fromkeys((*lead.layers, *more.layers))),
        ranks=tuple(dict.fromkeys((*lead.ranks, *more.ranks))),
        since=first.since,
        until=max((finding.until for finding in (former, other) if finding.until is not None), default=None),
        last_good=first.last_good,
    )


OfFinding = Callable[[Finding], Any]
"""A function of a finding, which returns "stop" to stop the training, and otherwise None."""

OnFinding = str | OfFinding | Mapping[str, str | OfFinding]
"""Values of ``on_finding=``: the reaction of a session to a finding.

"warn"                                        # a warning, once for each finding
"stop"                                        # errors and warnings stop the training, on all ranks together
"stop: error"                                 # only findings of this severity or a worse one
"stop: nonfinite, overflow"                   # only findings of these rules
lambda finding: ...                           # called with each finding, also with notes
{"nonfinite": "stop", "growth": lambda ...}   # by rule: "warn", "stop" or a function; other rules warn
"""


class PrecisionFindingError(RaisedInTraining, RuntimeError):
    """A finding stops the training, by ``on_finding=``; ``findings`` may be empty on other ranks."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def read_reactions(on_finding: OnFinding) -> Mapping[str, str | OfFinding]:
    """Return rule or severity -> reaction; nothing for a function of all findings. Raises OptionError."""
    if callable(on_finding):
        return {}
    names = list(RULE_OF_ID)
    reactions: Mapping[str, str | OfFinding] = {}
    if isinstance(on_finding, Mapping):
        reactions = on_finding
    elif on_finding != "warn":
        word, colon, text = on_finding.partition(":") if isinstance(on_finding, str) else ("", "", "")
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if word.strip() != "stop" or (colon and not chosen):
            raise OptionError(
                f"on_finding= must be 'warn', 'stop', 'stop: ' with severities or rules, such as 'stop: error', a"
                f" function of the finding, or a mapping of rules to 'warn', 'stop' or a function, not {on_finding!r}."
            )
        names = [*SEVERITIES, *names]
        reactions = dict.fromkeys(chosen or ["warning"], "stop")
    for rule, reaction in reactions.items():
        if rule not in names:
            raise OptionError(f"on_finding=: there is no rule {rule!r}.{suggestion(str(rule), names)}")
        if not callable(reaction) and reaction not in ("warn", "stop"):
            raise OptionError(
                f"on_finding=: the reaction to {rule!r} must be 'warn', 'stop' or a function of the finding, not"
                f" {reaction!r}."
            )
    return reactions


def read_on_finding(on_finding: OnFinding) -> OfFinding:
    """Return a function that returns "stop" for the findings that stop the training; raises OptionError."""
    if callable(on_finding):
        return on_finding
    reactions = read_reactions(on_finding)
    least = max([SEVERITIES.index(name) for name in SEVERITIES if name in reactions], default=-1)
    notes = {row.title for row in ROWS if row.severity == "note"}

    def react(finding: Finding) -> Any:
        reaction = reactions.get(finding.rule)
        if callable(reaction):
            return reaction(finding)
        # Healthy runs have a note of a rule with warnings or errors too.
        is_of_rule = reaction == "stop" and (finding.severity != "note" or finding.title in notes)
        return "stop" if is_of_rule or severity_order(finding) <= least else None

    return react
