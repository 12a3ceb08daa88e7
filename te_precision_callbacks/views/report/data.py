"""The data of a run's page.

A page has a bounded size. It always has heat maps, with one byte for the worst value of a layer in a span of steps, and
the exact worst value of each layer. The remaining budget goes to complete curves and histograms: first of series with
findings, then of the worst layers, then of all others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.recorded import Curve, RecordedRun
from te_precision_callbacks.runs.summary import (
    last_steps,
    loss_first,
    no_step_note,
    outcome_notes,
    why_nothing_to_show,
)
from te_precision_callbacks.sinks.worst import worst_first
from te_precision_callbacks.statistics.table import Worse
from te_precision_callbacks.views.report import facts
from te_precision_callbacks.views.report.overview import Columns, Overview, has_room_for, histograms, overviews, pieces
from te_precision_callbacks.views.report.packing import PackedArrays, PackedScale, narrow, steps_between
from te_precision_callbacks.views.report.subjects import (
    FamilySeries,
    ReportError,
    Subjects,
    folder_name,
    layer_name,
)

_HISTOGRAM_COLUMNS = 60

WORST = 5

_FIRST = ("nonfinite_num", "overflows%", "underflows%", "sqnr_db", "saturated_scales%", "flushed_scales%")


_FORMATS = (E4M3, E5M2, E2M1)


def page_data(run: RecordedRun, most: int) -> tuple[dict[str, Any], list[str]]:
    """Choose the content and the arrays of a page, at most ``most`` characters; raises ReportError without values."""
    why = why_nothing_to_show(run)
    if why:
        raise ReportError(why)
    subjects = Subjects(run)
    verdict = diagnose(run)
    packed = PackedArrays(most)
    chosen, columns, left_out = _choose_families(run, subjects)
    made = []
    shown: list[Overview] = []
    total = 0
    for overview in overviews(run, chosen, columns):
        made.append(FamilyOnPage(overview, packed))
        overview.cells.clear()
        overview.present.clear()
        shown.append(overview)
        total += len(overview.of.series)
    formats = {form.name: {"max": form.max, "least": form.min_subnormal, "reach": 1.0} for form in _FORMATS}
    # Blocks of NVFP4 have E4M3 scales, which extend the range of a tensor downwards.
    formats[E2M1.name]["reach"] = E4M3.min_subnormal / E4M3.max
    content: dict[str, Any] = {
        "run": _run(run),
        "notes": [
            *no_step_note(run),
            *run.notes,
            *left_out,
        ],
        "layers": _layers(run, subjects),
        "scalars": _scalars(run, subjects, packed),
        "formats": formats,
        "verdict": _verdict(verdict, run, subjects),
        "worst_layers": worst_layers(shown),
        "last_steps": _last_steps(run, packed),
    }
    worst: set[int] = set()
    for finding in content["verdict"]["findings"]:
        worst.update(finding["places"])
    for listed in content["worst_layers"]:
        worst.update(item["layer"] for item in listed["items"])
    content["histograms"] = _histograms(run, subjects, packed, worst)
    exact = _put_curves(run, made, packed, verdict)
    content["families"] = [family.content for family in made]
    content["exact"] = {
        "curves": exact,
        "series": total,
        "widest": int(np.max(columns.last - columns.first) + 1) if len(columns) else 0,
    }
    return content, packed.texts


def worst_layers(made: Sequence[Overview]) -> list[dict[str, Any]]:
    """The worst layers of each statistic with a bad direction, most severe first, without perfect values."""
    listed_families = []
    for place, overview in enumerate(made):
        family = overview.family
        if not family.has_direction or family.request is None:
            continue
        items = []
        worst = {}
        values = {}
        for row, number in overview.worst_of_rows().items():
            layer = int(overview.layers[row])
            worst[layer] = number
            values[layer] = number.value
        for layer in worst_first(WORST, family, values):
            value, rank, at = worst[layer]
            is_good = (family.worse is Worse.HIGH and value == 0) or (family.worse is Worse.LOW and np.isposinf(value))
            if is_good:
                continue
            items.append({"layer": layer, "rank": rank, "value": value, "at": at})
        listed_families.append({"family": place, "items": items, "counted": bool(worst)})

    def priority(listed: dict[str, Any]) -> tuple[int, int]:
        request = made[listed["family"]].family.request
        name = "" if request is None else request.statistic.name
        return (_FIRST.index(name) if name in _FIRST else len(_FIRST), listed["family"])

    return sorted(listed_families, key=priority)


MOST_PLACES = 200


def _verdict(verdict: Verdict, run: RecordedRun, subjects: Subjects) -> dict[str, Any]:
    places: dict[str, int] = {}
    for table in (run.series, run.layers):
        for scope, layer in set(zip(table["scope"].to_pylist(), table["layer"].to_pylist(), strict=True)):
            place = subjects.place_of_layer.get(layer_name(scope, layer))
            if place is not None:
                places[layer] = min(place, places.get(layer, place))
    content = verdict.as_json()
    del content["verdict"]
    content["findings"] = [finding_on_page(finding, places) for finding in verdict]
    return content


def finding_on_page(finding: Finding, places: Mapping[str, int]) -> dict[str, Any]:
    """A finding for a page; ``places``: layer, as in records -> its index in the page's list of layers."""
    content = finding.as_json()
    del content["layers"]
    layers = [places[layer] for layer in finding.layers if layer in places]
    return {**content, "places": layers[:MOST_PLACES], "layers_total": len(finding.layers)}


def _choose_families(run: RecordedRun, subjects: Subjects) -> tuple[list[FamilySeries], Columns, list[str]]:
    kept: list[FamilySeries] = []
    rows = 0
    for family in sorted(subjects.families, key=lambda family: not family.family.has_direction):
        more = len(family.rows) * len(family.ranks)
        if kept and not has_room_for(rows + more):
            continue
        kept.append(family)
        rows += more
    left_out = [family for family in subjects.families if family not in kept]
    notes = []
    if left_out:
        named = ", ".join(f"{family.family.statistic} of {family.family.tensor}" for family in left_out[:5])
        notes.append(f"{len(left_out)} of {len(subjects.families)} statistics do not fit, such as {named}.")
    return [family for family in subjects.families if family in kept], Columns.for_rows(run, rows), notes


class FamilyOnPage:
    def __init__(self, overview: Overview, packed: PackedArrays) -> None:
        self.overview = overview
        family = overview.family
        request = overview.family.request
        row = None if request is None else request.statistic
        shown = np.concatenate([cells.ravel() for cells in overview.cells.values()])
        scale = PackedScale.of(shown, centred=row is not None and row.signed)
        self.content: dict[str, Any] = {
            "tensor": family.tensor,
            "statistic": family.statistic,
            "gemm": family.gemm,
            "base": None if row is None else row.name,
            "recipe": None if request is None else request.recipe,
            "columnwise": request is not None and request.columnwise,
            "unit": "" if row is None else row.unit,
            "formula": "" if row is None else row.formula,
            "worse": None if family.worse is None else family.worse.value,
            "ranks": overview.of.ranks,
            "rows": packed.put(overview.layers.astype(np.int32)),
            "first": packed.put(overview.columns.first.astype(np.int64)),
            "last": packed.put(overview.columns.last.astype(np.int64)),
            "scale": vars(scale),
            "cells": {
                str(rank): packed.put(scale.bytes(cells, overview.present[rank]))
                for rank, cells in overview.cells.items()
            },
            "worst": {str(rank): packed.put(narrow(worst)) for rank, worst in overview.worst.items()},
            "worst_at": {str(rank): packed.put(at) for rank, at in overview.worst_at.items()},
            "curves": {},
        }


_CurvePlace = tuple[FamilyOnPage, int, int, int, int]
"""A series: its heat map, row, rank, number, and number of values."""


def _put_curves(run: RecordedRun, made: Sequence[FamilyOnPage], packed: PackedArrays, verdict: Verdict) -> int:
    order = _by_priority(run, made, verdict)
    kept = 0
    for piece in pieces(np.array([count for *_, count in order], np.int64), 500_000):
        wanted = order[piece]
        table = run.values([series for *_, series, _ in wanted])
        numbers = table["series"].to_numpy()
        iterations = table["iteration"].to_numpy()
        values = table["value"].to_numpy()
        flags = table["flags"].to_numpy()
        misses = 0
        for page_family, row, rank, series, _ in wanted:
            begin, end = np.searchsorted(numbers, [series, series + 1])
            counts = ~page_family.overview.family.leaves_out(flags[begin:end])
            steps = iterations[begin:end][counts]
            own = values[begin:end][counts]
            references = packed.try_put(steps_between(steps), narrow(own))
            if references is None:
                misses += 1
                continue
            page_family.content["curves"][f"{row}:{rank}"] = references
            kept += 1
        if misses > len(wanted) // 2:
            break
    return kept


def _by_priority(run: RecordedRun, made: Sequence[FamilyOnPage], verdict: Verdict) -> list[_CurvePlace]:
    """All series, by priority: with findings; the worst of each statistic, the second worst, and so on; the other
    statistics of these layers; the rest.
    """
    with_findings: dict[tuple[str, str], set[str]] = {}
    for finding in verdict:
        with_findings.setdefault((finding.tensor, finding.statistic), set()).update(finding.layers)
    places: dict[tuple[int, int, int], int] = {}
    layers: set[int] = set()
    for shown in made:
        for place, (row, rank) in enumerate(shown.overview.worst_rows(WORST)):
            places[id(shown), row, rank] = place
            layers.add(int(shown.overview.layers[row]))
    keyed: list[tuple[tuple[bool, int, bool, bool], _CurvePlace]] = []
    for shown in made:
        overview = shown.overview
        counts = dict(zip(overview.of.series.tolist(), overview.of.count.tolist(), strict=True))
        named = with_findings.get((overview.family.tensor, overview.family.statistic), set())
        for rank, numbers in overview.series.items():
            for row, number in enumerate(numbers.tolist()):
                if number >= 0:
                    place = places.get((id(shown), row, rank), WORST)
                    other = place < WORST and not overview.family.has_direction
                    key = (
                        run.subjects[number].layer not in named,
                        place,
                        other,
                        int(overview.layers[row]) not in layers,
                    )
                    keyed.append((key, (shown, row, rank, number, counts[number])))
    return [place for _, place in sorted(keyed, key=lambda entry: entry[0])]


def _histograms(
    run: RecordedRun, subjects: Subjects, packed: PackedArrays, worst: Collection[int]
) -> list[dict[str, Any]]:
    families = [family for family in subjects.histograms if (family.layer >= 0).all()]
    content: list[dict[str, Any]] = []
    for family in families:
        facts_of_family = {"tensor": family.family.tensor, "statistic": family.family.statistic, "ranks": family.ranks}
        content.append({**facts_of_family, "layers": np.unique(family.layer).tolist(), "counts": {}})
    columns = Columns.of(run, _HISTOGRAM_COLUMNS) if families else None
    most = packed.size + (packed.most - packed.size) // 3
    for is_worst in (True, False):
        for family, entry in zip(families, content, strict=True):
            wanted = set(family.series[np.isin(family.layer, list(worst)) == is_worst].tolist())
            for place, used, lowest, counts in histograms(run, family, columns, wanted) if columns is not None else ():
                arrays = packed.try_put(narrow(counts), used.first, used.last) if packed.size <= most else None
                if arrays is None:
                    return content
                entry["counts"][f"{family.layer[place]}:{family.rank[place]}"] = {"arrays": arrays, "lowest": lowest}
    return content


def _run(run: RecordedRun) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "id": run.run_id,
        "source": run.source,
        "segments": facts.segments(run),
        "name": folder_name(run),
        "duration": facts.duration(run),
        "trainer": facts.trainer_steps(run),
        "coverage": facts.coverage(run),
        "outcome": list(outcome_notes(run)),
        "other_steps": other_steps_of_run(run),
        "states": run.states.to_pylist(),
        "plan": facts.plan(run),
        **dict(zip(("events", "events_total"), facts.events(run), strict=True)),
    }


def _last_steps(run: RecordedRun, packed: PackedArrays) -> dict[str, Any] | None:
    """The last steps; ``magnitudes``: tensors x iterations, -1 where a tensor was not read."""
    found = last_steps(run)
    if found is None:
        return None
    rows = [list(map(_magnitude, row)) for row in found["magnitudes"]]
    return {**found, "magnitudes": packed.put(np.array(rows, np.float32))}


def _magnitude(number: float | str | None) -> float:
    return -1.0 if number is None else float(number)


def _layers(run: RecordedRun, subjects: Subjects) -> list[dict[str, Any]]:
    known: Mapping[str, dict[str, Any]] = facts.layer_facts(run)
    products = facts.gemms(run)
    layers = []
    for layer in subjects.layers:
        recorded = {"facts": known.get(layer.name, {}), "gemms": products.get(layer.name, [])}
        layers.append({**vars(layer), **recorded})
    return layers


def _scalars(run: RecordedRun, subjects: Subjects, packed: PackedArrays) -> list[dict[str, Any]]:
    names = sorted(loss_first(run.curves), key=lambda name: name not in run.metrics)
    curves = [(name, run.curves[name]) for name in names]
    for family in subjects.free:
        for series, rank in zip(family.series.tolist(), family.rank.tolist(), strict=True):
            table = run.values([series])
            name = family.family.statistic + ("" if rank == REDUCED else f" (rank {rank})")
            curves.append((name, Curve(table["iteration"].to_numpy(), table["value"].to_numpy())))
    content = []
    for name, (iterations, values) in curves:
        shown = facts.downsample(values)
        arrays = packed.try_put(iterations[shown], narrow(values[shown]))
        if arrays is not None:
            content.append({"name": name, "total": len(values), "shown": len(shown), "arrays": arrays})
    return content
