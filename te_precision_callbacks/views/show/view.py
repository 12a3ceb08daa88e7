"""The view of a recorded run for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import shell_command, visible
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.layers.folding import ShortNames
from te_precision_callbacks.runs import RecordedRun, list_runs
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.recorded import Curve, format_known_names
from te_precision_callbacks.runs.summary import (
    format_status,
    loss_first,
    no_step_note,
    not_counted_notes,
    outcome_notes,
    precision_shares,
)
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.names import Request, logged_request
from te_precision_callbacks.statistics.series import Family, family_of
from te_precision_callbacks.statistics.table import StatisticSource, Worse

MOST_LAYERS = 3

MOST_STATISTICS = 8

MOST_EVENTS = 5

_LOST = (StatisticSource.QUANTIZED, StatisticSource.LOSSES, StatisticSource.SCALE_LIMITS)


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
    outcome: tuple[str, ...]
    facts: dict[str, str]
    first: int | None
    last: int | None
    coverage: dict[str, float]
    other_steps: tuple[str, ...]
    scalars: dict[str, Curve]
    worst: dict[str, tuple[WorstSeries, ...]]
    more_statistics: tuple[str, ...]
    events: tuple[ShownEvent, ...]
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        return not (len(self.run.series) or self.scalars or self.coverage)

    def as_json(self) -> dict[str, Any]:
        """The output of ``te-precision show --json``, beginning with :meth:`Verdict.as_json`."""
        run = self.run
        content = dict(vars(self))
        del content["run"], content["verdict"]
        return {
            **content,
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
    content = dict(vars(series))
    subject = content.pop("subject")
    return {
        **subject._asdict(),
        **content,
        "last": float(series.curve.values[-1]),
        "last_iteration": int(series.curve.iterations[-1]),
        "curve": _curve_as_json(series.curve),
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
    groups = _groups(run)
    chosen = _choose_statistics(groups, statistics, run)
    segment = run.segments[-1] if run.segments else None
    events = (row for row in run.events_of_ranks() if (row["kind"], row["severity"]) != ("parameters", "info"))
    return RunView(
        run=run,
        verdict=diagnose(run),
        more=_command(run, "diagnose"),
        status=format_status(run),
        outcome=tuple(outcome_notes(run)),
        facts={} if segment is None else _summarize_facts(segment.facts, segment.world),
        first=min(run.series["first"].to_pylist(), default=None),
        last=max(run.series["last"].to_pylist(), default=None),
        coverage=precision_shares(run),
        other_steps=tuple(other_steps_of_run(run)),
        scalars={name: run.metrics[name] for name in loss_first(run.metrics)},
        worst={name: tuple(_worst_series(run, groups, name, most)) for name in chosen},
        more_statistics=tuple(name for name in groups if name not in chosen),
        events=tuple(map(_shown_event, events))[-MOST_EVENTS:],
        notes=(
            *no_step_note(run),
            *run.notes,
            *not_counted_notes(run),
            *_only_first_steps(groups, chosen),
        ),
    )


def _command(run: RecordedRun, name: str) -> str:
    several = len(list_runs(run.path)) > 1
    return shell_command("te-precision", name, str(run.path), *(["--run", run.run_id] if several else []))


def short_names(*columns: pa.ChunkedArray) -> ShortNames:
    names = chain(*(column.unique().to_pylist() for column in columns))
    return ShortNames(map(visible, filter(None, names)))


def _only_first_steps(groups: Mapping[str, _Group], chosen: Iterable[str]) -> Iterable[str]:
    names = [name for name in chosen if not _worst_numbers(groups[name])]
    if names:
        yield (
            f"{', '.join(names)}: all values so far are from the first step of delayed scaling, which has no scale yet."
        )


_SHORT = {"integration": "integration", "recipes": "recipe", "gpu": "GPU", "te_backend": "Transformer Engine"}


def _summarize_facts(facts: Any, world: int) -> dict[str, str]:
    parts = {}
    for key, name in _SHORT.items():
        value = facts.get(key)
        if value:
            texts = (
                value if isinstance(value, (list, tuple)) else ["session (own loop)" if value == "session" else value]
            )
            parts[name] = ", ".join(map(str, texts))
    return {**parts, "ranks": str(world)}


class _Series(NamedTuple):
    number: int
    family: Family
    worst: float | None
    worst_iteration: int | None


_Group = dict[Subject, _Series]


def _groups(run: RecordedRun) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for number, (subject, row) in enumerate(
        zip(run.subjects, run.series.select(["worst", "worst_at", "count"]).to_pylist(), strict=True)
    ):
        family = family_of(subject.tensor, subject.statistic, subject.gemm)
        if row["count"] and (family.request is None or not family.request.statistic.is_histogram):
            group = groups.setdefault(subject.statistic, {})
            group[subject._replace(statistic="")] = _Series(number, family, row["worst"], row["worst_at"])
    return dict(sorted(groups.items(), key=lambda item: _rank(next(iter(item[1].values())).family.request)))


def _worst_numbers(group: _Group) -> dict[Subject, float]:
    return {place: series.worst for place, series in group.items() if series.worst is not None}


def _rank(request: Request | None) -> tuple[int, str]:
    if request is None:
        return 4, ""
    if request.statistic.worse is Worse.NEITHER:
        return 3, request.label
    if request.statistic.name == "nonfinite_num":
        return 0, request.label
    return (1 if request.statistic.source in _LOST else 2), request.label


def _has_direction(group: _Group) -> bool:
    return any(series.family.has_direction for series in group.values())


def _choose_statistics(groups: dict[str, _Group], wanted: Sequence[str], run: RecordedRun) -> list[str]:
    if not wanted:
        with_worst = [name for name, group in groups.items() if _has_direction(group)]
        # A statistic that is equal in all layers, such as no overflow, does not point at a layer.
        varying = [name for name in with_worst if len(set(_worst_numbers(groups[name]).values())) > 1]
        return (varying or with_worst)[:MOST_STATISTICS]
    chosen: dict[str, None] = {}
    for name in wanted:
        matching = [label for label in groups if name == label or _is_of(label, name)]
        if not matching and len(run.series):
            raise NothingToShowError(_missing_statistic(run, name, list(groups)))
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _missing_statistic(run: RecordedRun, name: str, known: Sequence[str]) -> str:
    histogram = logged_request(name)
    if histogram is not None and histogram.statistic.is_histogram and name in run.series["statistic"].to_pylist():
        return f"{name!r} is a histogram, which has no worst value. See 'te-precision report'."
    return f"{run.path} has no statistic {name!r}.{format_known_names(name, known)}{run.notes_sentence}"


def _is_of(label: str, statistic: str) -> bool:
    request = logged_request(label)
    return request is not None and request.statistic.name == statistic


def _worst_series(run: RecordedRun, groups: dict[str, _Group], name: str, most: int) -> Iterable[WorstSeries]:
    group = groups[name]
    family = next(iter(group.values())).family
    chosen = worst_first(most, family, _worst_numbers(group))
    table = run.values(group[place].number for place in chosen)
    numbers = table["series"].to_numpy()
    for place in chosen:
        number, family, worst, worst_iteration = group[place]
        begin, end = np.searchsorted(numbers, (number, number + 1)).tolist()
        rows = table.slice(begin, end - begin)
        rows = rows.filter(pa.array(~family.leaves_out(rows["flags"].fill_null(0).to_numpy())))
        curve = Curve(rows["iteration"].to_numpy(), rows["value"].to_numpy())
        if worst is None or worst_iteration is None or not len(curve.values):
            continue
        subject = place._replace(statistic=family.statistic)
        yield WorstSeries(subject, worst, worst_iteration, family.worse is Worse.LOW, curve)


def _shown_event(row: Mapping[str, Any]) -> ShownEvent:
    texts = {name: " ".join((row[name] or "").split()) for name in ("kind", "severity", "layer", "text")}
    return {"iteration": row["iteration"], "ranks": row["ranks"], **texts}
