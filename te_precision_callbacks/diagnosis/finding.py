"""Findings, and the verdict over all rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from te_precision_callbacks.base.counts import first_of, group_by_key, many
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.layers.folding import fold_for_sentence

Severity = Literal["error", "warning", "note"]

State = Literal["problems found", "no problems found", "not enough checked"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_MOST_NAMES = 2

NO_CONFIG = "or the default config"
"""Part of what to collect, where the default config collects it."""

ADD_DEFAULT = "add the section default_statistics to the config"

FAILED_OBSERVATION = "observation"

_MOST_REASONS = 2


@dataclass(frozen=True)
class Finding:
    """A problem of a run, or a note.

    Attributes:
        rule: the id of the rule, as in ``te-precision rules``.
        severity: ``error``: the run is broken. ``warning``: it loses accuracy, or trains something else than intended.
            ``note``: healthy runs have it too.
        title: the problem that the rule looks for.
        layers: the layers, in execution order; all but the first may have inherited the problem. Empty for the model.
        tensor: may be empty.
        statistic: the statistic that shows it, as in records; may be empty.
        since: the first debug iteration with the problem; None for a problem from the start.
        until: the last debug iteration with the problem.
        last_good: the last checked iteration without the problem before ``since``; None without one.
        checkpoint: the iteration of the last checkpoint that is not later than ``last_good``; None without one.
        seen: a description with values, of one layer in the step ``seen_at``.
        why: why it matters.
        remedy: the remedy.
        patch: a section for the config that applies the remedy, in YAML; may be empty.
        disproof: evidence that there is no problem.
        source: the source of the rule and its threshold.
        seen_at: the debug iteration of ``seen``, when the problem was found or its severity rose; None for a problem
            from the start.
        ranks: the ranks with the problem in their local values, first the rank of ``seen``; empty for reduced values,
            or with one rank.
        caused_by: rule and subject of a finding that can explain it; empty for a root cause.
    """

    rule: str
    severity: Severity
    title: str
    layers: tuple[str, ...]
    tensor: str
    statistic: str
    since: int | None
    until: int | None
    last_good: int | None
    checkpoint: int | None
    seen: str
    why: str
    remedy: str
    patch: str
    disproof: str
    source: str
    seen_at: int | None = None
    ranks: tuple[int, ...] = ()
    caused_by: str = ""

    @property
    def subject(self) -> str:
        """The tensor and the layers: ``gradient of h.4.mlp.fc1 and 3 more layers``."""
        if not self.layers:
            return "the model"
        named = self.layers if len(self.layers) <= _MOST_NAMES else self.layers[:1]
        more = len(self.layers) - len(named)
        names = fold_for_sentence(*named) + (f" and {many(more, 'more layer')}" if more else "")
        if self.tensor:
            return f"{self.tensor} of {names}"
        return names

    @property
    def gemm(self) -> str | None:
        """The GEMM with the tensor as its result: ``fprop``, ``dgrad`` or ``wgrad``; None for other tensors."""
        if self.tensor in GEMMS:
            return self.tensor
        return None

    @property
    def seen_in_words(self) -> str:
        """The description; with its layer among several, and with its step if it is not the first."""
        if self.seen_at is None:
            return self.seen
        where = f"in {fold_for_sentence(self.layers[0])} " if len(self.layers) > 1 and self.tensor else ""
        if where or self.since != self.seen_at:
            return f"{where}at step {self.seen_at}, {self.seen}"
        return self.seen

    @property
    def in_short(self) -> str:
        """The rule, subject and first step: ``sibling (gradient of h.4.mlp.fc1, since step 0)``."""
        details = filter(None, (self.subject if self.layers else "", self.when, self.where))
        return f"{self.rule} ({', '.join(details)})".removesuffix(" ()")

    @property
    def when(self) -> str:
        """The first step, in words; empty for a problem from the start."""
        return "" if self.since is None else f"since step {self.since}"

    @property
    def where(self) -> str:
        """The ranks, in words; empty for reduced values."""
        if not self.ranks:
            return ""
        more = len(self.ranks) - 1
        return f"on rank {self.ranks[0]}" + (f" and {many(more, 'more rank')}" if more else "")

    def __str__(self) -> str:
        cause = f"caused by {self.caused_by}" if self.caused_by else ""
        details = ", ".join(filter(None, (self.rule, self.when, self.where, cause)))
        return f"{f'{self.subject}: ' if self.layers else ''}{self.seen_in_words} ({details})"

    def as_json(self) -> dict[str, Any]:
        """All attributes, the GEMM, the subject, and the description with its place."""
        return {
            **asdict(self),
            "layers": list(self.layers),
            "ranks": list(self.ranks),
            "gemm": self.gemm,
            "subject": self.subject,
            "seen_in_words": self.seen_in_words,
            "where": self.where,
        }


class NotChecked(NamedTuple):
    """A rule that could not be checked.

    Attributes:
        why: the reason.
        collect: the options that collect missing data; empty for another reason.
        essential: whether an all-clear requires the rule.
    """

    rule: str
    why: str
    collect: str
    essential: bool = False


def first_step(finding: Finding) -> int:
    """Return ``since``, and -1 for a problem from the start."""
    return -1 if finding.since is None else finding.since


def severity_order(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=severity_order)


def root_causes_first(findings: Iterable[Finding], causes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Order findings so that each follows a finding that can explain it; otherwise most severe first.

    The explanation is the earliest finding that began no later, of a rule in ``causes`` (title of a row -> the rules
    that can cause its findings). The beginning may be any step after ``last_good``. A note explains only notes. Of two
    findings that can explain each other, the earlier is explained first.
    """
    ordered = sorted(findings, key=lambda finding: (first_step(finding), severity_order(finding)))
    cause_of: dict[Finding, Finding] = {}

    def root_of(finding: Finding) -> Finding:
        while finding in cause_of:
            finding = cause_of[finding]
        return finding

    for finding in ordered:
        for cause in ordered:
            if _explains(cause, finding, causes) and root_of(cause) != finding:
                cause_of[finding] = cause
                break
    roots = {finding: root_of(finding) for finding in ordered}
    severities = group_by_key((root, severity_order(finding)) for finding, root in roots.items())

    def order(finding: Finding) -> tuple[int, int, bool, int]:
        root = roots[finding]
        return min(severities[root]), ordered.index(root), finding in cause_of, severity_order(finding)

    result = []
    for finding in sorted(ordered, key=order):
        if finding in cause_of:
            cause = cause_of[finding]
            finding = replace(finding, caused_by=f"{cause.rule} of {cause.subject}")
        result.append(finding)
    return result


def _explains(cause: Finding, finding: Finding, causes: Mapping[str, Sequence[str]]) -> bool:
    begun = -1 if cause.since is None or cause.last_good is None else cause.last_good
    return (
        cause.title != finding.title
        and not {cause.rule, cause.title, f"{cause.rule} of {cause.tensor}"}.isdisjoint(causes.get(finding.title, ()))
        and (cause.severity != "note" or finding.severity == "note")
        and begun + (finding.rule in causes.get(cause.title, ())) <= first_step(finding)
    )


@dataclass(frozen=True)
class Verdict(Sequence[Finding]):
    """The findings of a run, most severe first.

    Attributes:
        findings: the findings.
        checked: the ids of the rules whose first row was checked, and all essential rows.
        not_checked: the rules that apply to the run, and were not checked, or variants of rules.
        is_partial: whether a part of the run cannot be read.
        rank: the rank that has checked only its local values, as with ``reduce=False`` during training; None for a
            verdict on all ranks.
        not_observed: the layers that are not observed, with the reasons, and other data that do not exist; empty if
            everything is observed.
    """

    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    is_partial: bool = False
    rank: int | None = None
    not_observed: str = ""

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def unchecked(self) -> list[str]:
        """The ids of the rules that were not checked; ``not_checked`` also has variants of rules that were."""
        return [rule for rule in dict.fromkeys(rule.rule for rule in self.not_checked) if rule not in self.checked]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The errors and warnings."""
        return tuple(finding for finding in self.findings if finding.severity != "note")

    @property
    def severity(self) -> str:
        """The worst severity of the findings; empty without findings."""
        return min((finding.severity for finding in self.findings), key=SEVERITIES.index, default="")

    @property
    def state(self) -> State:
        """``problems found`` with errors or warnings; ``no problems found`` if all essential rules were checked;
        otherwise ``not enough checked``.
        """
        if self.wrong:
            return "problems found"
        is_lacking = self.is_partial or not self.checked or any(rule.essential for rule in self.not_checked)
        if is_lacking:
            return "not enough checked"
        return "no problems found"

    @property
    def healthy(self) -> bool:
        """True if no problems were found, and enough was checked for an all-clear."""
        return self.state == "no problems found"

    @property
    def summary(self) -> str:
        """The verdict in one line, without the findings."""
        total = len(self.checked) + len(self.unchecked)
        partial = "; a part of the run cannot be read" if self.is_partial else ""
        partial += f"; only local values of rank {self.rank}" if self.rank is not None else ""
        partial += f"; not observed: {self.not_observed}" if self.not_observed else ""
        by_severity = Counter(finding.severity for finding in self.findings)
        counts = [many(by_severity[severity], severity) for severity in SEVERITIES if by_severity[severity]]
        checked = f"({len(self.checked)} of {many(total, 'rule')} checked{partial})."
        if self.wrong:
            return f"Problems found: {', '.join(counts)} {checked}"
        if not self.checked:
            reasons = {rule.why for rule in self.not_checked}
            why = f": {reasons.pop()}" if len(reasons) == 1 else ""
            return f"Not enough checked{why}{partial}."
        notes = f", {counts[0]}" if counts else ""
        if self.healthy:
            return f"No problems found{notes} {checked}"
        return f"Not enough checked: {self._lacks}. No problems in the other rules{notes} {checked}"

    @property
    def _lacks(self) -> str:
        lacking: dict[str, list[str]] = {}
        for rule in sorted(self.not_checked, key=lambda rule: rule.rule != FAILED_OBSERVATION):  # it explains others
            if rule.essential:
                collect = ADD_DEFAULT if NO_CONFIG in rule.collect else rule.collect and f"add {rule.collect}"
                lacking.setdefault(f"data ({collect})" if collect else rule.why, []).append(rule.rule)
        reasons = []
        for why, rules in lacking.items():
            named = ", ".join(rules)
            lack = "lacks" if len(rules) == 1 else "lack"
            reasons.append(f"{named} {lack} {why}" if why.startswith("data") else f"{named}: {why}")
        return "; ".join(first_of(reasons, _MOST_REASONS, "{} more")) or "a part of the run cannot be read"

    def __str__(self) -> str:
        first = f" First: {self.findings[0]}." if self.wrong else ""
        return self.summary + first

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON values, for the top level of ``diagnose --json`` and ``show --json``.

        ``verdict`` is the text, ``checked`` the number of rules that were checked, and ``checked_rules`` has their ids.
        """
        return {
            "verdict": str(self),
            "summary": self.summary,
            "state": self.state,
            "severity": self.severity,
            "healthy": self.healthy,
            "partial": self.is_partial,
            "checked": len(self.checked),
            "checked_rules": list(self.checked),
            "findings": [finding.as_json() for finding in self.findings],
            "not_checked": [rule._asdict() for rule in self.not_checked],
        }


MOST_FINDINGS = 5


def more_findings(count: int) -> str:
    return f"and {many(count - MOST_FINDINGS, 'more finding')}" if count > MOST_FINDINGS else ""
