"""Pictures of a run for papers and tickets: a heat map, a layer, the depth profile.

png(heatmap(run, statistic="underflows%", tensor="activation"))
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.series import badness, sign_of
from te_precision_callbacks.statistics.table import Worse
from te_precision_callbacks.views.report.data import nonempty
from te_precision_callbacks.views.report.histograms import PERCENTS, Histogram, histograms
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
_MOST_PANELS = 24
_MOST_RANGES = 250
_EXPONENTS = "exponent_histogram"


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
        ReportError: the run has no such numbers.
    """
    subjects = nonempty(run)
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
        if one.family.statistic != _EXPONENTS or tensor not in (None, one.family.tensor) or index not in one.layer:
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
    for (name, fmt), colour in zip(FORMATS.items(), _COLOURS, strict=False):
        recorded = _recorded(run, subjects, histogram, tensor, name)
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
    run: RecordedRun, subjects: Subjects, histogram: Histogram, tensor: str, fmt: str
) -> dict[int, tuple[float, float]]:
    """The smallest and the largest recorded scale factor of a format by the last iterations of columns."""
    found: dict[str, Any] = {}
    for one in subjects.families:
        request = one.family.request
        if request is None or one.family.tensor != tensor or request.columnwise or histogram.layer not in one.layer:
            continue
        own = "E2M1" if request.recipe == "nvfp4" else "E5M2" if request.e5m2 else "E4M3"
        if request.e5m2 is None and request.recipe != "nvfp4":
            own = _format_of_operand(run, subjects.layers[histogram.layer].name, tensor) or own
        if own == fmt and request.statistic.name in ("scale_inv_min", "scale_inv_max"):
            found.setdefault(request.statistic.name, run.values([int(one.series[one.layer == histogram.layer][0])]))
    if "scale_inv_max" not in found:
        return {}
    tables = [found.get("scale_inv_min", found["scale_inv_max"]), found["scale_inv_max"]]
    result = {}
    for last in histogram.columns.last.tolist():
        factors = []
        for table in tables:
            place = int(np.searchsorted(table["iteration"].to_numpy(), last, "right")) - 1
            factors.append(float(table["value"][place].as_py()) if place >= 0 else math.nan)
        if all(math.isfinite(factor) and factor > 0 for factor in factors):
            result[last] = (factors[0], factors[1])
    return result


def _format_of_operand(run: RecordedRun, layer: str, tensor: str) -> str | None:
    told = {
        row["format"] or ""
        for row in run.operands.to_pylist()
        if row["tensor"] == tensor and row["layer"] and layer.endswith(row["layer"])
    }
    text = " ".join(told)
    return next((name for name, word in (("E2M1", "NVFP4"), ("E4M3", "E4M3"), ("E5M2", "E5M2")) if word in text), None)


def profile(run: RecordedRun, *, tensor: str | None = None, step: int | None = None) -> Figure:
    """The range of a tensor's magnitudes in all layers at a step, with what E4M3 holds if the largest magnitude becomes
    its largest number.

    Args:
        run: the run.
        tensor: the tensor; if it is not given, the first with magnitudes.
        step: the step; if it is not given, the last one.

    Raises:
        ReportError: the run has no magnitudes of the tensor, or no such step.
    """
    subjects = nonempty(run)
    columns = Columns.of(run, 10**9)
    if step is not None and step not in columns.first:
        known = f"{columns.first[0]} to {columns.last[-1]}" if len(columns) else "none"
        raise ReportError(f"The run has no step {step}; its recorded steps are {known}.")
    rows = list(_magnitudes(run, subjects, tensor, step))
    if not rows:
        what = "any tensor" if tensor is None else f"the tensor {tensor!r}"
        raise ReportError(
            f"The run has no magnitudes of {what}: a depth profile needs exponent_histogram, cur_amax, or min and max."
        )
    tensor = rows[0][0]
    names = [subjects.layers[index].short for _, index, *_ in rows]
    low, middle, high = (np.array([row[place] for row in rows]) for place in (2, 3, 4))
    size = math.ceil(len(rows) / _MOST_RANGES)
    least, most = (_of_neighbours(of, values, size) for of, values in ((np.min, low), (np.max, high)))
    low, middle, high = (_of_neighbours(np.median, values, size) for values in (low, middle, high))
    edges = np.minimum(np.arange(len(low) + 1) * size, len(rows)) - 0.5
    places = (edges[:-1] + edges[1:]) / 2
    figure = _figure(10, min(9.0, max(2.8, 1.4 + 0.2 * len(rows))))
    axes = figure.subplots()
    is_point = not (high > low).any()
    if is_point:
        axes.plot(high, places, "o", color=_COLOURS[0], markersize=4, label="largest")
    else:
        height = (0.75 if size == 1 else 1) * np.diff(edges)
        axes.barh(places, high - low, left=low, height=height, color=_COLOURS[0], label="range")
    if size > 1:
        for begin, end in ((least, low), (high, most)):
            axes.hlines(places, begin, end, color="#8894a0", linewidth=0.8)
    windows = [Window.assumed(FORMATS["E4M3"], 2.0**top) for top in high]
    for side, style, name in ((0, "--", "E4M3: smallest"), (1, "-", "E4M3: largest")):
        limits = [window[side] for window in windows]
        axes.stairs(
            limits, edges, orientation="horizontal", baseline=None, color="#333d47", linestyle=style, label=name
        )
    if not np.isnan(middle).all():
        axes.plot(middle, places, "|", color="black", markersize=5, label="median or standard deviation")
    _label_rows(axes, names)
    _around(axes, np.concatenate([low, least, most, middle, *map(np.array, zip(*windows, strict=True))]))
    axes.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.set_xlabel("magnitude")
    axes.grid(alpha=0.25, axis="x")
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=4)
    when = int(columns.last[-1]) if step is None else step
    title = _title(f"range of {tensor} at step {when}; lines: E4M3", run)
    lacking = "\nOnly the largest magnitude was recorded: add dynamic_range or exponent_histogram to the statistics."
    axes.set_title(title + (lacking if is_point else ""), loc="left", fontsize=10)
    return figure


def _around(axes: Axes, values: Floats) -> None:
    """Leave air on both sides: matplotlib ends an axis of bars at their edges."""
    finite = values[np.isfinite(values)]
    air = 0.03 * (finite.max() - finite.min()) + 0.2
    axes.set_xlim(finite.min() - air, finite.max() + air)
    axes.locator_params(axis="x", integer=True)


def _of_neighbours(of: Callable[[Floats], Any], values: Floats, size: int) -> Floats:
    """Of each few neighbours the median, or an extreme."""
    return np.array([of(values[begin : begin + size]) for begin in range(0, len(values), size)])


def _magnitudes(
    run: RecordedRun, subjects: Subjects, tensor: str | None, step: int | None
) -> Iterator[tuple[str, int, float, float, float]]:
    """Tensor, layer, and the range of magnitudes as powers of two: low, middle, high."""
    of_exponents = [
        one for one in subjects.histograms if one.family.statistic == _EXPONENTS and tensor in (None, one.family.tensor)
    ]
    if of_exponents:
        one = of_exponents[0]
        bins = one.family.bins
        seen: set[int] = set()
        for histogram in histograms(run, one, Columns.of(run, 10**9)):
            if histogram.layer in seen:
                continue
            seen.add(histogram.layer)
            place = len(histogram.columns) - 1
            if step is not None:
                place = int(np.searchsorted(histogram.columns.first, step, "right")) - 1
            found = histogram.percentiles()[place] if place >= 0 else np.array([-1])
            if found[0] >= 0:
                edge = bins.lowest + found / bins.steps
                middle = 1 + PERCENTS.index(50)
                yield one.family.tensor, histogram.layer, edge[1], edge[middle] + 0.5, edge[-1] + 1
        return
    known = [one for base in ("cur_amax", "max") for one in _plain(subjects, base, tensor)]
    if not known:
        return
    tensor = known[0].family.tensor

    def at(base: str) -> dict[int, float]:
        return {layer: value for one in _plain(subjects, base, tensor) for layer, value in _at(run, one, step).items()}

    ranges, stds = at("dynamic_range"), at("std")
    last = at("cur_amax")
    if not last:
        least = at("min")
        last = {layer: max(abs(value), abs(least[layer])) for layer, value in at("max").items() if layer in least}
    for layer, value in sorted(last.items()):
        if value > 0 and math.isfinite(value):
            high, std = math.log2(value), stds.get(layer, 0.0)
            yield tensor, layer, high - ranges.get(layer, 0.0), math.log2(std) if std > 0 else math.nan, high


def _plain(subjects: Subjects, base: str, tensor: str | None) -> Iterator[FamilySeries]:
    for one in subjects.families:
        if one.family.statistic == base and tensor in (None, one.family.tensor):
            yield one


def _at(run: RecordedRun, one: FamilySeries, step: int | None) -> dict[int, float]:
    """Layer -> its number at a step, or its last one before it."""
    table = run.values(one.series.tolist())
    layer_of = dict(zip(one.series.tolist(), one.layer.tolist(), strict=True))
    kept = table["iteration"].to_numpy() <= (np.iinfo(np.int64).max if step is None else step)
    series, values = table["series"].to_numpy()[kept], table["value"].to_numpy()[kept]
    last = np.flatnonzero(np.diff(series, append=-1))
    return {layer_of[int(series[place])]: float(values[place]) for place in last}
