"""The HTML page of a comparison, which opens offline.

Runs may be large, and are read in pieces. The page keeps downsampled curves of each piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from te_precision_callbacks.runs.index import REDUCED, Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.compare.departures import ComparedValues, Side
from te_precision_callbacks.views.compare.loss import loss_curves
from te_precision_callbacks.views.compare.result import ComparedVerdicts, Comparison, Parting, StatisticDeparture
from te_precision_callbacks.views.compare.wording import (
    FACT_NAMES,
    describe_first,
    describe_losses,
    describe_pairing,
    difference,
    first_lines,
    number,
    origin,
    times,
)
from te_precision_callbacks.views.report.data import finding_on_page
from te_precision_callbacks.views.report.packing import PackedArrays, narrow, steps_between
from te_precision_callbacks.views.report.page import FOR_FACTS, MOST_BYTES, PageTemplate, output_path, write_bytes
from te_precision_callbacks.views.report.subjects import Subjects, layer_name

_MOST_POINTS = 1000

_MOST_CURVES = 1500


class ComparedSeries(NamedTuple):
    """Both sides of a series.

    Attributes:
        strength: the largest difference, as a multiple of the bound.
        every: the interval of the steps; the departure's step is added.
        iterations, a, b: [n].
        below, above: [n]: values in between are too close to ``a`` to count.
    """

    subject: Subject
    departs: bool
    strength: float
    every: int
    iterations: Ints
    a: Floats
    b: Floats
    below: Floats
    above: Floats


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
        return sorted(self._curves, key=lambda curve: (not curve.departs, -curve.strength))

    def _collect(self, part: ComparedValues) -> None:
        begin_of = dict(zip(part.series[part.begins].tolist(), part.begins.tolist(), strict=True))
        edges = np.searchsorted(part.series, np.arange(len(part.subjects) + 1))
        for place, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            if begin == end:
                continue
            subject = part.subjects[place]
            own = slice(begin, end)
            every = -(-(end - begin) // _MOST_POINTS)
            at = np.arange(begin, end, every)
            if place in begin_of:
                at = np.unique(np.append(at, begin_of[place]))
            strength = float(np.max(np.abs(part.difference[own]) / part.limit[own]))
            curve = ComparedSeries(
                subject,
                place in begin_of,
                strength,
                every,
                part.iterations[at],
                part.a[at],
                part.b[at],
                part.below[at],
                part.above[at],
            )
            self._curves.append(curve)
            if len(self._curves) >= 2 * _MOST_CURVES:
                self._curves = self.curves[:_MOST_CURVES]


_MOST_PARTINGS = 1000


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
    layer_of = numbers.subjects.place_of_layer
    loss = _loss(result, numbers, packed)
    curves = [_curve(curve, layer_of, packed) for curve in numbers.curves]
    return {
        "a": result.a,
        "b": result.b,
        "floor": None if result.floor is None else result.floor.sides,
        "lost": list(first_lines(result)),
        "verdicts": None if result.verdicts is None else _verdicts(result.verdicts, layer_of),
        "facts": [(FACT_NAMES.get(fact.name, fact.name), fact.a, fact.b) for fact in result.facts],
        "what": list(describe_pairing(result)),
        "first": list(describe_first(result)),
        "notes": result.notes,
        "parted": [_parting(parting, layer_of) for parting in result.parted[:_MOST_PARTINGS]],
        "parted_total": len(result.parted),
        "loss": loss,
        "layers": numbers.subjects.layers,
        "curves": list(filter(None, curves)),
    }


def _verdicts(verdicts: ComparedVerdicts, layer_of: dict[str, int]) -> dict[str, Any]:
    return {
        "summary": verdicts.summary,
        "partial": verdicts.a.is_partial or verdicts.b.state == "not enough checked",
        "a": verdicts.a.summary,
        "b": verdicts.b.summary,
        "only_b": [finding_on_page(finding, layer_of) for finding in verdicts.only_b],
        "not_checked_in_a": list(verdicts.not_checked_in_a),
    }


def _parting(parting: Parting, layer_of: dict[str, int]) -> dict[str, Any]:
    return {
        "layer": layer_of.get(layer_name(parting.scope, parting.layer), -1),  # -1 for a metric of the trainer
        "tensor": parting.tensor,
        "rank": REDUCED if parting.rank is None else parting.rank,
        "iteration": parting.iteration,
        "name": parting.name,
        "origin": origin(parting),
        "departures": list(map(_departure, parting.departures)),
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


def _curve(curve: ComparedSeries, layer_of: dict[str, int], packed: PackedArrays) -> dict[str, Any] | None:
    columns = (curve.a, curve.b, curve.below, curve.above)
    arrays = packed.try_put(steps_between(curve.iterations), *map(narrow, columns))
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


def _loss(result: Comparison, numbers: ComparedNumbers, packed: PackedArrays) -> dict[str, Any] | None:
    curves = None if result.loss is None else loss_curves(numbers.a, numbers.b)
    if result.loss is None or curves is None:
        return None
    columns = (curves.a, curves.b, curves.smooth_a, curves.smooth_b, 100 * curves.relative)
    arrays = packed.try_put(steps_between(curves.iterations), *map(narrow, columns))
    yardsticks = []
    for yardstick in result.loss.yardsticks:
        bound = 100 * yardstick.bound
        yardsticks.append({"name": yardstick.name, "bound": bound, "holds": yardstick.holds})
    return {
        "name": curves.name.statistic,
        "sentences": list(describe_losses(result.loss)),
        "finding": result.loss.is_finding,
        "window": curves.window,
        "stable_since": result.loss.stable_since,
        "floor": None if result.loss.floor is None else 100 * result.loss.floor,
        "yardsticks": yardsticks,
        "arrays": arrays,
    }
