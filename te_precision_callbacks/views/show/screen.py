"""Renders the view of a run in the width of the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.terminal import paragraph, visible
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.diagnosis.finding import MOST_FINDINGS, more_findings
from te_precision_callbacks.layers.folding import ShortNames, fold_names
from te_precision_callbacks.runs.recorded import Curve
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.show.view import RunView, ShownEvent, WorstSeries

_LEAST_NAME = 16
_LEAST_CURVE = 8
_MOST_CURVE = 60
_SHADES = "█▒░▓"
_HEADERS = ("last", "worst (step)")

_COLOURS = {"nvfp4": "magenta", "mxfp8": "cyan", "fp8": "green"}
_SEVERITY = {"error": "bold red", "warning": "yellow"}


class Screen:
    """A view of a run that rich draws again whenever the terminal changes its size."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        view = self._view
        width = options.max_width
        run = view.run
        for note in run.unread:
            yield paragraph(f"Note: {note}", "yellow")
        for line in view.outcome:
            yield paragraph(line, "bold red")
        yield from _verdict(view)
        yield paragraph(f"run {run.run_id}, {view.status}, in {run.path}", "bold")
        yield paragraph(_facts(view))
        if view.coverage:
            yield from _coverage(view.coverage, width)
        for line in view.other_steps:
            yield paragraph(visible(f"{line}."))
        yield from _scalars(view.scalars, width, _short_names(run.scalars["name"]))
        names = _short_names(run.layers["layer"], run.series["layer"])
        for statistic, worst in view.worst.items():
            if worst:
                shown = [series for series in worst if series.low_is_worse or series.curve.values.any()] or worst
                yield from (Text(), _statistic(statistic, shown, width, names))
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


def _short_names(*columns: pa.ChunkedArray) -> ShortNames:
    names = itertools.chain(*(column.unique().to_pylist() for column in columns))
    return ShortNames(map(visible, filter(None, names)))


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
    if verdict:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in verdict[:MOST_FINDINGS]:
            text = Group(paragraph(str(finding)), paragraph(f"{finding.remedy}.", "dim"))
            table.add_row(Text(finding.severity, _SEVERITY.get(finding.severity, "")), text)
        yield table
        left = more_findings(len(verdict))
        yield paragraph(f"{f'{left}; ' if left else ''}more: {view.more}")
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
    return visible(", ".join(parts))


def _coverage(coverage: dict[str, float], width: int) -> Iterator[Text]:
    bar = Text()
    names = Text()
    for (name, share), block in zip(coverage.items(), itertools.cycle(_SHADES)):
        style = _COLOURS.get(name, "dim")
        bar.append(block * max(1, round(share * min(width, 60))), style)
        names.append(f"{block} ", style)
        names.append(f"{visible(name.upper())} {percent(share)} %  ")
    yield bar
    yield names


def _scalars(scalars: dict[str, Curve], width: int, names: ShortNames) -> Iterator[RenderableType]:
    """Yield a line for each metric; metrics with equal values share one."""
    drawn: set[str] = set()
    for name, curve in scalars.items():
        if name in drawn:
            continue
        alike = [other for other, other_curve in scalars.items() if curve.equals(other_curve)]
        yield _scalar(name, curve, width, names)
        if len(alike) > 1:
            yield paragraph(f"  same values: {', '.join(alike[1:])}", "dim")
        drawn.update(alike)


def _scalar(name: str, curve: Curve, width: int, names: ShortNames) -> Text:
    name = names.of(visible(name), max(_LEAST_NAME, width // 4))
    if len(curve.values) == 1:
        return Text(f"{name}  {curve.values[0]:.4g}")
    numbers = f"{curve.values[0]:.4g} -> {curve.values[-1]:.4g}"
    drawn = _curve(curve, width - len(name) - len(numbers) - 4)
    return Text(f"{name}  {numbers}  {drawn}", no_wrap=True, overflow="crop")


def _curve(curve: Curve, width: int, *, low_is_worse: bool = False) -> str:
    """A curve in the remaining width; empty if that is too small."""
    if width < _LEAST_CURVE:
        return ""
    return sparkline(curve.iterations, curve.values, min(width, _MOST_CURVE), low_is_worse=low_is_worse)


def _statistic(statistic: str, worst: Sequence[WorstSeries], width: int, names: ShortNames) -> Table:
    numbers = []
    for series in worst:
        last = _number(float(series.curve.values[-1]))
        numbers.append((last, f"{_number(series.worst)} ({series.worst_iteration})"))
    width_of_numbers = sum(max(map(len, column)) for column in zip(_HEADERS, *numbers, strict=True))
    room = max(width - width_of_numbers - len(_HEADERS) - 1, _LEAST_NAME)
    longest = max(len(statistic), *(sum(map(len, _name(series))) for series in worst))
    name_width = min(longest, room if room < 2 * _LEAST_NAME else max(room * 2 // 3, room - _MOST_CURVE - 1))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(Text(visible(statistic), style="bold"), no_wrap=True, width=max(name_width, 1))
    for header in _HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for series, cells in zip(worst, numbers, strict=True):
        layer, rest = _name(series)
        drawn = _curve(series.curve, room - name_width - 1, low_is_worse=series.low_is_worse)
        table.add_row(Text(names.of(layer, name_width - len(rest)) + rest), *cells, Text(drawn))
    return table


def _number(value: float) -> str:
    if 1000 <= abs(value) < 1e9 and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _name(series: WorstSeries) -> tuple[str, str]:
    subject = series.subject
    rank = "" if subject.rank is None else f"rank {subject.rank}"
    return visible(subject.layer), visible("".join(f" {part}" for part in (subject.tensor, rank) if part))


_BARS = np.array(list("▁▂▃▄▅▆▇█"))
_NONE = " "
_NO_NUMBER = "!"
_MANY_POWERS = 100.0
"""The factor between the largest and the smallest number from which on a curve is that of the logarithms."""


def sparkline(iterations: Ints, values: Floats, width: int, *, low_is_worse: bool = False) -> str:
    """A curve over time, of at most ``width`` characters.

    Each character covers the same number of iterations and shows their worst value, so peaks stay visible. A blank has
    no value, an exclamation mark has an inf or nan.
    """
    if not len(values):
        return ""
    span = int(iterations[-1] - iterations[0]) + 1
    width = max(1, min(width, len(np.unique(iterations))))
    bucket = (iterations - iterations[0]) * width // span
    finite = np.isfinite(values)
    shown = np.full(width, np.inf if low_is_worse else -np.inf)
    (np.minimum if low_is_worse else np.maximum).at(shown, bucket[finite], values[finite])
    known = np.isfinite(shown)
    text = np.full(width, _NONE)
    text[known] = _BARS[_levels(shown[known])]
    text[bucket[~finite]] = _NO_NUMBER
    return "".join(text)


def _levels(values: Floats) -> Ints:
    if not len(values):
        return np.empty(0, np.int64)
    if values.min() > 0 and values.max() / values.min() > _MANY_POWERS:
        values = np.log(values)
    values = values / max(np.abs(values).max(), 1.0)  # avoids overflow in differences
    low = values.min()
    high = values.max()
    shares = (values - low) / (high - low) if high > low else np.zeros(len(values))
    return np.rint(shares * (len(_BARS) - 1)).astype(np.int64)
