"""The view of a recorded run for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import shell_command
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs import RecordedRun, list_runs
from te_precision_callbacks.runs.recorded import Curve, format_known_names
from te_precision_callbacks.runs.summary import (
    format_status,
    loss_first,
    no_step_note,
    not_counted_notes,
    outcome_notes,
    precision_shares,
)
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.names import Request, logged_request
from te_precision_callbacks.statistics.series import Family, family_of
from te_precision_callbacks.statistics.table import StatisticSource, Worse
from te_precision_callbacks.views.report.families import curves_of

MOST_LAYERS = 3

MOST_STATISTICS = 8

MOST_EVENTS = 5

_LOST = (StatisticSource.QUANTIZED, StatisticSource.LOSSES, StatisticSource.SCALE_LIMITS)

_FACT_NAMES = {"integration": "integration", "recipes": "recipe", "gpu": "GPU", "te_backend": "Transformer Engine"}


class NothingToShowError(PrecisionDebugError, ValueError):
    """A run has no values at all, or no values of a requested statistic."""


@dataclass(frozen=True)
class WorstSeries:
    """A statistic of one tensor, among the worst of the run.

    Attributes:
        worst, worst_iteration: the worst value, or the largest magnitude if the statistic has no worse direction.
        curve: all values, without delayed scaling's first step.
    """

    subject: Subject
    worst: float
    worst_iteration: int
    low_is_worse: bool
    curve: Curve


ShownEvent = Mapping[str, Any]


@dataclass(frozen=True)
class RunView:
    """The view of a run.

    Attributes:
        more: the command that prints the complete verdict.
        outcome: lines about a failure and broken clauses of the contract.
        facts: integration, recipes, GPU and ranks of the last process start.
        coverage: precision -> its share of the multiply-adds; empty if not recorded.
        other_steps: lines on steps with other products in low precision than the last step.
        notes: missing, unmeasured or damaged parts.
    """

    run: RecordedRun
    verdict: Verdict
    more: str
    status: str
    outcome: Sequence[str]
    facts: dict[str, str]
    first: int | None
    last: int | None
    coverage: dict[str, float]
    other_steps: Sequence[str]
    scalars: dict[str, Curve]
    worst: dict[str, list[WorstSeries]]
    more_statistics: Sequence[str]
    events: Sequence[ShownEvent]
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """The output of ``te-precision show --json``, beginning with :meth:`Verdict.as_json`."""
        run = self.run
        return {
            **{name: value for name, value in vars(self).items() if name not in ("run", "verdict")},
            "path": str(run.path),
            "run_id": run.run_id,
            "source": run.source,
            "segments": len(run.segments),
            "steps": len(run.steps),
            "series": len(run.series),
            "unread": run.unread,
            "lacks": run.missing_contents,
            "scalars": {name: _curve_as_json(curve) for name, curve in self.scalars.items()},
            "worst": {name: list(map(_worst_as_json, worst)) for name, worst in self.worst.items()},
            **self.verdict.as_json(),
        }


def _worst_as_json(series: WorstSeries) -> dict[str, Any]:
    return {
        **series.subject._asdict(),
        "worst": series.worst,
        "worst_iteration": series.worst_iteration,
        "low_is_worse": series.low_is_worse,
        "curve": _curve_as_json(series.curve),
        "last": float(series.curve.values[-1]),
        "last_iteration": int(series.curve.iterations[-1]),
    }


def _curve_as_json(curve: Curve) -> dict[str, Any]:
    return {"iterations": curve.iterations.tolist(), "values": curve.values.tolist()}


def read_view(
    run: RecordedRun,
    statistics: Sequence[str] = (),
    most: int = MOST_LAYERS,
) -> RunView:
    """Read the view of a run.

    Args:
        statistics: names as in records, or without recipe and direction; by default, losses by quantization first.
        most: the number of layers of each statistic.
    """
    groups = _group_series(run)
    chosen = _choose_statistics(groups, statistics, run)
    notes = [*no_step_note(run), *run.notes, *not_counted_notes(run)]
    unknown = ", ".join(name for name in chosen if not groups[name].worst)
    if unknown:
        notes.append(
            f"{unknown}: all values so far are from the first step of delayed scaling, which has no scale yet."
        )
    option = ["--run", run.run_id] if len(list_runs(run.path)) > 1 else []
    events = (row for row in run.events_of_ranks() if (row["kind"], row["severity"]) != ("parameters", "info"))
    return RunView(
        run=run,
        verdict=diagnose(run),
        more=shell_command("te-precision", "diagnose", str(run.path), *option),
        status=format_status(run),
        outcome=outcome_notes(run),
        facts=_summarize_facts(run),
        first=min(run.series["first"].to_pylist(), default=None),
        last=max(run.series["last"].to_pylist(), default=None),
        coverage=precision_shares(run),
        other_steps=other_steps_of_run(run),
        scalars={name: run.metrics[name] for name in loss_first(run.metrics)},
        worst={name: list(_worst_series(run, groups[name], most)) for name in chosen},
        more_statistics=[name for name in groups if name not in chosen],
        events=list(map(_shown_event, events))[-MOST_EVENTS:],
        notes=notes,
    )


def _summarize_facts(run: RecordedRun) -> dict[str, str]:
    if not run.segments:
        return {}
    segment = run.segments[-1]
    texts = {}
    for key, name in _FACT_NAMES.items():
        value = segment.facts.get(key)
        if value == "session":
            value = "session (own loop)"
        if value:
            texts[name] = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return {**texts, "ranks": str(segment.world)}


class _Group(NamedTuple):
    """The series with values of a statistic; ``worst``: series -> worst value, without delayed scaling's first step."""

    family: Family
    worst: dict[int, float]


def _group_series(run: RecordedRun) -> dict[str, _Group]:
    """Return statistic -> its series, the most important statistic first, without histograms."""
    groups: dict[str, _Group] = {}
    for row in run.series.to_pylist():
        if row["count"]:
            name = row["statistic"] or ""
            group = groups.setdefault(name, _Group(family_of(row["tensor"] or "", name), {}))
            if row["worst"] is not None:
                group.worst[row["series"]] = row["worst"]
    ordered = sorted(groups, key=lambda name: _priority(groups[name].family.request))
    return {name: groups[name] for name in ordered if not _is_histogram(groups[name].family.request)}


def _is_histogram(request: Request | None) -> bool:
    return request is not None and request.statistic.is_histogram


def _priority(request: Request | None) -> tuple[int, str]:
    if request is None:
        return 4, ""
    if request.statistic.worse is Worse.NEITHER:
        return 3, request.label
    if request.statistic.name == "nonfinite_num":
        return 0, request.label
    return (1 if request.statistic.source in _LOST else 2), request.label


def _choose_statistics(groups: Mapping[str, _Group], names: Sequence[str], run: RecordedRun) -> list[str]:
    if not names:
        with_direction = [label for label, group in groups.items() if group.family.has_direction]
        # A statistic that is equal in all layers, such as no overflow, does not point at a layer.
        varying = [label for label in with_direction if len(set(groups[label].worst.values())) > 1]
        return (varying or with_direction)[:MOST_STATISTICS]
    chosen: dict[str, None] = {}
    for name in names:
        matching = []
        for label, group in groups.items():
            request = group.family.request
            if name == label or (request is not None and name == request.statistic.name):
                matching.append(label)
        if not matching and len(run.series):
            if _is_histogram(logged_request(name)) and name in run.series["statistic"].to_pylist():
                raise NothingToShowError(
                    f"{name!r} is a histogram, which has no worst value. See 'te-precision report'."
                )
            known = format_known_names(name, list(groups))
            raise NothingToShowError(f"{run.path} has no statistic {name!r}.{known}{run.notes_sentence}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _worst_series(run: RecordedRun, group: _Group, most: int) -> Iterator[WorstSeries]:
    chosen = worst_first(most, group.family, group.worst)
    for number, curve in zip(chosen, curves_of(run, chosen), strict=True):
        if len(curve.values):
            is_low = group.family.worse is Worse.LOW
            worst_at = run.series["worst_at"][number].as_py()
            yield WorstSeries(run.subjects[number], group.worst[number], worst_at, is_low, curve)


def _shown_event(row: Mapping[str, Any]) -> ShownEvent:
    texts = {name: " ".join((row[name] or "").split()) for name in ("kind", "severity", "layer", "text")}
    return {"iteration": row["iteration"], "ranks": row["ranks"], **texts}
