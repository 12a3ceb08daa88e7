"""The incremental engine: rules check each step once, and the verdict is available after each step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from te_precision_callbacks.base.counts import many, without_exponents
from te_precision_callbacks.base.errors import OptionError, RaisedInTraining
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import (
    NO_CONFIG,
    SEVERITIES,
    Finding,
    NotChecked,
    Verdict,
    root_causes_first,
    worst_first,
)
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules import RULE_OF_ID, RULES
from te_precision_callbacks.sinks.step_records import Event

_Key = tuple[str, str, str]


class Diagnosis:
    """Checks a run by the rules. ``set_facts``, ``step``, ``scalars`` and ``event`` return new findings, and findings
    that became more severe.

    ``has_run``: whether a training step has run; without one, no rule is checked.
    """

    def __init__(self, rules: Iterable[Rule] = RULES) -> None:
        self._checks: list[tuple[Rule, RuleCheck]] = [(rule, rule.check()) for rule in rules]
        self._overriding = {name: self._checks_with(name) for name in ("facts", "step", "scalars", "event")}
        self._places = {rule.id: place for place, (rule, _) in enumerate(self._checks)}
        self._findings: dict[_Key, Finding] = {}
        self._sort_keys: dict[_Key, tuple[int, int]] = {}  # iteration and rule, by which findings are in order
        self._returned: dict[_Key, int] = {}  # the worst severity so far
        self._failed: dict[str, str] = {}
        self._facts = Facts()
        self.has_run = False
        self._checkpoints: dict[str, int] = {}  # file, or the iteration if the file is unknown -> iteration
        self._rank: int | None = None
        self._lost = ""  # why records are missing
        self._local_steps: set[int] = set()
        self._collected = 0

    def set_facts(self, facts: Facts, iteration: int) -> list[Finding]:
        self.has_run = self.has_run or facts.has_run
        self._facts = facts
        return self._check("facts", iteration, facts)

    def step(self, numbers: StepNumbers) -> list[Finding]:
        self.has_run = True
        self._collected += 1
        if numbers.rank is not None:
            self._rank = numbers.rank
            self._local_steps.add(numbers.iteration)
        numbers.use(self._facts)
        with np.errstate(all="ignore"):
            return self._check("step", numbers.iteration, numbers, rank=numbers.rank)

    def scalars(self, iteration: int, values: Mapping[str, float], rank: int | None = None) -> list[Finding]:
        return self._check("scalars", iteration, iteration, values, rank=rank)

    def event(self, event: Event, rank: int | None = None) -> list[Finding]:
        if event.data.get("is_lost"):
            self._lost = event.text
        return self._check("event", event.iteration, event, rank=rank)

    def add_sighting(self, iteration: int, rule: str, sighting: Sighting, rank: int) -> None:
        if rule in self._places:
            self._record(self._checks[self._places[rule]], sighting, iteration, rank)

    def adopt(self, finding: Finding) -> None:
        """Add a finding of another rank in its local values, or of a rule of a newer version, unless it is known."""
        key = finding.rule, finding.tensor, ""
        if key not in self._findings:
            self._findings[key] = finding
            self._sort_keys[key] = (finding.since or 0, self._place(finding))

    def _place(self, finding: Finding) -> int:
        return self._places.get(finding.rule, len(self._places))

    def note_checkpoint(self, iteration: int, file: str = "") -> None:
        """Note a checkpoint of the state before an iteration; it replaces an earlier checkpoint in the same file."""
        self._checkpoints = {place: saved for place, saved in self._checkpoints.items() if not _is_deleted(place)}
        self._checkpoints[file or str(iteration)] = iteration

    @property
    def problems(self) -> Counter[str]:
        """Rule -> the number of its errors and warnings so far; cheaper than ``verdict``, for every step."""
        return Counter(finding.rule for finding in self._findings.values() if finding.severity != "note")

    @property
    def verdict(self) -> Verdict:
        checked = []
        not_checked = []
        with_findings = {finding.rule for finding in self._findings.values()}
        for rule, check in self._checks:
            if rule.id in self._failed:
                not_checked.append(NotChecked(rule.id, self._failed[rule.id], "", rule.essential))
            elif check.checked or rule.id in with_findings:
                checked.append(rule.id)
            elif check.applies is not False:
                why = self._why_not(rule, check)
                collect = "" if why else rule.collect
                not_checked.append(NotChecked(rule.id, why or f"needs {rule.needs}", collect, rule.essential))
        # Trainers log before or after a step, so the order of calls differs between live and recorded runs.
        in_order = (self._findings[key] for key in sorted(self._findings, key=self._sort_keys.__getitem__))
        return Verdict(
            self._sort_by_cause(map(self._with_checkpoint, in_order)),
            tuple(checked),
            tuple(not_checked),
            rank=self._rank,
            not_observed=self._not_observed,
        )

    @property
    def _not_observed(self) -> str:
        """The layers that are not observed, with the reasons, and weights without the values before quantization."""
        layers = self._facts.layers.values()
        reasons = []
        quantized = 0
        for layer in layers:
            quantized += layer.is_quantized_only
            if layer.refused:
                reasons.append(layer.refused.partition(":")[0])
        parts = []
        if reasons:
            parts.append(f"{len(reasons)} of {many(len(layers), 'layer')} ({', '.join(dict.fromkeys(reasons))})")
        if quantized:
            weights = f"the weights of {many(quantized, 'layer')}, which exist only in quantized form"
            parts.append(f"underflow and overflow in {weights}")
        return ", ".join(parts)

    def _why_not(self, rule: Rule, check: RuleCheck) -> str:
        if not self.has_run:
            return "no training step has run"
        if check.why_not or self._lost:
            return self._lost or check.why_not
        layers = self._facts.layers.values()
        if NO_CONFIG in rule.collect and not self._facts.te_layers_that_ran:
            if self._facts.unobserved is not None:
                return f"no layer was observed: {self._facts.unobserved.refused}"
            if self._facts.layers_that_ran:
                return "the model has no Transformer Engine layers, so there are no statistics"
        if layers and not any(layer.calls or layer.forward is not None for layer in layers):
            if refused := next((layer.refused for layer in layers if layer.refused), ""):
                return f"no layer was observed: {refused}"
            if self._facts.settings is not None:  # else a log, which does not show what ran
                return "no layer of Transformer Engine ran in the session's model"
        # The first collection step lacks the statistics of scales and of FP8.
        if self._collected == 1:
            return "only one collection step has run"
        return ""

    def merge_ranks(self, others: Sequence[Diagnosis]) -> Verdict:
        """Return the verdict on all ranks; equal findings are merged. ``others``: one for each other rank."""
        own = self.verdict
        checked = set(own.checked)
        for other in others:
            checked.update(other.verdict.checked)
        merged: dict[tuple[_Key, bool], tuple[tuple[int, int], Finding]] = {}
        for diagnosis in (self, *others):
            for key, finding in diagnosis._findings.items():
                of_all = merged.get((key, False))
                if finding.ranks and of_all is not None and set(finding.layers) <= set(of_all[1].layers):
                    continue
                is_known = finding.rule in self._places
                if finding.ranks and of_all is None and finding.last_good is None and is_known:
                    # The last good step of the reduced values.
                    steps = set(self._checks[self._places[finding.rule]][1].steps) - self._local_steps
                    finding = dataclasses.replace(finding, last_good=_last_good(finding.since, steps))
                own_place = diagnosis._sort_keys[key][0], self._place(finding)
                place, known = merged.get((key, bool(finding.ranks)), (own_place, None))
                merged_finding = finding if known is None else _merge_findings(known, finding)
                merged[key, bool(finding.ranks)] = min(place, own_place), merged_finding
        in_order = (finding for _, finding in sorted(merged.values(), key=lambda entry: entry[0]))
        return dataclasses.replace(
            own,
            findings=self._sort_by_cause(map(self._with_checkpoint, in_order)),
            checked=tuple(rule.id for rule, _ in self._checks if rule.id in checked),
            not_checked=tuple(rule for rule in own.not_checked if rule.rule not in checked),
            rank=None,
        )

    def _sort_by_cause(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        return tuple(root_causes_first(findings, {rule.id: rule.consequence_of for rule, _ in self._checks}))

    def _with_checkpoint(self, finding: Finding) -> Finding:
        """Add the last checkpoint before the problem, if it still exists. Later checkpoints may have the problem, since
        nothing is measured between two collection steps.
        """
        good = -1 if finding.last_good is None else finding.last_good
        for place, saved in sorted(self._checkpoints.items(), key=lambda item: -item[1]):
            if saved <= good and not _is_deleted(place):
                return dataclasses.replace(finding, checkpoint=saved)
        return finding

    def _checks_with(self, name: str) -> list[tuple[Rule, RuleCheck]]:
        """Return the checks that override a method of :class:`RuleCheck`."""
        inherited = getattr(RuleCheck, name)
        return [(rule, check) for rule, check in self._checks if getattr(type(check), name) is not inherited]

    def _check(
        self,
        name: str,
        iteration: int,
        *arguments: Any,
        rank: int | None = None,
    ) -> list[Finding]:
        """Call a method of all checks that override it."""
        changed: dict[_Key, Finding] = {}
        for rule, check in self._overriding[name]:
            if rule.id in self._failed:
                continue
            try:
                sightings = list(getattr(check, name)(*arguments))
            except Exception as error:  # a rule must not end a training; the verdict reports it as not checked
                self._failed[rule.id] = f"the rule failed in step {iteration}: {type(error).__name__}: {error}"
                continue
            for sighting in sightings:
                if sighting.withdraws:
                    key = rule.id, sighting.tensor, sighting.key
                    self._findings.pop(key, None)
                    self._returned.pop(key, None)
                    continue
                # Facts are collected after they begin, and at different times in live and recorded runs.
                since = sighting.since if name == "facts" else None
                key, finding, is_new = self._record(
                    (rule, check), sighting, iteration if since is None else since, rank
                )
                if is_new:
                    changed[key] = self._with_checkpoint(finding)
        return worst_first(changed.values())

    def _record(
        self, of: tuple[Rule, RuleCheck], sighting: Sighting, iteration: int, rank: int | None
    ) -> tuple[_Key, Finding, bool]:
        rule, check = of
        key = (rule.id, sighting.tensor, sighting.key)
        known = self._findings.get(key)
        finding, is_new = self._update_finding(rule, sighting, known, iteration, check.steps)
        if known is None and rank is not None:
            finding = dataclasses.replace(finding, ranks=(rank,))
        self._findings[key] = finding
        self._sort_keys.setdefault(key, (iteration, self._places[rule.id]))
        severity = SEVERITIES.index(finding.severity)
        is_new &= severity < self._returned.get(key, len(SEVERITIES))  # not again after it has become a note
        if is_new:
            self._returned[key] = severity
        return key, finding, is_new

    def _update_finding(
        self, rule: Rule, sighting: Sighting, known: Finding | None, iteration: int, checked: Iterable[int]
    ) -> tuple[Finding, bool]:
        severity = sighting.severity or rule.severity
        until = None if sighting.since is None else max(iteration, sighting.since)
        remedy = sighting.remedy or rule.remedy
        if (sighting.since if known is None else known.since) == 0:
            remedy = remedy.replace("Resume from an earlier checkpoint", "Start again")
        if known is None:
            layers = tuple(self._facts.sort_by_execution(sighting.layers, sighting.tensor))
            return (
                Finding(
                    rule=rule.id,
                    severity=severity,
                    title=rule.title,
                    layers=layers,
                    tensor=sighting.tensor,
                    statistic=sighting.statistic,
                    since=sighting.since,
                    until=until,
                    last_good=_last_good(sighting.since, checked),
                    checkpoint=None,
                    seen=without_exponents(sighting.seen),
                    why=rule.why,
                    remedy=remedy,
                    patch=sighting.patch,
                    disproof=rule.disproof,
                    source=rule.source,
                    seen_at=until,
                ),
                True,
            )
        if sighting.replaces:
            remedy = remedy if sighting.remedy else known.remedy
            known = dataclasses.replace(known, severity=severity, seen=sighting.seen, seen_at=None, remedy=remedy)
            return known, False
        worse = SEVERITIES.index(severity) < SEVERITIES.index(known.severity)
        seen, seen_at = (without_exponents(sighting.seen), until) if worse else (known.seen, known.seen_at)
        patch, remedy = (sighting.patch, remedy) if worse else (known.patch, known.remedy)
        severity = severity if worse else known.severity
        layers = known.layers
        if worse or not set(sighting.layers).issubset(layers):
            ordered = self._facts.sort_by_execution(sighting.layers, sighting.tensor)
            layers = tuple(dict.fromkeys((*ordered, *layers) if worse else (*layers, *ordered)))
        known = dataclasses.replace(known, layers=layers, until=until, severity=severity)
        return dataclasses.replace(known, seen=seen, seen_at=seen_at, patch=patch, remedy=remedy), worse


def _last_good(since: int | None, checked: Iterable[int]) -> int | None:
    if since is None:
        return None
    return max((step for step in checked if step < since), default=None)


def _is_deleted(file: str) -> bool:
    """Return whether a checkpoint was deleted from a readable folder; False for an unknown file."""
    path = Path(file)
    return path.is_absolute() and path.parent.is_dir() and not path.exists()


def _merge_findings(known: Finding, other: Finding) -> Finding:
    """Merge the findings of two ranks: the earlier first step, and the text of the more severe finding."""
    first, second = sorted((known, other), key=lambda finding: -1 if finding.since is None else finding.since)
    lead, more = sorted((first, second), key=lambda finding: SEVERITIES.index(finding.severity))
    return dataclasses.replace(
        lead,
        layers=tuple(dict.fromkeys((*lead.layers, *more.layers))),
        ranks=tuple(dict.fromkeys((*lead.ranks, *more.ranks))),
        since=first.since,
        until=max((finding.until for finding in (known, other) if finding.until is not None), default=None),
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
{"nonfinite": "stop", "spike": lambda ...}    # by rule: "warn", "stop" or a function; other rules warn
"""


class PrecisionFindingError(RaisedInTraining, RuntimeError):
    """A finding stops the training, by ``on_finding=``; ``findings`` may be empty on other ranks."""

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def read_on_finding(on_finding: OnFinding) -> OfFinding:
    """Return a function that returns "stop" for the findings that stop the training; raises OptionError."""
    if callable(on_finding):
        return on_finding
    if isinstance(on_finding, Mapping):
        return _read_reactions(on_finding)
    if on_finding == "warn":
        return lambda finding: None
    word, colon, chosen = on_finding.partition(":") if isinstance(on_finding, str) else ("", "", "")
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if word.strip() != "stop" or (colon and not names):
        raise OptionError(
            f"on_finding= must be 'warn', 'stop', 'stop: ' with severities or rules, such as 'stop: error', a function"
            f" of the finding, or a mapping of rules to 'warn', 'stop' or a function, not {on_finding!r}."
            f"{suggestion(word.strip(), ())}"
        )
    known = [*SEVERITIES, *RULE_OF_ID]
    for name in names:
        if name not in known:
            raise OptionError(f"on_finding={on_finding!r}: there is no rule {name!r}.{suggestion(name, known)}")
    least = max((SEVERITIES.index(name) for name in names or ["warning"] if name in SEVERITIES), default=-1)

    def stop(finding: Finding) -> str | None:
        is_of_rule = finding.rule in names and _calls_for_reaction(finding)
        return "stop" if is_of_rule or SEVERITIES.index(finding.severity) <= least else None

    return stop


def _read_reactions(reactions: Mapping[str, str | OfFinding]) -> OfFinding:
    for rule, reaction in reactions.items():
        if rule not in RULE_OF_ID:
            raise OptionError(f"on_finding=: there is no rule {rule!r}.{suggestion(str(rule), RULE_OF_ID)}")
        if not callable(reaction) and reaction not in ("warn", "stop"):
            first = str(reaction).partition(",")[0].partition(":")[0]
            raise OptionError(
                f"on_finding=: the reaction to {rule!r} must be 'warn', 'stop' or a function of the finding, not"
                f" {reaction!r}.{suggestion(first, ())}"
            )

    def react(finding: Finding) -> Any:
        reaction = reactions.get(finding.rule)
        if callable(reaction):
            return reaction(finding)
        return "stop" if reaction == "stop" and _calls_for_reaction(finding) else None

    return react


def _calls_for_reaction(finding: Finding) -> bool:
    """Return False for a note of a rule with warnings or errors: healthy runs have it too."""
    return finding.severity != "note" or RULE_OF_ID[finding.rule].severity == "note"
