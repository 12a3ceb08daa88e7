"""One HTML page of a comparison, which opens offline as the page of a run does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.views.compare.compared_numbers import ComparedNumbers, ComparedSeries, DifferenceMap
from te_precision_callbacks.views.compare.loss import loss_curves
from te_precision_callbacks.views.compare.new_findings import ComparedVerdicts
from te_precision_callbacks.views.compare.result import Comparison, Parting, StatisticDeparture
from te_precision_callbacks.views.compare.wording import (
    difference,
    first_lines,
    number,
    of_losses,
    origin,
    times,
    what_was_compared,
    where_first,
)
from te_precision_callbacks.views.report.data import FamilyOnPage, finding_on_page
from te_precision_callbacks.views.report.packing import Packed, PackedScale, narrowed, steps_between
from te_precision_callbacks.views.report.page import FOR_FACTS, MOST_BYTES, PageTemplate, output_path, write_bytes
from te_precision_callbacks.views.report.subjects import layer_name

_SCRIPTS = ("findings", "comparison")

_MOST_PARTINGS = 1000

_UNITS = {"spreads": "multiples of the ordinary spread", "of its size": "multiples of its ordinary size"}


def write_comparison(
    result: Comparison, numbers: ComparedNumbers, path: str | os.PathLike[str], *, most: int = MOST_BYTES
) -> Path:
    """Write the page of a comparison into an ``.html`` file of at most ``most`` bytes, in a folder that exists.

    Raises:
        ReportError: the file cannot be written, or its name ends otherwise.
        MissingExtraError: plotly is not installed.
    """
    path = output_path(path)
    frame = PageTemplate(_SCRIPTS)
    packed = Packed(most - frame.size - FOR_FACTS)
    content = _content(result, numbers, packed)
    return write_bytes(path, frame.filled(f"{result.a} and {result.b}", content, packed.texts).encode())


def _content(result: Comparison, numbers: ComparedNumbers, packed: Packed) -> dict[str, Any]:
    layer_of = {layer.name: place for place, layer in enumerate(numbers.subjects.layers)}
    loss = _loss(result, numbers, packed)
    families = [_heat_map(heat_map, packed) for heat_map in numbers.heat_maps]
    curves = [_curve(curve, layer_of, packed) for curve in numbers.curves]
    return {
        "a": result.a,
        "b": result.b,
        "floor": None if result.floor is None else result.floor.sides,
        "lost": list(first_lines(result)),
        "verdicts": None if result.verdicts is None else _verdicts(result.verdicts, layer_of),
        "facts": [(fact.name, fact.a, fact.b) for fact in result.facts],
        "what": list(what_was_compared(result)),
        "first": list(where_first(result)),
        "notes": result.notes,
        "parted": [_parting(parting, layer_of) for parting in result.parted[:_MOST_PARTINGS]],
        "parted_total": len(result.parted),
        "loss": loss,
        "layers": numbers.subjects.layers,
        "families": families,
        "worst_layers": list(_first_family(result, families)),
        "curves": [curve for curve in curves if curve is not None],
    }


def _verdicts(verdicts: ComparedVerdicts, layer_of: dict[str, int]) -> dict[str, Any]:
    return {
        "summary": verdicts.summary,
        "partial": verdicts.a.is_partial or verdicts.b.state == "not enough checked",
        "a": verdicts.a.summary,
        "b": verdicts.b.summary,
        "only_b": [finding_on_page(finding, layer_of) for finding in verdicts.only_b],
        "not_judged_in_a": list(verdicts.not_judged_in_a),
    }


def _parting(parting: Parting, layer_of: dict[str, int]) -> dict[str, Any]:
    return {
        "layer": layer_of.get(layer_name(parting.scope, parting.layer), -1),  # -1 for a metric of the trainer
        "tensor": parting.tensor,
        "rank": REDUCED if parting.rank is None else parting.rank,
        "iteration": parting.iteration,
        "name": parting.name,
        "origin": origin(parting),
        "departures": [_departure(departure) for departure in parting.departures],
    }


def _departure(departure: StatisticDeparture) -> dict[str, Any]:
    return {
        "statistic": departure.statistic,
        "gemm": departure.gemm,
        "iteration": departure.iteration,
        "until": departure.until,
        "to_the_end": departure.to_the_end,
        "a": number(departure.a),
        "b": number(departure.b),
        "difference": difference(departure),
        "times": times(departure),
    }


def _curve(curve: ComparedSeries, layer_of: dict[str, int], packed: Packed) -> dict[str, Any] | None:
    columns = (curve.a, curve.b, curve.below, curve.above)
    arrays = packed.try_put(steps_between(curve.iterations), *(narrowed(column) for column in columns))
    if arrays is None:
        return None
    subject = curve.subject
    return {
        "layer": layer_of.get(layer_name(subject.scope, subject.layer), -1),
        "tensor": subject.tensor,
        "gemm": subject.gemm,
        "statistic": subject.statistic,
        "rank": REDUCED if subject.rank is None else subject.rank,
        "departs": curve.departs,
        "every": curve.every,
        "arrays": arrays,
    }


def _heat_map(difference: DifferenceMap, packed: Packed) -> dict[str, Any]:
    overview, bound = difference.overview.without_empty_columns(), difference.bound
    sizes = np.abs(np.concatenate([cells[np.isfinite(cells)] for cells in overview.cells.values()]))
    # Beyond the bound the colours are logarithmic, so that one large difference does not hide all others.
    largest = float(max(sizes.max(initial=0.0), bound))
    scale = PackedScale("asinh", -largest, largest, bound, centred=True)
    unit = difference.unit
    return {
        **FamilyOnPage(overview, packed, scale).content,
        "unit": unit,
        "formula": f"The difference of B from A, in {_UNITS.get(unit, unit)}; from {bound:.3g} on it counts",
        "worse": "far from 0",
    }


def _first_family(result: Comparison, families: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if result.first is None:
        return
    wanted = (result.first.tensor, result.first.strongest.statistic)
    for place, family in enumerate(families):
        if (family["tensor"], family["statistic"]) == wanted:
            yield {"family": place, "items": [{}]}
            return


def _loss(result: Comparison, numbers: ComparedNumbers, packed: Packed) -> dict[str, Any] | None:
    curves = None if result.loss is None else loss_curves(numbers.a, numbers.b)
    if result.loss is None or curves is None:
        return None
    columns = (curves.a, curves.b, curves.smooth_a, curves.smooth_b, 100 * curves.relative)
    arrays = packed.try_put(steps_between(curves.iterations), *(narrowed(column) for column in columns))
    return {
        "name": curves.name.statistic,
        "sentences": list(of_losses(result.loss)),
        "finding": result.loss.is_finding,
        "window": curves.window,
        "stable_since": result.loss.stable_since,
        "floor": None if result.loss.floor is None else 100 * result.loss.floor,
        "yardsticks": [
            {"name": yardstick.name, "bound": 100 * yardstick.bound, "holds": yardstick.holds}
            for yardstick in result.loss.yardsticks
        ],
        "arrays": arrays,
    }
