"""The data of a run's page.

A page has a bounded size. It always has heat maps, with one byte for the worst value of a layer in a span of steps, and
the exact worst value of each layer. The remaining budget goes to complete curves and histograms: first of series with
findings, then of the worst layers, then of all others.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.coverage.other_steps import other_steps_of_run, recorded_products
from te_precision_callbacks.diagnosis.finding import Finding
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.layers.folding import ShortNames
from te_precision_callbacks.runs.recorded import Curve, RecordedRun, sort_by_position
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.runs.summary import (
    last_steps,
    loss_first,
    no_step_note,
    outcome_notes,
    why_nothing_to_show,
)
from te_precision_callbacks.runs.tables import REDUCED, facts_at_end
from te_precision_callbacks.sinks.metrics import worst_first
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.series import FIRST_STEP, Family, badness, family_of, sign_of
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS
from te_precision_callbacks.views.report.packing import PackedArrays, bfloat16

SHORT = 42

MOST_AT_ONCE = 2_000_000
_MOST_HISTOGRAMS_AT_ONCE = 20_000


class ReportError(PrecisionDebugError, ValueError):
    """A report cannot be made: the run has no values, or the file cannot be written."""


@dataclass(frozen=True)
class ReportLayer:
    """A layer of the run. The short name is for plots, without control characters."""

    name: str
    short: str


@dataclass(frozen=True, eq=False)
class FamilySeries:
    """The series of a statistic of a tensor, by rank, then by layer; all arrays are [series].

    Attributes:
        series: their indices in the run.
        layer: indices in :attr:`Subjects.layers`; -1 without a layer.
        rank: :data:`REDUCED` for reduced values.
        worst, worst_at: the worst value and its iteration, without delayed scaling's first step; or nan and -1.
    """

    family: Family
    series: Ints
    layer: Ints
    rank: Ints
    worst: Floats
    worst_at: Ints

    def worst_rows(self, most: int) -> list[int]:
        """The index of the worst value of each of the worst layers, worst first."""
        values = {row: float(self.worst[row]) for row in np.flatnonzero(self.worst_at >= 0).tolist()}
        row_of: dict[int, int] = {}
        for row in worst_first(len(values), self.family, values):
            row_of.setdefault(int(self.layer[row]), row)
        return list(row_of.values())[:most]


class Subjects:
    """The layers of a run in the order of execution, then layers that have not run, and its families of statistics.

    Attributes:
        number_of_layer: name -> index in ``layers``; also without the scope, then the first of its layers.
        families, histograms: by tensor.
        free: the families without a layer.
    """

    def __init__(self, run: RecordedRun) -> None:
        rows = [(row["scope"], row["layer"], row["exec_fwd"]) for row in run.layers.to_pylist()]
        rows += [(subject.scope, subject.layer, None) for subject in run.subjects]
        names = [layer_name(scope, layer) for scope, layer, _ in rows]
        without_scope = dict(zip(names, [layer for _, layer, _ in rows], strict=True))
        in_order = sort_by_position(zip(names, [position for _, _, position in rows], strict=True))
        short = ShortNames(map(visible, in_order))
        self.layers = [ReportLayer(name, short.of(visible(name), SHORT)) for name in in_order]
        self.number_of_layer = {name: number for number, name in enumerate(in_order)}
        for number, name in enumerate(in_order):
            self.number_of_layer.setdefault(without_scope[name], number)
        names_of_series = names[len(run.layers) :]
        layers = np.array([self.number_of_layer.get(name, -1) for name in names_of_series], np.int64)
        ranks = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        worst = run.series["worst"].to_numpy()
        worst_at = run.series["worst_at"].fill_null(-1).to_numpy()
        members = group_by_key((_family(run, series), series) for series in np.lexsort((layers, ranks)).tolist())
        order: dict[str, int] = {tensor: number for number, tensor in enumerate(TENSORS)}
        self.histograms: list[FamilySeries] = []
        self.families: list[FamilySeries] = []
        self.free: list[FamilySeries] = []
        for family in sorted(members, key=lambda family: order.get(family.tensor, len(order))):
            series_of_family = np.array(members[family], np.int64)
            columns = (
                series_of_family,
                layers[series_of_family],
                ranks[series_of_family],
                worst[series_of_family],
                worst_at[series_of_family],
            )
            series = FamilySeries(family, *columns)
            if (series.layer < 0).any():
                self.free.append(series)
            elif family.request is not None and family.request.statistic.is_histogram:
                self.histograms.append(series)
            else:
                self.families.append(series)


def _family(run: RecordedRun, series: int) -> Family:
    subject = run.subjects[series]
    return family_of(subject.tensor, subject.statistic, subject.gemm or None)


def layer_name(scope: str | None, layer: str | None) -> str:
    """The name of a layer in a report: prefixed with the scope, unless it already begins with it."""
    if not layer or not scope or layer.startswith(f"{scope}."):
        return layer or ""
    return f"{scope}.{layer}"


def folder_name(run: RecordedRun) -> str:
    path = Path(os.path.abspath(run.path))  # without dots; links stay as they are
    for folder in (path, *path.parents):
        if folder.name == FOLDER:
            path = folder.parent
    return path.name or run.run_id


# ---------------------------------------------------------------------- values over time


class Columns:
    """Spans of the iterations of a run, of about equal size: the first and last iteration of each, [columns]."""

    def __init__(self, run: RecordedRun, most: int) -> None:
        parts = [table["iteration"].to_numpy() for table in (run.steps, run.scalars)]
        parts += [run.series[column].drop_null().to_numpy() for column in ("first", "last")]
        iterations = np.unique(np.concatenate(parts).astype(np.int64))
        number = min(most, len(iterations))
        edges = np.linspace(0, len(iterations), number + 1).astype(np.int64)
        self.first: Ints = iterations[edges[:-1]]
        self.last: Ints = iterations[edges[1:] - 1]

    def column_of(self, iterations: Ints) -> Ints:
        return np.maximum(np.searchsorted(self.first, iterations, "right") - 1, 0)


def pieces(counts: Ints, most: int = MOST_AT_ONCE) -> Iterator[slice]:
    """Divide consecutive series into slices of about ``most`` values, given the number of values of each."""
    ends = np.flatnonzero(np.diff(np.cumsum(counts) // most)) + 1
    return itertools.starmap(slice, itertools.pairwise([0, *ends.tolist(), len(counts)]))


def curves_of(run: RecordedRun, numbers: Sequence[int], *, whole: bool = False) -> dict[int, Curve]:
    """Return the values of series, in the given order; unless ``whole``, without delayed scaling's first step."""
    table = run.values(numbers)
    series = table["series"].to_numpy().astype(np.int64)  # searchsorted() would convert int32 in each call
    iterations = table["iteration"].to_numpy()
    values = table["value"].to_numpy()
    flags = table["flags"].fill_null(0).to_numpy()
    curves = {}
    for number in numbers:
        rows = slice(*np.searchsorted(series, (number, number + 1)))
        # Values of delayed scaling's first step are not representative.
        counting = (flags[rows] & FIRST_STEP == 0) | (whole or not _family(run, number).is_of_delayed_scaling)
        curves[number] = Curve(iterations[rows][counting], values[rows][counting])
    return curves


class HeatMap(NamedTuple):
    """The values of a family by span of steps, the worst of each; without delayed scaling's first step, which would
    dominate the colors.

    Attributes:
        first, last: the iterations of the columns with a value of any series.
        cells: [series, columns]: nan also without a value.
        present: [series, columns]: whether there is a value.
    """

    first: Ints
    last: Ints
    cells: Floats
    present: Mask


def heat_map(family: FamilySeries, curves: Mapping[int, Curve], columns: Columns) -> HeatMap:
    """Return the heat map of a family, given the values of its series."""
    cells = np.full((len(family.series), len(columns.first)), np.nan)
    present = np.zeros(cells.shape, bool)
    for row, number in enumerate(family.series.tolist()):
        iterations, values = curves[number]
        column = columns.column_of(iterations)
        order = np.lexsort((-badness(values, sign_of(family.family.worse)), column))
        chosen = order[np.unique(column[order], return_index=True)[1]]  # the first of the worst in each column
        cells[row, column[chosen]] = values[chosen]
        present[row, column[chosen]] = True
    used = np.flatnonzero(present.any(0))
    return HeatMap(columns.first[used], columns.last[used], cells[:, used], present[:, used])


class HistogramOverTime(NamedTuple):
    """A histogram, summed over the steps of each column.

    Attributes:
        series: index of its series.
        first, last: the iterations of the columns with a histogram.
        lowest: the first nonempty bin.
        counts: [columns, bins], from the first nonempty bin to the last one.
    """

    series: int
    first: Ints
    last: Ints
    lowest: int
    counts: Floats


def histograms(run: RecordedRun, numbers: Sequence[int], columns: Columns) -> Iterator[HistogramOverTime]:
    """Yield the histograms of series with values, in the given order."""
    counts_of_series = run.series["count"].fill_null(0).to_numpy()[list(numbers)]
    for piece in pieces(counts_of_series, _MOST_HISTOGRAMS_AT_ONCE):
        table = run.vectors(numbers[piece])
        for number in numbers[piece]:
            rows = table.filter(pc.equal(table["series"], number)).combine_chunks()
            if not len(rows):
                continue
            column = columns.column_of(rows["iteration"].to_numpy())
            column_of_bins = column[pc.list_parent_indices(rows["bin"]).to_numpy()]
            counts: Floats = np.zeros((len(columns.first), len(EXPONENT_COLUMNS)))
            bins = pc.list_flatten(rows["bin"]).to_numpy()
            np.add.at(counts, (column_of_bins, bins), pc.list_flatten(rows["count"]).to_numpy())
            used = np.unique(column)
            lowest = int(bins.min(initial=len(EXPONENT_COLUMNS) - 1))
            highest = int(bins.max(initial=lowest))
            shown = counts[used, lowest : highest + 1]
            yield HistogramOverTime(number, columns.first[used], columns.last[used], lowest, shown)


# ---------------------------------------------------------------------- the page

_HISTOGRAM_COLUMNS = 60

_CELLS = 2_000_000
"""The maximum number of cells of all heat maps, unless there are more rows."""

_MOST_COLUMNS = 400

WORST = 5
"""The number of worst layers of each statistic."""

_MOST_MISSES = 500
"""After so many curves in a row that do not fit, no other is tried."""

_MOST_LAYERS_OF_FINDING = 200


def page_data(run: RecordedRun, most: int) -> tuple[dict[str, Any], list[str]]:
    """Choose the content and the arrays of a page, at most ``most`` characters; raises ReportError without values."""
    why = why_nothing_to_show(run)
    if why:
        raise ReportError(why + run.notes_sentence)
    subjects = Subjects(run)
    families = subjects.families
    numbers = [number for family in (*families, *subjects.free) for number in family.series.tolist()]
    curves = curves_of(run, numbers)
    verdict = diagnose(run)
    packed = PackedArrays(most)
    rows = sum(len(family.series) for family in families)
    columns = Columns(run, max(1, min(_CELLS // max(rows, 1), _MOST_COLUMNS)))
    contents = [_family_content(family, heat_map(family, curves, columns), packed) for family in families]
    findings = [finding_on_page(finding, subjects) for finding in verdict]
    severity_of: dict[int, int] = {}
    for family in families:
        for severity, layer in enumerate(family.layer[family.worst_rows(WORST)].tolist()):
            severity_of[layer] = min(severity, severity_of.get(layer, severity))
    content: dict[str, Any] = {
        "run": _run(run),
        "notes": [*no_step_note(run), *run.notes],
        "layers": _layers(run, subjects.layers),
        "scalars": _scalars(run, subjects.free, curves, packed),
        "verdict": {**verdict.as_json(), "findings": findings},
        "last_steps": _last_steps(run, packed),
        "families": contents,
    }
    layers = {layer for finding in findings for layer in finding["places"]}
    content["histograms"] = _histograms(run, subjects, packed, layers.union(severity_of))
    with_findings = {(finding.tensor, finding.statistic, layer) for finding in verdict for layer in finding.layers}
    order: list[tuple[bool, int, int, int, int]] = []
    for number, family in enumerate(families):
        for row, (series, layer) in enumerate(zip(family.series.tolist(), family.layer.tolist(), strict=True)):
            subject = run.subjects[series]
            is_other = (subject.tensor, subject.statistic, subject.layer) not in with_findings
            order.append((is_other, severity_of.get(layer, WORST), number, row, series))
    misses = 0
    # Curves with findings; then the worst layer of each statistic, of the second worst, and so on; then the rest.
    for _, _, number, row, series in sorted(order):
        if not len(curves[series].values):
            continue
        references = packed.try_put_curve(*curves[series])
        if references is None:
            misses += 1
            if misses == _MOST_MISSES:
                break
            continue
        contents[number]["curves"][row] = references
        misses = 0
    return content, packed.texts


def finding_on_page(finding: Finding, subjects: Subjects) -> dict[str, Any]:
    content = finding.as_json()
    del content["layers"]
    layers = [subjects.number_of_layer[layer] for layer in finding.layers if layer in subjects.number_of_layer]
    return {**content, "places": layers[:_MOST_LAYERS_OF_FINDING], "layers_total": len(finding.layers)}


def _family_content(series: FamilySeries, shown: HeatMap, packed: PackedArrays) -> dict[str, Any]:
    family = series.family
    request = family.request
    row = None if request is None else request.statistic
    arrays: dict[str, npt.NDArray[Any]] = {
        "layer": series.layer.astype(np.int32),
        "rank": series.rank.astype(np.int32),
        "worst": series.worst,
        "worst_at": series.worst_at,
        "first": shown.first,
        "last": shown.last,
        "cells": bfloat16(shown.cells),
        "nans": np.flatnonzero(shown.present & np.isnan(shown.cells)).astype(np.int32),
    }
    return {
        "tensor": family.tensor,
        "statistic": family.statistic,
        "gemm": family.gemm,
        "base": None if row is None else row.name,
        "recipe": None if request is None else request.recipe,
        "columnwise": request is not None and request.columnwise,
        "unit": "" if row is None else row.unit,
        "formula": "" if row is None else row.formula,
        "worse": None if family.worse is None else family.worse.value,
        "signed": row is not None and row.signed,
        "arrays": {name: packed.put(array) for name, array in arrays.items()},
        "curves": {},
    }


def _histograms(
    run: RecordedRun, subjects: Subjects, packed: PackedArrays, layers: Collection[int]
) -> list[dict[str, Any]]:
    """The series with histograms, those of some layers first. Their arrays get a third of the remaining room."""
    listed: list[dict[str, Any]] = []
    for family in subjects.histograms:
        names = {"tensor": family.family.tensor, "statistic": family.family.statistic}
        for series, layer, rank in np.stack([family.series, family.layer, family.rank], 1).tolist():
            listed.append({**names, "series": series, "layer": layer, "rank": rank, "arrays": None})
    listed.sort(key=lambda item: item["layer"] not in layers)
    most = packed.size + (packed.most - packed.size) // 3
    columns = Columns(run, _HISTOGRAM_COLUMNS)
    item_of = {item["series"]: item for item in listed}
    for histogram in histograms(run, list(item_of), columns):
        arrays = packed.try_put(histogram.counts, histogram.first, histogram.last)
        if arrays is None or packed.size > most:
            break
        item_of[histogram.series] |= {"arrays": arrays, "lowest": histogram.lowest}
    return listed


def _run(run: RecordedRun) -> dict[str, Any]:
    rows, total = events(run)
    return {
        "path": str(run.path),
        "id": run.run_id,
        "source": run.source,
        "segments": [{**vars(segment), "facts": readable(segment.facts)} for segment in run.segments],
        "name": folder_name(run),
        "duration": duration(run),
        "outcome": outcome_notes(run),
        "other_steps": other_steps_of_run(run),
        "states": run.states.to_pylist(),
        "plan": run.plan.to_pylist(),
        "events": rows,
        "events_total": total,
    }


def _last_steps(run: RecordedRun, packed: PackedArrays) -> dict[str, Any] | None:
    """The last steps; ``magnitudes``: tensors x iterations, -1 where a tensor was not read."""
    steps = last_steps(run)
    if steps is None:
        return None
    rows = [[-1.0 if number is None else float(number) for number in row] for row in steps["magnitudes"]]
    return {**steps, "magnitudes": packed.put(np.array(rows, np.float32))}


def _scalars(
    run: RecordedRun, free: Sequence[FamilySeries], curves: Mapping[int, Curve], packed: PackedArrays
) -> list[dict[str, Any]]:
    names = sorted(loss_first(run.curves), key=lambda name: name not in run.metrics)
    scalars = [(name, run.curves[name]) for name in names]
    for family in free:
        for rank, series in zip(family.rank.tolist(), family.series.tolist(), strict=True):
            scalars.append((family.family.statistic + ("" if rank == REDUCED else f" (rank {rank})"), curves[series]))
    content = []
    for name, (iterations, values) in scalars:
        shown = _downsample(values)
        arrays = packed.try_put_curve(iterations[shown], values[shown])
        if arrays is not None:
            content.append({"name": name, "arrays": arrays})
    return content


_MOST_EVENTS = 2000
_MOST_PIECES = 20_000


def _downsample(values: Floats) -> Ints:
    """Return the indices of the minimum and maximum, or of a nan, of equal pieces, at most :data:`_MOST_PIECES`."""
    size = max(1, -(-len(values) // _MOST_PIECES))
    pieces = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    begins = np.arange(len(pieces)) * size
    chosen = np.concatenate([begins + pieces.argmin(1), begins + pieces.argmax(1), [0, len(values) - 1]])
    return np.unique(np.minimum(chosen, len(values) - 1))


def _layers(run: RecordedRun, shown: Sequence[ReportLayer]) -> list[dict[str, Any]]:
    """The layers with their recorded facts and matrix products."""
    facts: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in run.layers.to_pylist():
        filled = {name: value for name, value in row.items() if value not in (None, "", [])}
        facts[layer_name(row["scope"], row["layer"])] |= filled
    products: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row, product in recorded_products(facts_at_end(run.gemms), facts_at_end(run.operands)):
        content = {**row, "operands": product.operands, "why": product.why}
        if product.not_run:
            content["why"] = ""
        products[layer_name(row["scope"], row["layer"])].append(content)
    return [{**vars(layer), "facts": facts[layer.name], "gemms": products[layer.name]} for layer in shown]


def events(run: RecordedRun) -> tuple[list[dict[str, Any]], int]:
    all_events = run.events_of_ranks()
    rows = []
    for row in all_events[-_MOST_EVENTS:]:
        row["layer"] = layer_name(row.pop("scope"), row["layer"])
        time = row.pop("wall_time")
        if row["kind"] == "last_steps":
            del row["data"]  # megabytes, which have a page of their own
        if time:
            row["time"] = time.isoformat(timespec="seconds")
        rows.append({name: value for name, value in row.items() if value not in (None, "")})
    return rows, len(all_events)


def duration(run: RecordedRun) -> dict[str, Any]:
    """The steps with records, the median time of a step, and the trainer's first and last step, with its lead over the
    iteration; None if the lead changes.
    """
    if not len(run.steps):
        return {}
    iterations = run.steps["iteration"].to_numpy()
    logging_steps = run.steps["logging_step"].fill_null(0).to_numpy()
    ahead = np.unique(logging_steps - iterations).tolist()
    facts: dict[str, Any] = {
        "steps": len(iterations),
        "first": int(iterations[0]),
        "last": int(iterations[-1]),
        "trainer": {"first": int(logging_steps[0]), "last": int(logging_steps[-1]), "ahead": None},
    }
    if len(ahead) == 1:
        facts["trainer"]["ahead"] = ahead[0]
    timed = run.steps.filter(pc.field("wall_time").is_valid())
    count = np.diff(timed["iteration"].to_numpy())  # not every step has records
    seconds = np.diff(timed["wall_time"].to_numpy()) / np.timedelta64(1, "s")
    in_segment = np.diff(timed["segment"].to_numpy()) == 0
    if in_segment.any():
        facts["median_step_seconds"] = float(np.median(seconds[in_segment] / count[in_segment]))
    return facts


def readable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a process start without the long rows on amaxes, which a rule checks."""
    settings = facts.get("settings")
    if not isinstance(settings, dict):
        return dict(facts)
    return {**facts, "settings": {name: value for name, value in settings.items() if name != "amaxes"}}
