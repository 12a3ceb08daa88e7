"""The data of a run's page.

A page has a bounded size. It always has heat maps, with one byte for the worst value of a layer in a span of steps, and
the exact worst value of each layer. The remaining budget goes to complete curves and histograms: first of series with
findings, then of the worst layers, then of all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from te_precision_callbacks.coverage.other_steps import other_steps_of_run, recorded_products
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.summary import (
    last_steps,
    loss_first,
    no_step_note,
    outcome_notes,
    why_nothing_to_show,
)
from te_precision_callbacks.runs.tables import REDUCED, facts_at_end
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.report.families import (
    Columns,
    FamilySeries,
    HeatMap,
    ReportError,
    ReportLayer,
    Subjects,
    curves_of,
    folder_name,
    heat_maps,
    histograms,
    layer_name,
)
from te_precision_callbacks.views.report.packing import PackedArrays, bfloat16

_HISTOGRAM_COLUMNS = 60

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
    verdict = diagnose(run)
    packed = PackedArrays(most)
    families = subjects.families
    columns = Columns.of_heat_maps(run, families)
    maps = heat_maps(run, families, columns)
    contents = [_family(family, heat_map, packed) for family, heat_map in zip(families, maps, strict=True)]
    findings = [finding_on_page(finding, subjects) for finding in verdict]
    severity_of: dict[int, int] = {}
    for family in families:
        for severity, item in enumerate(family.worst_layers(WORST)):
            severity_of[item.layer] = min(severity, severity_of.get(item.layer, severity))
    content: dict[str, Any] = {
        "run": _run(run),
        "notes": [*no_step_note(run), *run.notes],
        "layers": _layers(run, subjects.layers),
        "scalars": _scalars(run, subjects, packed),
        "verdict": {**verdict.as_json(), "findings": findings},
        "last_steps": _last_steps(run, packed),
        "families": contents,
    }
    layers = {layer for finding in findings for layer in finding["places"]}
    content["histograms"] = _histograms(run, subjects, packed, layers.union(severity_of))
    _put_curves(run, families, severity_of, verdict, contents, packed)
    return content, packed.texts


def finding_on_page(finding: Finding, subjects: Subjects) -> dict[str, Any]:
    content = finding.as_json()
    del content["layers"]
    layers = [subjects.number_of_layer[layer] for layer in finding.layers if layer in subjects.number_of_layer]
    return {**content, "places": layers[:_MOST_LAYERS_OF_FINDING], "layers_total": len(finding.layers)}


def _family(series: FamilySeries, heat_map: HeatMap, packed: PackedArrays) -> dict[str, Any]:
    family = series.family
    request = family.request
    row = None if request is None else request.statistic
    arrays: dict[str, npt.NDArray[Any]] = {
        "layer": series.layer.astype(np.int32),
        "rank": series.rank.astype(np.int32),
        "worst": series.worst,
        "worst_at": series.worst_at,
        "first": heat_map.columns.first,
        "last": heat_map.columns.last,
        "cells": bfloat16(heat_map.cells),
        "nans": np.flatnonzero(heat_map.present & np.isnan(heat_map.cells)).astype(np.int32),
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


def _put_curves(
    run: RecordedRun,
    families: Sequence[FamilySeries],
    severity_of: Mapping[int, int],
    verdict: Verdict,
    contents: Sequence[dict[str, Any]],
    packed: PackedArrays,
) -> None:
    """Put curves into the families' contents until many in a row do not fit.

    First curves with findings; then the worst layer of each statistic, of the second worst, and so on; then the
    rest.
    """
    with_findings = {(finding.tensor, finding.statistic, layer) for finding in verdict for layer in finding.layers}
    order: list[tuple[bool, int, int, int, int]] = []
    for number, family in enumerate(families):
        for row, (series, layer) in enumerate(zip(family.series.tolist(), family.layer.tolist(), strict=True)):
            subject = run.subjects[series]
            is_other = (subject.tensor, subject.statistic, subject.layer) not in with_findings
            order.append((is_other, severity_of.get(layer, WORST), number, row, series))
    order.sort()
    misses = 0
    for (_, _, number, row, _), curve in zip(order, curves_of(run, [entry[-1] for entry in order]), strict=True):
        if not len(curve.values):
            continue
        references = packed.try_put_curve(*curve)
        if references is None:
            misses += 1
            if misses == _MOST_MISSES:
                break
            continue
        contents[number]["curves"][row] = references
        misses = 0


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
    columns = Columns.of(run, _HISTOGRAM_COLUMNS)
    item_of = {item["series"]: item for item in listed}
    for histogram in histograms(run, list(item_of), columns):
        arrays = packed.try_put(histogram.counts, histogram.columns.first, histogram.columns.last)
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


def _scalars(run: RecordedRun, subjects: Subjects, packed: PackedArrays) -> list[dict[str, Any]]:
    names = sorted(loss_first(run.curves), key=lambda name: name not in run.metrics)
    curves = [(name, run.curves[name]) for name in names]
    for family in subjects.free:
        for rank, curve in zip(family.rank.tolist(), curves_of(run, family.series.tolist()), strict=True):
            curves.append((family.family.statistic + ("" if rank == REDUCED else f" (rank {rank})"), curve))
    content = []
    for name, (iterations, values) in curves:
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
        known = {name: value for name, value in row.items() if value not in (None, "", [])}
        facts[layer_name(row["scope"], row["layer"])] |= known
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
    own = run.steps["logging_step"].fill_null(0).to_numpy()
    ahead = np.unique(own - iterations).tolist()
    facts: dict[str, Any] = {
        "steps": len(iterations),
        "first": int(iterations[0]),
        "last": int(iterations[-1]),
        "trainer": {"first": int(own[0]), "last": int(own[-1]), "ahead": None},
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
