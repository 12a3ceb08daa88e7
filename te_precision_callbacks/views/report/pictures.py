"""Pictures of a run for papers and tickets: a heat map, a layer, the depth profile.

png(heatmap(run, statistic="underflows%", tensor="activation"))
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.series import badness, sign_of
from te_precision_callbacks.statistics.table import Worse
from te_precision_callbacks.views.report.data import nonempty
from te_precision_callbacks.views.report.format_limits import Limits, Scales
from te_precision_callbacks.views.report.histograms import Histogram, histograms
from te_precision_callbacks.views.report.magnitudes import EXPONENTS, magnitudes
from te_precision_callbacks.views.report.overview import ALL_RANKS, Columns, Overview, overviews
from te_precision_callbacks.views.report.packing import Scale
from te_precision_callbacks.views.report.ranges import FORMATS, Window
from te_precision_callbacks.views.report.subjects import FamilySeries, ReportError, Subjects

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_DPI = 150
_MOST_COLUMNS, _MOST_ROWS, _MOST_LABELS = 400, 500, 45
_NOT_FINITE = "#e6007e"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_INSIDE, _OUTSIDE = _COLOURS[:2]
_MOST_PANELS = 24
_MOST_RANGES = 250


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI)
    return data.getvalue()


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("te_precision_callbacks.views.report", "report") from None
    return Figure(figsize=(width, height), layout="constrained")


def heatmap(
    run: RecordedRun, *, statistic: str | None = None, tensor: str | None = None, step: int | None = None
) -> Figure:
    """Layer by step for a statistic of a tensor; bright is worse.

    Args:
        run: the run.
        statistic, tensor: those that are not given are the first of the run that have a worse direction.
        step: is marked.

    Raises:
        ReportError: the run has no such numbers, or no such step.
    """
    subjects = nonempty(run)
    steps = Columns.of(run, 10**9)
    if step is not None and step not in steps.first:
        known = f"{steps.first[0]} to {steps.last[-1]}" if len(steps) else "none"
        raise ReportError(f"The run has no step {step}; its recorded steps are {known}.")
    family = subjects.family(statistic, tensor)
    (overview,) = overviews(run, [family], Columns.of(run, _MOST_COLUMNS))
    rank = ALL_RANKS if ALL_RANKS in overview.cells else family.ranks[0]
    cells, present = overview.cells[rank], overview.present[rank]
    names = [subjects.layers[layer].short for layer in overview.layers]
    size = math.ceil(len(names) / _MOST_ROWS)
    values, there = _pooled(cells, present, size, overview)
    figure = _figure(11, min(9.0, max(2.6, 1.2 + 0.2 * len(names))))
    axes = figure.subplots()
    scale = Scale.of(cells, centred=family.family.is_signed)
    edges = _edges(overview.columns)
    rows = np.minimum(np.arange(len(values) + 1) * size, len(names)) - 0.5
    colours, norm = _colours(family, scale)
    finite = np.where(there & np.isfinite(values), values, np.nan)
    if scale.kind == "log":
        finite = np.where(finite <= 0, scale.low, finite)
    mesh = axes.pcolormesh(edges, rows, np.ma.masked_invalid(finite), cmap=colours, norm=norm, rasterized=True)
    outside = there & ~np.isfinite(values)
    if outside.any():
        axes.pcolormesh(edges, rows, np.ma.masked_where(~outside, np.ones_like(values)), cmap=_one_colour(_NOT_FINITE))
    _label_rows(axes, names)
    if step is not None:
        axes.axvline(step, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    unit = "" if family.family.request is None else family.family.request.statistic.unit
    figure.colorbar(mesh, ax=axes, label=unit, pad=0.01)
    note = "; nan and inf in magenta" if outside.any() else ""
    axes.set_title(_title(f"{family.family.statistic} of {family.family.tensor}{note}", run), loc="left", fontsize=10)
    return figure


def _colours(family: FamilySeries, scale: Scale) -> tuple[str, Any]:
    from matplotlib import colors

    of_direction = "viridis_r" if family.family.worse is Worse.LOW else "viridis"
    name = "PuOr" if scale.centred else of_direction
    match scale.kind:
        case "log":
            return name, colors.LogNorm(scale.low, scale.high)
        case "asinh":
            return name, colors.AsinhNorm(scale.bend, scale.low, scale.high)
    return name, colors.Normalize(scale.low, scale.high)


def _one_colour(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def _pooled(
    cells: Floats, present: npt.NDArray[np.bool_], size: int, overview: Overview
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Of each few rows the worst numbers."""
    if size <= 1:
        return cells, present
    rows = math.ceil(len(cells) / size)
    key = np.where(present, badness(cells, sign_of(overview.family.worse)), -np.inf)
    values, there = np.full((rows, cells.shape[1]), np.nan), np.zeros((rows, cells.shape[1]), bool)
    for row in range(rows):
        own = slice(row * size, (row + 1) * size)
        best = key[own].argmax(0)
        values[row] = np.take_along_axis(cells[own], best[None], 0)[0]
        there[row] = present[own].any(0)
    return values, there


def _edges(columns: Columns) -> Floats:
    first, last = columns.first.astype(np.float64), columns.last.astype(np.float64)
    return np.concatenate([[first[0] - 0.5], (last[:-1] + first[1:]) / 2, [last[-1] + 0.5]])


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    every = math.ceil(len(names) / _MOST_LABELS)
    places = list(range(0, len(names), every))
    axes.set_yticks(places, [names[place] for place in places], fontsize=7, family="monospace", parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _title(text: str, run: RecordedRun) -> Any:
    return _plain_text(f"{text}  ({run.run_id or run.path})")


def _plain_text(text: str) -> str:
    """A text in which matplotlib finds no formula."""
    return visible(text).replace("$", r"\$")


def layer(
    run: RecordedRun, *, name: str | None = None, statistic: str | None = None, tensor: str | None = None
) -> Figure:
    """A layer: its exponents over steps with the windows of formats, and its curves.

    Args:
        run: the run.
        name: the layer; if it is not given, the worst one by the statistic.
        statistic: the statistic that is drawn; if it is not given, the first ones.
        tensor: the tensor whose exponents are drawn; if it is not given, the first that has any.

    Raises:
        ReportError: the run has no such layer or statistic.
    """
    subjects = nonempty(run)
    index = _worst_layer(run, subjects, statistic, tensor) if name is None else subjects.layer(name)
    if statistic is not None or tensor is not None:
        subjects.family(statistic, tensor)
    own = [one for one in subjects.families if index in one.layer and statistic in (None, one.family.statistic)]
    every = list(dict.fromkeys(one.family.statistic for one in own))
    shown, left_out = every[:_MOST_PANELS], every[_MOST_PANELS:]
    drawn = _exponents(run, subjects, index, tensor)
    if not shown and drawn is None:
        raise ReportError(f"The run has no statistics of the layer {subjects.layers[index].name!r}.")
    lines = math.ceil(len(shown) / 2)
    figure = _figure(11, (3.6 if drawn else 0.4) + 2.1 * lines)
    grid = figure.add_gridspec(lines + (drawn is not None), 2, height_ratios=([1.6] if drawn else []) + [1] * lines)
    if drawn is not None:
        _draw_exponents(figure, figure.add_subplot(grid[0, :]), run, subjects, *drawn)
    for place, base in enumerate(shown):
        axes = figure.add_subplot(grid[place // 2 + (drawn is not None), place % 2])
        for number, one in enumerate(one for one in own if one.family.statistic == base):
            for series, rank in zip(one.series[one.layer == index], one.rank[one.layer == index], strict=True):
                table = run.values([int(series)])
                text = one.family.tensor + ("" if rank < 0 else f", rank {rank}")
                colour = _COLOURS[number % len(_COLOURS)]
                # Delayed scaling's first steps, which have no scale yet, are gaps.
                unscaled = one.family.leaves_out(table["flags"].fill_null(0).to_numpy())
                values = np.where(unscaled, np.nan, table["value"].to_numpy())
                axes.plot(table["iteration"], values, color=colour, linewidth=1.1, label=_plain_text(text))
        low, high = _span(axes)
        if low > 0 and high > 100 * low:
            axes.set_yscale("log")
        axes.set_title(_plain_text(base), loc="left", fontsize=9)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False, ncols=3)
    if left_out:
        figure.supxlabel(_left_out(left_out), fontsize=8, x=0.01, ha="left")
    named = subjects.layers[index]
    figure.suptitle(_title(named.name if len(named.name) <= 100 else named.short, run), fontsize=10, x=0.01, ha="left")
    return figure


def _left_out(statistics: Sequence[str]) -> str:
    named = ", ".join(statistics[:5]) + (f" and {len(statistics) - 5} more" if len(statistics) > 5 else "")
    return _plain_text(f"Not drawn here: {named}. --statistic NAME draws one.")


def _span(axes: Axes) -> tuple[float, float]:
    values = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    finite = np.concatenate([each[np.isfinite(each)] for each in values]) if values else np.empty(0)
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _worst_layer(run: RecordedRun, subjects: Subjects, statistic: str | None, tensor: str | None) -> int:
    (overview,) = overviews(run, [subjects.family(statistic, tensor)], Columns.of(run, 1))
    rows = overview.worst_rows(1)
    return int(overview.layers[rows[0][0]]) if rows else int(overview.layers[0])


def _exponents(
    run: RecordedRun, subjects: Subjects, index: int, tensor: str | None
) -> tuple[FamilySeries, Histogram] | None:
    for one in subjects.histograms:
        if one.family.statistic != EXPONENTS or tensor not in (None, one.family.tensor) or index not in one.layer:
            continue
        wanted = {int(one.series[np.flatnonzero(one.layer == index)[0]])}
        for histogram in histograms(run, one, Columns.of(run, _MOST_COLUMNS), wanted):
            return one, histogram
    return None


def _draw_exponents(
    figure: Figure, axes: Axes, run: RecordedRun, subjects: Subjects, family: FamilySeries, histogram: Histogram
) -> None:
    from matplotlib.colors import LogNorm

    bins = family.family.bins
    shares = 100 * histogram.counts / np.maximum(histogram.counts.sum(1, keepdims=True), 1)
    low = bins.lowest + histogram.lowest / bins.steps
    edges = low + np.arange(shares.shape[1] + 1) / bins.steps
    columns = _edges(histogram.columns)
    mesh = axes.pcolormesh(
        columns, edges, np.ma.masked_equal(shares.T, 0), norm=LogNorm(1e-4, 100), cmap="cividis_r", rasterized=True
    )
    tops = bins.lowest + (histogram.percentiles()[:, -1] + 1) / bins.steps
    tensor = family.family.tensor
    scales = Scales(run, subjects, tensor)
    for (name, fmt), colour in zip(FORMATS.items(), _COLOURS, strict=False):
        recorded = _recorded(run, scales.of(histogram.layer, name), histogram)
        windows = [
            Window.at(fmt, *recorded[last]) if last in recorded else Window.assumed(fmt, 2.0**top)
            for last, top in zip(histogram.columns.last.tolist(), tops.tolist(), strict=True)
        ]
        style = "-" if recorded else ":"
        for side, values in enumerate(zip(*windows, strict=True)):
            axes.stairs(
                values, columns, baseline=None, color=colour, linewidth=1.4, linestyle=style, label="" if side else name
            )
    axes.set_title(
        _plain_text(f"exponents of {tensor}; solid: recorded scales, dotted: assumed"), loc="left", fontsize=9
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.locator_params(axis="both", integer=True)
    axes.legend(fontsize=7, ncols=3, loc="upper left", framealpha=0.7)
    figure.colorbar(mesh, ax=axes, label="share (%)", pad=0.01)


def _recorded(
    run: RecordedRun, scales: Mapping[str, FamilySeries], histogram: Histogram
) -> dict[int, tuple[float, float]]:
    """The smallest and the largest recorded scale factor of a format by the last iterations of columns."""
    if "high" not in scales:
        return {}
    of_layer = [one.series[one.layer == histogram.layer] for one in (scales.get("low", scales["high"]), scales["high"])]
    tables = [run.values([int(series[0])]) for series in of_layer]
    result = {}
    for last in histogram.columns.last.tolist():
        factors = []
        for table in tables:
            place = int(np.searchsorted(table["iteration"].to_numpy(), last, "right")) - 1
            factors.append(float(table["value"][place].as_py()) if place >= 0 else math.nan)
        if all(math.isfinite(factor) and factor > 0 for factor in factors):
            result[last] = (factors[0], factors[1])
    return result


def profile(run: RecordedRun, *, tensor: str | None = None, step: int | None = None) -> Figure:
    """The range of a tensor's magnitudes in all layers at a step, with the limits of E4M3: at the recorded scales, else
    as if the largest magnitude became its largest number. What is known to be outside is orange.

    Args:
        run: the run.
        tensor: the tensor; if it is not given, the first with magnitudes.
        step: the step; if it is not given, the last one with magnitudes of the tensor.

    Raises:
        ReportError: the run has no magnitudes of the tensor, or none at the step.
    """
    subjects = nonempty(run)
    found = magnitudes(run, subjects, tensor, step)
    rows, names = found.rows, [subjects.layers[row.layer].short for row in found.rows]
    limits = Limits(run, subjects, found, "E4M3")
    size = math.ceil(len(rows) / _MOST_RANGES)
    low, middle, high = (np.array([getattr(row, each) for row in rows]) for each in ("low", "middle", "most"))
    windows = [np.array(side) for side in zip(*map(limits.window, rows), strict=True)]
    is_outside = _of_neighbours(np.any, np.array([limits.is_outside(row) for row in rows]), size)
    least, most = (_of_neighbours(of, values, size) for of, values in ((np.min, low), (np.max, high)))
    low, middle, high, *windows = (_of_neighbours(np.median, each, size) for each in (low, middle, high, *windows))
    edges = np.minimum(np.arange(len(low) + 1) * size, len(rows)) - 0.5
    places = (edges[:-1] + edges[1:]) / 2
    figure = _figure(10, min(9.0, max(2.8, 1.4 + 0.2 * len(rows))))
    axes = figure.subplots()
    is_point = not (high > low).any()
    name = "largest" if is_point else "range"
    for chosen, colour, label in ((~is_outside, _INSIDE, name), (is_outside, _OUTSIDE, f"{name}, known to be outside")):
        if not chosen.any():
            continue
        if is_point:
            axes.plot(high[chosen], places[chosen], "o", color=colour, markersize=4, label=label)
        else:
            height = (0.75 if size == 1 else 1) * np.diff(edges)[chosen]
            width, left = (high - low)[chosen], low[chosen]
            axes.barh(places[chosen], width, left=left, height=height, color=colour, label=label)
    if size > 1:
        for begin, end in ((least, low), (high, most)):
            axes.hlines(places, begin, end, color="#8894a0", linewidth=0.8)
    for side, style, name in zip(windows, ("--", "-"), ("E4M3: smallest", "E4M3: largest"), strict=True):
        axes.stairs(side, edges, orientation="horizontal", baseline=None, color="#333d47", linestyle=style, label=name)
    if not np.isnan(middle).all():
        axes.plot(middle, places, "|", color="black", markersize=5, label="median or standard deviation")
    _label_rows(axes, names)
    _around(axes, np.concatenate([low, least, most, middle, *windows]))
    axes.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.set_xlabel("magnitude")
    axes.grid(alpha=0.25, axis="x")
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=5)
    title = _title(f"range of {found.tensor} at step {found.step}; lines: E4M3", run)
    lacking = "\nOnly the largest magnitude was recorded: add dynamic_range or exponent_histogram to the statistics."
    axes.set_title(title + (lacking if is_point else ""), loc="left", fontsize=10)
    return figure


def _around(axes: Axes, values: Floats) -> None:
    """Leave air on both sides: matplotlib ends an axis of bars at their edges."""
    finite = values[np.isfinite(values)]
    air = 0.03 * (finite.max() - finite.min()) + 0.2
    axes.set_xlim(finite.min() - air, finite.max() + air)
    axes.locator_params(axis="x", integer=True)


def _of_neighbours(of: Callable[..., Any], values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Of each few neighbours the median, an extreme, or whether any is."""
    return np.array([of(values[begin : begin + size]) for begin in range(0, len(values), size)])
