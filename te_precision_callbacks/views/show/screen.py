"""Renders the view of a run, and its last steps, in the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.terminal import paragraph, visible
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.diagnosis.finding import MOST_FINDINGS, more_findings
from te_precision_callbacks.layers.folding import ShortNames, fold_names
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.summary import last_steps
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.views.show.view import NothingToShowError, RunView, ShownEvent, WorstSeries

_LEAST_NAME = 16
_LEAST_CURVE = 8
MOST_CURVE = 60

_SEVERITY = {"error": "bold red", "warning": "yellow"}


class Screen:
    """A view of a run that rich draws again whenever the terminal changes its size."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        view = self._view
        run = view.run
        for note in run.unread:
            yield paragraph(f"Note: {note}", "yellow")
        for line in view.outcome:
            yield paragraph(line, "bold red")
        yield from _verdict(view)
        yield paragraph(f"run {run.run_id}, {view.status}, in {run.path}", "bold")
        yield paragraph(_facts(view))
        if view.coverage:
            shares = ", ".join(f"{name.upper()} {percent(share)} %" for name, share in view.coverage.items())
            yield paragraph(f"{shares} of the multiply-adds.")
        for line in view.other_steps:
            yield paragraph(f"{line}.")
        yield from _scalars(view, options.max_width)
        if view.worst:
            yield Text()
            yield _worst_layers(view, options.max_width)
        if view.more_statistics:
            yield Text()
            yield paragraph(f"Not shown: {some_of(view.more_statistics, most=8)}. Show one with --statistic.", "dim")
        if view.events:
            yield Text("\nLast events", style="bold")
            for event in view.events:
                yield paragraph(format_event(event), _SEVERITY.get(event["severity"], ""))
        for note in view.notes:
            if note not in run.unread:
                yield paragraph(f"Note: {note}", "yellow")


def format_event(event: ShownEvent) -> str:
    at = "" if event["iteration"] is None else f"step {event['iteration']}"
    named = () if event["ranks"] == [0] else event["ranks"]  # rank 0 is implied
    ranks = fold_names((f"rank {rank}" for rank in named), most=2)
    parts = [at, *ranks, event["kind"], event["layer"], event["text"]]
    return visible("  ".join(filter(None, parts)))


def _verdict(view: RunView) -> Iterator[RenderableType]:
    verdict = view.verdict
    style = _SEVERITY[verdict.severity] if verdict.wrong else "bold green" if verdict.healthy else "bold yellow"
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
        alike = [other for other, other_curve in view.scalars.items() if curve.equals(other_curve)]
        text = f"{names.of(visible(name), max(_LEAST_NAME, width // 4))}  {curve.values[0]:.4g}"
        if len(curve.values) > 1:
            text += f" -> {curve.values[-1]:.4g}  "
            text += sparkline(curve.iterations, curve.values, width - len(text))
        yield Text(text, no_wrap=True, overflow="crop")
        if len(alike) > 1:
            yield paragraph(f"  same values: {', '.join(alike[1:])}", "dim")
        drawn.update(alike)


def _worst_layers(view: RunView, width: int) -> Table:
    """A row for each of the worst layers, below the name of the statistic."""
    rows = [("", "last", "worst (step)")]
    of_row: list[WorstSeries | None] = [None]
    for statistic, worst in view.worst.items():
        rows.append((visible(statistic), "", ""))
        of_row.append(None)
        for series in [series for series in worst if series.low_is_worse or series.curve.values.any()] or worst:
            last = _number(float(series.curve.values[-1]))
            rows.append((_name(series), last, f"{_number(series.worst)} ({series.worst_iteration})"))
            of_row.append(series)
    room = width - sum(max(len(row[column]) for row in rows) + 1 for column in (1, 2))
    longest = max(len(row[0]) for row in rows)
    name_width = max(min(longest, room if room < 2 * _LEAST_NAME else max(room * 2 // 3, room - MOST_CURVE - 1)), 1)
    names = ShortNames(_name(series) for series in of_row if series is not None)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, width=name_width)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for (name, *numbers), shown in zip(rows, of_row, strict=True):
        if shown is None:
            table.add_row(Text(name, style="bold"), *numbers, "")
            continue
        curve = shown.curve
        drawn = sparkline(curve.iterations, curve.values, room - name_width - 1, low_is_worse=shown.low_is_worse)
        table.add_row(Text(names.of(name, name_width)), *numbers, Text(drawn))
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


def bars(values: Floats, known: Mask, *, least_span: float = 0.0) -> str:
    """A character for each value: its level, a blank if it is not known, or an exclamation mark for inf and nan.

    Args:
        least_span: the smallest difference between the lowest and the highest bar, as a share of the largest magnitude.
    """
    text = np.where(known, _NO_NUMBER, " ")
    drawn = known & np.isfinite(values)
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
    known = [number is not None for number in numbers]
    return bars(np.array([float(number or 0) for number in numbers]), np.array(known), least_span=0.5)
