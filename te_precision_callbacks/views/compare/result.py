"""The result of a comparison, and the findings of one run that the other does not have."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.diagnosis.finding import Finding
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs import RecordedRun


class ComparedVerdicts:
    """The verdicts of two runs.

    Attributes:
        only_a, only_b: the findings that the other run lacks for that rule, tensor and layer; with these layers only.
        not_checked_in_a: the rules of ``only_b`` that were not checked in A.
    """

    def __init__(self, a: RecordedRun, b: RecordedRun) -> None:
        self.a = diagnose(a)
        self.b = diagnose(b)
        self.only_a = tuple(_missing_in(self.a, self.b, "B"))
        self.only_b = tuple(_missing_in(self.b, self.a, "A"))
        unknown = (finding.rule for finding in self.only_b if finding.rule not in self.a.checked)
        self.not_checked_in_a = tuple(dict.fromkeys(unknown))

    @property
    def summary(self) -> str:
        partial = " and ".join(name for name, verdict in (("A", self.a), ("B", self.b)) if verdict.is_partial)
        unread = f" A part of {partial} cannot be read." if partial else ""
        if not self.b.checked:
            return f"Not enough checked in B.{unread}"
        gone = f" A has {many(len(self.only_a), 'finding')} that B does not have." if self.only_a else ""
        new = many(len(self.only_b), "finding") if self.only_b else "no finding"
        return f"B has {new} that A does not have.{gone}{unread}"

    def in_words(self) -> Iterator[str]:
        for finding in self.only_b:
            unknown = " This rule was not checked in A." if finding.rule in self.not_checked_in_a else ""
            yield f"{finding.severity}: {finding}.{unknown} {finding.remedy}."

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "a": self.a.summary,
            "b": self.b.summary,
            "only_a": [finding.as_json() for finding in self.only_a],
            "only_b": [finding.as_json() for finding in self.only_b],
            "not_checked_in_a": list(self.not_checked_in_a),
        }


def _missing_in(findings: Iterable[Finding], other_findings: Iterable[Finding], name: str) -> Iterator[Finding]:
    layers_of_rule: dict[tuple[str, str], set[str]] = defaultdict(set)
    for other in other_findings:
        layers_of_rule[other.rule, other.tensor] |= set(other.layers or [""])
    for finding in findings:
        has = layers_of_rule[finding.rule, finding.tensor]
        layers = tuple(layer for layer in finding.layers if layer not in has)
        if layers == finding.layers and not (not layers and "" in has):
            yield finding
        elif layers:  # the other run may have the finding for the described layer
            seen = f"{finding.seen_in_words}; {name} has this finding too, in other layers"
            yield dataclasses.replace(finding, layers=layers, seen=seen, seen_at=None)


Origin = Literal["made here", "inherited"]


class ComparisonError(PrecisionDebugError, ValueError):
    """Runs that cannot be compared: nothing pairs."""


@dataclass(frozen=True)
class FactDifference:
    """A fact that differs, such as ``versions.torch``, ``recipes``, ``coverage``, or the path of an option in the
    config. A value is empty if that side does not have the fact.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class StatisticDeparture:
    """A statistic with a lasting difference.

    Attributes:
        steps: the number of compared steps with the difference.
        to_the_end: whether it lasts to the end of the comparison.
        a, b: the medians of both sides over these steps.
        difference: the median of b - a over these steps, in ``unit``.
        unit: ``powers of two`` for magnitudes, ``points`` for percentages, ``dB``, or ``of its size`` for values of any
            sign.
        spread: the noise floor of the statistic, in ``unit``; None without one.
        bound: the threshold of a difference, in ``unit``.
        since: its possible beginning, right after the last value without it.
    """

    statistic: str
    gemm: str
    iteration: int
    until: int
    steps: int
    to_the_end: bool
    a: float
    b: float
    difference: float
    unit: str
    spread: float | None
    bound: float
    since: int

    @property
    def strength(self) -> float:
        return abs(self.difference) / self.bound


@dataclass(frozen=True)
class Parting:
    """A tensor that departs.

    Attributes:
        layer, tensor: empty for a metric of the trainer, such as the loss.
        rank: the rank of local values; None for reduced ones.
        since: the first possible iteration of its beginning; earlier than ``iteration`` if the steps before it have no
            values.
        departures: the statistics that depart, the strongest first.
        origin: ``made here`` if no source of the tensor departed by as much before; else ``inherited``.
        source: the source of most of the difference, such as ``layers.3.fc1 weight``; may be empty.
    """

    scope: str
    layer: str
    tensor: str
    rank: int | None
    iteration: int
    since: int
    departures: tuple[StatisticDeparture, ...]
    origin: Origin
    source: str

    @property
    def strongest(self) -> StatisticDeparture:
        return self.departures[0]

    @property
    def name(self) -> str:
        subject = " ".join(filter(None, (self.layer, self.tensor))) or self.strongest.statistic
        if self.rank is None:
            return subject
        return f"{subject} (rank {self.rank})"


@dataclass(frozen=True)
class Pairing:
    """The pairs of series.

    Attributes:
        series: the number of series on both sides, with common steps.
        without_steps: the number of series on both sides, without common steps.
        only_a, only_b: the number of series on one side only.
        layers: the number of layers on both sides.
        first, last: the first and last common iteration.
        with_other_rows: the layers with a different number of rows in a step of B, for example by the batch size.
        steps: the number of common steps.
    """

    series: int
    without_steps: int
    only_a: int
    only_b: int
    layers: int
    layers_only_a: tuple[str, ...]
    layers_only_b: tuple[str, ...]
    statistics_only_a: tuple[str, ...]
    statistics_only_b: tuple[str, ...]
    first: int | None
    last: int | None
    with_other_rows: tuple[str, ...] = ()
    steps: int = 0


@dataclass(frozen=True)
class Floor:
    """The noise floor: the baseline runs, and the number of series without a baseline, which use fixed bounds."""

    sides: tuple[str, ...]
    without: int


@dataclass(frozen=True)
class Yardstick:
    """A published bound for the difference of two losses.

    Attributes:
        bound: relative, such as 0.0025.
        source: who measured it.
        holds: whether the losses are within it; None if it is for other precisions.
    """

    name: str
    bound: float
    source: str
    holds: bool | None


@dataclass(frozen=True)
class LossSpike:
    """Steps where one loss is ten times the other or more, and the running medians are not."""

    steps: int
    iteration: int
    a: float
    b: float


@dataclass(frozen=True)
class LostLoss:
    """A loss that is not finite up to the end of its run. ``what``: ``nan``, ``inf``, ``-inf``, or several, such as
    ``inf or nan``.
    """

    since: int
    until: int
    what: str


_NEAR_ZERO = 0.01
"""Losses that are less apart than this share of the first loss are not told apart."""


@dataclass(frozen=True)
class LossComparison:
    """The loss curves as running medians, up to the step where either is lost.

    Attributes:
        steps: the number of common steps; without any, the values below are nan.
        window: the steps of the running median.
        stable_since: the first iteration of the stable phase, the last quarter.
        begin: A's first value.
        a, b: the means in the stable phase.
        relative: the mean of (b - a) / |a| in the stable phase.
        largest: the largest |b - a| / |a| in the last three quarters.
        floor: the largest magnitude of ``relative`` among the baselines.
        spike: a spike that the running median hides; None if the noise has similar spikes.
        precisions: the low precision of A and B, or else the most frequent one; empty if unknown.
        lost_a, lost_b: the steps where the loss of A and of B is lost.
    """

    name: str
    steps: int
    window: int
    stable_since: int
    begin: float
    a: float
    b: float
    relative: float
    largest: float
    largest_at: int
    floor: float | None
    yardsticks: tuple[Yardstick, ...]
    spike: LossSpike | None = None
    precisions: tuple[str, str] = ("", "")
    lost_a: LostLoss | None = None
    lost_b: LostLoss | None = None

    @property
    def is_finding(self) -> bool:
        """True if one loss is lost, a spike exists, or the difference exceeds the noise, and a factor of 2 or the
        published bound for these precisions.
        """
        if self.spike is not None or (self.lost_a is None) != (self.lost_b is None):
            return True
        broken = self.is_apart or any(yardstick.holds is False for yardstick in self.yardsticks)
        return broken and (self.floor is None or abs(self.relative) > self.floor)

    @property
    def is_apart(self) -> bool:
        """Whether one loss is at least twice the other in the stable phase; losses near 0 are not."""
        least, most = sorted((self.a, self.b))
        return 0 < 2 * least <= most and most - least >= _NEAR_ZERO * abs(self.begin)


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        facts: differences of config, versions, recipe, environment and coverage.
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        ordered: whether the order of execution is known; otherwise layers are in the order of their first values.
        parted: the tensors that depart, by iteration, then by execution order.
        all_equal: whether all values that pair are equal, to the last bit.
        loss: None if a side has no loss.
        notes: missing or damaged parts.
        verdicts: the findings of the rules on both sides; None if both sides are the same run.
        layers_apart: why no layers pair and only metrics of the trainer were compared, and the remedy; else empty.
    """

    a: str
    b: str
    facts: tuple[FactDifference, ...]
    pairing: Pairing
    lasting: int
    floor: Floor | None
    ordered: bool
    parted: tuple[Parting, ...]
    all_equal: bool
    loss: LossComparison | None
    notes: tuple[str, ...]
    same_run: bool = False
    verdicts: ComparedVerdicts | None = None
    layers_apart: str = ""

    @property
    def first(self) -> Parting | None:
        if self.parted:
            return self.parted[0]
        return None

    @property
    def has_findings(self) -> bool:
        return bool(self.parted) or (self.loss is not None and self.loss.is_finding)
