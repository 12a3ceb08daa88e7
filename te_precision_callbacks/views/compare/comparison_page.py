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

from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.compare.departures import ComparedValues
from te_precision_callbacks.views.compare.loss import loss_curves
from te_precision_callbacks.views.compare.noise import Side
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
from te_precision_callbacks.views.report.data import finding_on_page
from te_precision_callbacks.views.report.families import Subjects, layer_name
from te_precision_callbacks.views.report.packing import PackedArrays
from te_precision_callbacks.views.report.page import FOR_FACTS, MOST_BYTES, PageTemplate, output_path, write_bytes

_MOST_POINTS = 1000

_MOST_CURVES = 1500

_MOST_PARTINGS = 1000


class ComparedSeries(NamedTuple):
    """Both sides of a series.

    Attributes:
        strength: the largest difference, as a multiple of the bound.
        every: the interval of the steps; the departure's step is added.
        iterations, a, b: [n].
        limit: [n]: the smallest difference from ``a`` that counts, on the scale of the series.
        step, resolution: the scale of the series, as in :class:`~te_precision_callbacks.views.compare.noise.Scale`.
    """

    subject: Subject
    departs: bool
    strength: float
    every: int
    iterations: Ints
    a: Floats
    b: Floats
    limit: Floats
    step: float
    resolution: float


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
        def order(curve: ComparedSeries) -> tuple[bool, float, float]:
            return not curve.departs, -curve.strength, self.a.place_in_records(curve.subject)

        return sorted(self._curves, key=order)

    def _collect(self, values: ComparedValues) -> None:
        series, iterations, a, b = values.joined
        strength = np.abs(values.difference) / values.limit
        begin_of = dict(zip(series[values.begins].tolist(), values.begins.tolist(), strict=True))
        for row in np.unique(series).tolist():
            begin, end = np.searchsorted(series, (row, row + 1)).tolist()
            every = math.ceil((end - begin) / _MOST_POINTS)
            shown = np.arange(begin, end, every)
            if row in begin_of:
                shown = np.union1d(shown, begin_of[row])
            curve = ComparedSeries(
                values.subjects[row],
                row in begin_of,
                float(strength[begin:end].max()),
                every,
                iterations[shown],
                a[shown],
                b[shown],
                values.limit[shown],
                float(values.families.step[row]),
                float(values.families.resolution[row]),
            )
            self._curves.append(curve)
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
    for curve in numbers.curves:
        arrays = packed.try_put_curve(curve.iterations, curve.a, curve.b, curve.limit)
        if arrays is not None:
            names = {**curve.subject._asdict(), "layer": layer_name(curve.subject.scope, curve.subject.layer)}
            scale = {"step": curve.step, "resolution": curve.resolution}
            curves.append({**names, **scale, "departs": curve.departs, "every": curve.every, "arrays": arrays})
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
