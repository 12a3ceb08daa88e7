"""The HTML page of a comparison, which opens offline.

Runs may be large, and are read in pieces. The page keeps downsampled curves of each piece.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from te_precision_callbacks.views.compare.departures import ComparedValues, Pair, Side
from te_precision_callbacks.views.compare.loss import loss_curves
from te_precision_callbacks.views.compare.result import Comparison
from te_precision_callbacks.views.compare.wording import (
    FACT_NAMES,
    departure_texts,
    describe_first,
    describe_losses,
    describe_pairing,
    first_lines,
    origin,
)
from te_precision_callbacks.views.report.data import Subjects, finding_on_page, layer_name
from te_precision_callbacks.views.report.packing import PackedArrays
from te_precision_callbacks.views.report.page import FOR_FACTS, MOST_BYTES, PageTemplate, output_path, write_bytes

_MOST_POINTS = 1000

_MOST_CURVES = 1500

_MOST_PARTINGS = 1000


class ComparedSeries(NamedTuple):
    """Both sides of a series, with fewer steps.

    Attributes:
        strength: the largest difference, as a multiple of the bound.
        every: the interval of the steps; the departure's step is added.
    """

    values: ComparedValues
    strength: float
    every: int


class ComparedNumbers:
    """Collects values for a page; pass a new one to ``compare(numbers=)``."""

    a: Side
    b: Side
    subjects: Subjects

    def __init__(self) -> None:
        self._curves: list[ComparedSeries] = []

    def collect_from(self, a: Side, b: Side) -> Callable[[ComparedValues], None]:
        """Start collecting the values of paired series; returns the function that receives them."""
        self.a = a
        self.b = b
        self.subjects = Subjects(a.run)
        return self._collect

    @property
    def curves(self) -> list[ComparedSeries]:
        def order(curve: ComparedSeries) -> tuple[bool, float, int]:
            return curve.values.begin is None, -curve.strength, self.a.subjects[curve.values.subject]

        return sorted(self._curves, key=order)

    def _collect(self, values: ComparedValues) -> None:
        count = len(values.limit)
        every = math.ceil(count / _MOST_POINTS)
        shown = np.arange(0, count, every)
        if values.begin is not None:
            shown = np.union1d(shown, values.begin)
        strength = float((np.abs(values.difference) / values.limit).max())
        pair = Pair(values.pair.iterations[shown], values.pair.a[shown], values.pair.b[shown])
        thinned = values._replace(pair=pair, difference=values.difference[shown], limit=values.limit[shown])
        self._curves.append(ComparedSeries(thinned, strength, every))
        if len(self._curves) >= 2 * _MOST_CURVES:
            self._curves = self.curves[:_MOST_CURVES]


def write_comparison(
    result: Comparison, numbers: ComparedNumbers, path: str | os.PathLike[str], *, most: int = MOST_BYTES
) -> Path:
    """Write the page of a comparison into an ``.html`` file of at most ``most`` bytes, in a folder that exists.

    Raises:
        ReportError: the file cannot be written, or its name does not end in ``.html``.
        MissingExtraError: plotly is not installed.
    """
    path = output_path(path)
    frame = PageTemplate(("findings", "comparison"))
    packed = PackedArrays(most - frame.size - FOR_FACTS)
    content = _content(result, numbers, packed)
    return write_bytes(path, frame.fill(f"{result.a} and {result.b}", content, packed.texts).encode())


def _content(result: Comparison, numbers: ComparedNumbers, packed: PackedArrays) -> dict[str, Any]:
    subjects = numbers.subjects
    parted = []
    for parting in result.parted[:_MOST_PARTINGS]:
        names = {"layer": layer_name(parting.scope, parting.layer), "origin": origin(parting)}
        departures = [{**vars(departure), **departure_texts(departure)} for departure in parting.departures]
        parted.append({**vars(parting), **names, "departures": departures})
    curves = []
    for values, _, every in numbers.curves:
        arrays = packed.try_put_curve(*values.pair, values.limit)
        if arrays is not None:
            names = {**values.subject._asdict(), "layer": layer_name(values.subject.scope, values.subject.layer)}
            scale = {"step": values.scale.step, "resolution": values.resolution}
            curves.append({**names, **scale, "departs": values.begin is not None, "every": every, "arrays": arrays})
    verdicts = None
    if result.verdicts is not None:
        is_partial = result.verdicts.a.is_partial or result.verdicts.b.state == "not enough checked"
        only_b = [finding_on_page(finding, subjects) for finding in result.verdicts.only_b]
        verdicts = {**result.verdicts.as_json(), "partial": is_partial, "only_b": only_b}
    return {
        **vars(result),
        "facts": [(FACT_NAMES.get(fact.name, fact.name), fact.a, fact.b) for fact in result.facts],
        "lost": list(first_lines(result)),
        "what": list(describe_pairing(result)),
        "first": list(describe_first(result)),
        "verdicts": verdicts,
        "parted": parted,
        "parted_total": len(result.parted),
        "loss": _loss(result, numbers, packed),
        "layers": subjects.layers,
        "curves": curves,
    }


def _loss(result: Comparison, numbers: ComparedNumbers, packed: PackedArrays) -> dict[str, Any] | None:
    curves = None if result.loss is None else loss_curves(numbers.a.run, numbers.b.run)
    if result.loss is None or curves is None:
        return None
    columns = (curves.a, curves.b, curves.smooth_a, curves.smooth_b, 100 * curves.relative)
    arrays = packed.try_put_curve(curves.iterations, *columns)
    return {**vars(result.loss), "sentences": list(describe_losses(result.loss)), "arrays": arrays}
