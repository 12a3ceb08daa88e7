"""The data of a run's page.

A page has a bounded size. It always has heat maps, with one byte for the worst value of a layer in a span of steps, and
the exact worst value of each layer. The remaining budget goes to complete curves and histograms: first of series with
findings, then of the worst layers, then of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.summary import (
    last_steps,
    loss_first,
    no_step_note,
    outcome_notes,
    why_nothing_to_show,
)
from te_precision_callbacks.statistics.table import Worse
from te_precision_callbacks.views.report import facts
from te_precision_callbacks.views.report.overview import (
    Columns,
    Overview,
    curves_of,
    heat_map_columns,
    histograms,
    overviews,
)
from te_precision_callbacks.views.report.packing import PackedArrays, PackedScale
from te_precision_callbacks.views.report.subjects import ReportError, Subjects, folder_name

_HISTOGRAM_COLUMNS = 60

WORST = 5
"""The number of worst layers of each statistic."""

_FIRST = ("nonfinite_num", "overflows%", "underflows%", "sqnr_db", "saturated_scales%", "flushed_scales%")

_FORMATS = {form.name: {"max": form.max, "least": form.min_subnormal, "reach": 1.0} for form in (E4M3, E5M2, E2M1)}
# Blocks of NVFP4 have E4M3 scales, which extend the range of a tensor downwards.
_FORMATS[E2M1.name]["reach"] = E4M3.min_subnormal / E4M3.max

_MOST_MISSES = 500
"""After so many curves in a row that do not fit, no other is tried."""

_MOST_LAYERS_OF_FINDING = 200


def page_data(run: RecordedRun, most: int) -> tuple[dict[str, Any], list[str]]:
    """Choose the content and the arrays of a page, at most ``most`` characters; raises ReportError without values."""
    why = why_nothing_to_show(run)
    if why:
        raise ReportError(why)
    subjects = Subjects(run)
    verdict = diagnose(run)
    packed = PackedArrays(most)
    columns = heat_map_columns(run, subjects.families)
    heat_maps: list[Overview] = []
    contents: list[dict[str, Any]] = []
    for overview in overviews(run, subjects.families, columns):
        contents.append(_family(overview, packed))
        del overview.cells, overview.present
        heat_maps.append(overview)
    findings = [finding_on_page(finding, subjects) for finding in verdict]
    content: dict[str, Any] = {
        "run": _run(run),
        "notes": [*no_step_note(run), *run.notes],
        "layers": facts.layers(run, subjects.layers),
        "scalars": _scalars(run, subjects, packed),
        "formats": _FORMATS,
        "verdict": {**verdict.as_json(), "findings": findings},
        "worst_layers": worst_layers(heat_maps),
        "last_steps": _last_steps(run, packed),
        "families": contents,
    }
    layers = {layer for finding in findings for layer in finding["places"]}
    layers.update(item["layer"] for listed in content["worst_layers"] for item in listed["items"])
    content["histograms"] = _histograms(run, subjects, packed, layers)
    order = _curves_by_priority(run, heat_maps, verdict)
    content["exact"] = {
        "curves": _put_curves(run, order, contents, packed),
        "series": sum(len(overview.places) for overview in heat_maps),
        "widest": int(np.max(columns.last - columns.first, initial=-1) + 1),
    }
    return content, packed.texts


def worst_layers(heat_maps: Sequence[Overview]) -> list[dict[str, Any]]:
    """The worst layers of each statistic with a bad direction, most severe first, without perfect values."""
    listed = []
    priorities = {}
    for number, overview in enumerate(heat_maps):
        family = overview.family
        if not family.has_direction or family.request is None:
            continue
        perfect = 0.0 if family.worse is Worse.HIGH else np.inf
        worst = overview.worst_layers(WORST)
        items = [item._asdict() for item in worst if item.value != perfect]
        listed.append({"family": number, "items": items, "counted": bool(worst)})
        name = family.request.statistic.name
        priorities[number] = _FIRST.index(name) if name in _FIRST else len(_FIRST)
    return sorted(listed, key=lambda entry: priorities[entry["family"]])


def finding_on_page(finding: Finding, subjects: Subjects) -> dict[str, Any]:
    content = finding.as_json()
    del content["layers"]
    layers = [subjects.number_of_layer[layer] for layer in finding.layers if layer in subjects.number_of_layer]
    return {**content, "places": layers[:_MOST_LAYERS_OF_FINDING], "layers_total": len(finding.layers)}


def _family(overview: Overview, packed: PackedArrays) -> dict[str, Any]:
    family = overview.family
    request = family.request
    row = None if request is None else request.statistic
    scale = PackedScale.of(overview.cells, centred=row is not None and row.signed)
    cells = scale.bytes(overview.cells, overview.present)

    def put_by_rank(values: npt.NDArray[Any]) -> dict[str, Any]:
        return {str(rank): packed.put(array) for rank, array in zip(overview.ranks, values, strict=True)}

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
        "ranks": overview.ranks,
        "rows": packed.put(overview.layers.astype(np.int32)),
        "first": packed.put(overview.columns.first),
        "last": packed.put(overview.columns.last),
        "scale": scale,
        "cells": put_by_rank(cells),
        "worst": put_by_rank(overview.worst),
        "worst_at": put_by_rank(overview.worst_at),
        "curves": {},
    }


class CurveOnPage(NamedTuple):
    """A series: its number, the number of its family, and its key in the family's curves."""

    series: int
    family: int
    key: str


def _put_curves(
    run: RecordedRun, order: Sequence[CurveOnPage], contents: Sequence[dict[str, Any]], packed: PackedArrays
) -> int:
    """Put curves into the families' contents until many in a row do not fit; returns their number."""
    exact = 0
    misses = 0
    for on_page, curve in zip(order, curves_of(run, [on_page.series for on_page in order]), strict=True):
        references = packed.try_put_curve(*curve)
        if references is not None:
            contents[on_page.family]["curves"][on_page.key] = references
            exact += 1
            misses = 0
        else:
            misses += 1
        if misses == _MOST_MISSES:
            break
    return exact


def _curves_by_priority(run: RecordedRun, heat_maps: Sequence[Overview], verdict: Verdict) -> list[CurveOnPage]:
    """All series with values: those with findings; those of the worst layer of each statistic, of the second worst, and
    so on; the rest.
    """
    with_findings = {(finding.tensor, finding.statistic, layer) for finding in verdict for layer in finding.layers}
    severity_of: dict[int, int] = {}
    for overview in heat_maps:
        for severity, item in enumerate(overview.worst_layers(WORST)):
            severity_of[item.layer] = min(severity, severity_of.get(item.layer, severity))
    counts = run.series["count"].to_pylist()
    order: list[tuple[bool, int, CurveOnPage]] = []
    for number, overview in enumerate(heat_maps):
        for series, (rank, row) in sorted(overview.places.items(), key=itemgetter(1)):
            subject = run.subjects[series]
            is_other = (subject.tensor, subject.statistic, subject.layer) not in with_findings
            severity = severity_of.get(int(overview.layers[row]), WORST)
            if counts[series]:
                order.append((is_other, severity, CurveOnPage(series, number, f"{row}:{overview.ranks[rank]}")))
    return [curve for *_, curve in sorted(order, key=itemgetter(0, 1))]


def _histograms(
    run: RecordedRun, subjects: Subjects, packed: PackedArrays, layers: Collection[int]
) -> list[dict[str, Any]]:
    """The histograms that fit in a third of the remaining room, first of some layers."""
    families = [series for series in subjects.histograms if (series.layer >= 0).all()]
    if not families:
        return []
    content: list[dict[str, Any]] = []
    for series in families:
        names = {"tensor": series.family.tensor, "statistic": series.family.statistic, "ranks": series.ranks}
        content.append({**names, "layers": series.rows.tolist(), "counts": {}})
    columns = Columns.of(run, _HISTOGRAM_COLUMNS)
    most = packed.size + (packed.most - packed.size) // 3
    for is_first in (True, False):
        for series, entry in zip(families, content, strict=True):
            chosen = set(series.series[np.isin(series.layer, list(layers)) == is_first].tolist())
            for histogram in histograms(run, series, columns, chosen):
                if packed.size > most:
                    return content
                used = histogram.columns
                arrays = packed.try_put(histogram.counts, used.first, used.last)
                if arrays is None:
                    return content
                key = f"{series.layer[histogram.member]}:{series.rank[histogram.member]}"
                entry["counts"][key] = {"arrays": arrays, "lowest": histogram.lowest}
    return content


def _run(run: RecordedRun) -> dict[str, Any]:
    rows, total = facts.events(run)
    return {
        "path": str(run.path),
        "id": run.run_id,
        "source": run.source,
        "segments": facts.segments(run),
        "name": folder_name(run),
        "duration": facts.duration(run),
        "trainer": facts.trainer_steps(run),
        "coverage": facts.coverage(run),
        "outcome": outcome_notes(run),
        "other_steps": other_steps_of_run(run),
        "states": run.states.to_pylist(),
        "plan": facts.plan(run),
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
        shown = facts.downsample(values)
        arrays = packed.try_put_curve(iterations[shown], values[shown])
        if arrays is not None:
            content.append({"name": name, "arrays": arrays})
    return content
