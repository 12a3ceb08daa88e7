"""The view of a recorded run, and of its last steps, in the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import paragraph, shell_command, visible
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import MOST_FINDINGS, more_findings
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.layers.folding import ShortNames, fold_names
from te_precision_callbacks.runs import RecordedRun, list_runs
from te_precision_callbacks.runs.recorded import Curve, format_known_names
from te_precision_callbacks.runs.summary import (
    format_status,
    last_steps,
    loss_first,
    no_step_note,
    not_counted_notes,
    outcome_notes,
    precision_shares,
)
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.sinks.metrics import worst_first
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.names import Request, logged_request
from te_precision_callbacks.statistics.series import Family, family_of
from te_precision_callbacks.statistics.table import StatisticSource, Worse
from te_precision_callbacks.views.report.data import curves_of

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


class RunView:
    """The view of a run, which rich draws again whenever the terminal changes its size.

    Args:
        statistics: names as in records, or without recipe and direction; by default, losses by quantization first.
        most: the number of layers of each statistic.

    Attributes:
        more: the command that prints the complete verdict.
        outcome: lines about a failure and broken clauses of the contract.
        facts: integration, recipes, GPU and ranks of the last process start.
        coverage: precision -> its share of the multiply-adds; empty if not recorded.
        other_steps: lines on steps with other products in low precision than the last step.
        notes: missing, unmeasured or damaged parts.
    """

    def __init__(self, run: RecordedRun, statistics: Sequence[str] = (), most: int = MOST_LAYERS) -> None:
        groups = _group_series(run)
        chosen = _choose_statistics(groups, statistics, run)
        option = ["--run", run.run_id] if len(list_runs(run.path)) > 1 else []
        events = (row for row in run.events_of_ranks() if (row["kind"], row["severity"]) != ("parameters", "info"))
        self.run = run
        self.verdict = diagnose(run)
        self.more = shell_command("te-precision", "diagnose", str(run.path), *option)
        self.status = format_status(run)
        self.outcome = outcome_notes(run)
        self.facts = _summarize_facts(run)
        self.first: int | None = pc.min(run.series["first"]).as_py()
        self.last: int | None = pc.max(run.series["last"]).as_py()
        self.coverage = precision_shares(run)
        self.other_steps = other_steps_of_run(run)
        self.scalars = {name: run.metrics[name] for name in loss_first(run.metrics)}
        self.worst = {name: list(_worst_series(run, groups[name], most)) for name in chosen}
        self.more_statistics = [name for name in groups if name not in chosen]
        self.events: list[dict[str, Any]] = []
        for row in list(events)[-MOST_EVENTS:]:
            texts = {name: " ".join((row[name] or "").split()) for name in ("kind", "severity", "layer", "text")}
            self.events.append({"iteration": row["iteration"], "ranks": row["ranks"], **texts})
        self.notes = [*no_step_note(run), *run.notes, *not_counted_notes(run)]
        unknown = ", ".join(name for name in chosen if not groups[name].worst)
        if unknown:
            self.notes.append(
                f"{unknown}: all values so far are from the first step of delayed scaling, which has no scale yet."
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        run = self.run
        for note in run.unread:
            yield paragraph(f"Note: {note}", "yellow")
        for line in self.outcome:
            yield paragraph(line, "bold red")
        yield from _verdict(self)
        yield paragraph(f"run {run.run_id}, {self.status}, in {run.path}", "bold")
        yield paragraph(_facts(self))
        if self.coverage:
            shares = ", ".join(f"{name.upper()} {percent(share)} %" for name, share in self.coverage.items())
            yield paragraph(f"{shares} of the multiply-adds.")
        for line in self.other_steps:
            yield paragraph(f"{line}.")
        yield from _scalars(self, options.max_width)
        if self.worst:
            yield Text()
            yield _worst_layers(self, options.max_width)
        if self.more_statistics:
            yield Text()
            yield paragraph(f"Not shown: {some_of(self.more_statistics, most=8)}. Show one with --statistic.", "dim")
        if self.events:
            yield Text("\nLast events", style="bold")
            for event in self.events:
                yield paragraph(format_event(event), _SEVERITY.get(event["severity"], ""))
        for note in self.notes:
            if note not in run.unread:
                yield paragraph(f"Note: {note}", "yellow")

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
            if _is_histogram(logged_request(name)):
                raise NothingToShowError(
                    f"{name!r} is a histogram, which has no worst value. See 'te-precision report'."
                )
            known_names = format_known_names(name, list(groups))
            raise NothingToShowError(f"{run.path} has no statistic {name!r}.{known_names}{run.notes_sentence}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _worst_series(run: RecordedRun, group: _Group, most: int) -> Iterator[WorstSeries]:
    chosen = worst_first(most, group.family, group.worst)
    for number, curve in curves_of(run, chosen).items():
        if len(curve.values):
            is_low = group.family.worse is Worse.LOW
            worst_at = run.series["worst_at"][number].as_py()
            yield WorstSeries(run.subjects[number], group.worst[number], worst_at, is_low, curve)


_LEAST_NAME = 16
_LEAST_CURVE = 8
MOST_CURVE = 60

_SEVERITY = {"error": "bold red", "warning": "yellow"}


def format_event(event: Mapping[str, Any]) -> str:
    step = "" if event["iteration"] is None else f"step {event['iteration']}"
    named = () if event["ranks"] == [0] else event["ranks"]  # rank 0 is implied
    ranks = fold_names((f"rank {rank}" for rank in named), most=2)
    parts = [step, *ranks, event["kind"], event["layer"], event["text"]]
    return visible("  ".join(filter(None, parts)))


def _verdict(view: RunView) -> Iterator[RenderableType]:
    verdict = view.verdict
    style = "bold green" if verdict.healthy else "bold yellow"
    if verdict.wrong:
        style = _SEVERITY[verdict.severity]
    yield paragraph(verdict.summary, style)
    for finding in verdict[:MOST_FINDINGS]:
        severity = _SEVERITY.get(finding.severity, "")
        yield Padding(paragraph(f"{finding.severity}: {finding}", severity), (0, 0, 0, 2))
        yield Padding(paragraph(f"{finding.remedy}.", "dim"), (0, 0, 0, 4))
    if verdict:
        yield paragraph("; ".join(filter(None, [more_findings(len(verdict)), f"more: {view.more}"])))
    if verdict.unchecked:
        label = "Not checked" if any(rule.essential for rule in verdict.not_checked) else "Not checked (optional)"
        yield paragraph(f"{label}: {', '.join(verdict.unchecked)}.", "dim")
    yield Text()


def _facts(view: RunView) -> str:
    parts = [f"{name}: {value}" for name, value in view.facts.items()]
    if len(view.run.segments) > 1:
        parts.append(f"{len(view.run.segments)} segments")
    if view.first is not None:
        parts.append(f"statistics of steps {view.first} to {view.last}")
    parts.append(f"{len(view.run.series):,} series")
    if lacks := view.run.missing_contents:
        parts.append(lacks[:1].lower() + lacks[1:].rstrip("."))
    return ", ".join(parts)


def _scalars(view: RunView, width: int) -> Iterator[Text]:
    """Yield a line for each metric; metrics with equal values share one."""
    names = ShortNames(map(visible, view.scalars))
    drawn: set[str] = set()
    for name, curve in view.scalars.items():
        if name in drawn:
            continue
        same_curves = [other for other, other_curve in view.scalars.items() if curve.equals(other_curve)]
        text = f"{names.of(visible(name), max(_LEAST_NAME, width // 4))}  {curve.values[0]:.4g}"
        if len(curve.values) > 1:
            text += f" -> {curve.values[-1]:.4g}  "
            text += sparkline(curve.iterations, curve.values, width - len(text))
        yield Text(text, no_wrap=True, overflow="crop")
        if len(same_curves) > 1:
            yield paragraph(f"  same values: {', '.join(same_curves[1:])}", "dim")
        drawn.update(same_curves)


def _worst_layers(view: RunView, width: int) -> Table:
    """A row for each of the worst layers, below the name of the statistic."""
    rows: list[tuple[WorstSeries | None, str, str, str]] = [(None, "", "last", "worst (step)")]
    for statistic, worst in view.worst.items():
        rows.append((None, visible(statistic), "", ""))
        for series in [series for series in worst if series.low_is_worse or series.curve.values.any()] or worst:
            last = _number(float(series.curve.values[-1]))
            rows.append((series, _name(series), last, f"{_number(series.worst)} ({series.worst_iteration})"))
    _, labels, *columns = zip(*rows, strict=True)
    room = width - sum(max(map(len, column)) + 1 for column in columns)
    longest = max(map(len, labels))
    name_width = max(min(longest, room if room < 2 * _LEAST_NAME else max(room * 2 // 3, room - MOST_CURVE - 1)), 1)
    names = ShortNames(label for series, label, _, _ in rows if series is not None)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, width=name_width)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for shown, label, *numbers in rows:
        if shown is None:
            table.add_row(Text(label, style="bold"), *numbers, "")
            continue
        curve = shown.curve
        drawn = sparkline(curve.iterations, curve.values, room - name_width - 1, low_is_worse=shown.low_is_worse)
        table.add_row(Text(names.of(label, name_width)), *numbers, Text(drawn))
    return table


def _number(value: float) -> str:
    if 1000 <= abs(value) < 1e9 and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _name(series: WorstSeries) -> str:
    rank = "" if series.subject.rank is None else f"rank {series.subject.rank}"
    return visible(" ".join(filter(None, [series.subject.layer, series.subject.tensor, rank])))


_BARS = np.array(list("▁▂▃▄▅▆▇█"))
_NO_NUMBER = "!"
_MANY_POWERS = 100.0
"""The factor between the largest and the smallest number from which on a curve is that of the logarithms."""


def sparkline(iterations: Ints, values: Floats, width: int, *, low_is_worse: bool = False) -> str:
    """A curve over time, of at most ``width`` and 60 characters; empty if the width is too small.

    Each character covers the same number of iterations and shows their worst value, so peaks stay visible. A blank has
    no value, an exclamation mark has an inf or nan.
    """
    if not len(values) or width < _LEAST_CURVE:
        return ""
    span = int(iterations[-1] - iterations[0]) + 1
    width = min(width, MOST_CURVE, len(np.unique(iterations)))
    bucket = (iterations - iterations[0]) * width // span
    worst = np.full(width, np.inf if low_is_worse else -np.inf)
    finite = np.isfinite(values)
    (np.minimum if low_is_worse else np.maximum).at(worst, bucket[finite], values[finite])
    worst[bucket[~finite]] = np.nan
    return bars(worst, np.bincount(bucket, minlength=width) > 0)


def bars(values: Floats, is_number: Mask, *, least_span: float = 0.0) -> str:
    """A character for each value: its level, a blank if it is not known, or an exclamation mark for inf and nan.

    Args:
        least_span: the smallest difference between the lowest and the highest bar, as a share of the largest magnitude.
    """
    text = np.where(is_number, _NO_NUMBER, " ")
    drawn = is_number & np.isfinite(values)
    if drawn.any():
        levels = values[drawn] / max(np.abs(values[drawn]).max(), 1.0)  # avoids overflow in differences
        least = least_span * np.abs(levels).max()
        if levels.min() > 0 and levels.max() / levels.min() > _MANY_POWERS:
            levels = np.log(levels)
            least = 0.0
        shares = (levels - levels.min()) / (max(levels.max() - levels.min(), least) or 1.0)
        text[drawn] = _BARS[np.rint(shares * (len(_BARS) - 1)).astype(np.int64)]
    return "".join(text)


# ---------------------------------------------------------------------- the last steps


class LastStepsView:
    """The last steps that a run has recorded, as rich draws them.

    Args:
        most: the number of tensors; those around the first one with inf or nan, or else the last ones.

    Raises:
        NothingToShowError: the run has recorded none.
    """

    def __init__(self, run: RecordedRun, most: int) -> None:
        data = last_steps(run)
        if data is None:
            why = "it has not ended, it ran with every_step=False, or no GEMM of its layers is watched"
            if run.segments and run.segments[-1].status == "stopped without an end":
                why = "its process was killed (SIGKILL), or crashed, without recording its end"
            why = (run.segments and run.segments[-1].lost) or why
            raise NothingToShowError(f"{run.run_id} has recorded no last steps: {why}.")
        self._most = most
        self.data = data

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        tensors = self.data["tensors"]
        iterations: Sequence[int] = self.data["iterations"]
        first = self.data["first"]
        centre = len(tensors) - 1 if first is None else first[0]
        begin = max(0, min(centre - self._most // 2, len(tensors) - self._most))
        end = min(begin + self._most, len(tensors))
        names = [visible(" ".join(tensor)) for tensor in tensors[begin:end]]
        room = options.max_width - max(map(len, names)) - 24
        since = max(0, len(iterations) - max(8, min(room, MOST_CURVE)))
        yield paragraph(self.data["text"], "bold")
        yield paragraph(
            "Largest magnitudes (inputs of norms: RMS of a token; updates: share of the norm of the weight) in the"
            f" steps {iterations[since]} to {iterations[-1]}, from left to right, and in the last one; the tensors"
            " in the order of execution. Each row has a scale of its own, of a factor of 2 or more. !: inf or nan,"
            " blank: not read."
        )
        table = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(3):
            table.add_column(no_wrap=True)
        if begin:
            table.add_row(f"{begin} before", "", "")
        for number, name in enumerate(names, begin):
            magnitudes = self.data["magnitudes"][number]
            curve = Text(_bars_of(magnitudes[since:]))
            if first is not None and number == first[0]:
                column = iterations.index(first[1]) - since
                curve.stylize("bold reverse red", column, column + 1)
            table.add_row(name, curve, _magnitude(magnitudes[-1]))
        if end < len(tensors):
            table.add_row(f"{len(tensors) - end} after", "", "")
        losses = self.data["loss"][since:]
        if any(loss is not None for loss in losses):
            table.add_row("loss", _bars_of(losses), _magnitude(losses[-1]))
        yield table
        if first is not None:
            layer, tensor = tensors[first[0]]
            yield paragraph(f"First inf or nan: the {tensor} of {layer}, in step {first[1]}.", "bold red")


def _magnitude(number: float | str | None) -> str:
    if isinstance(number, float):
        return f"{number:.4g}"
    return number or ""


def _bars_of(numbers: Sequence[float | str | None]) -> str:
    is_number = [number is not None for number in numbers]
    return bars(np.array([float(number or 0) for number in numbers]), np.array(is_number), least_span=0.5)
