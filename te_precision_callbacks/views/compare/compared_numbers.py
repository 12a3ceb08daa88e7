"""The values of a comparison that its page shows.

Runs may be large, and are read in pieces. Of each piece this keeps the largest difference of each cell, and curves with
a bounded number of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import Compared
from te_precision_callbacks.views.compare.judging_scales import scale_of
from te_precision_callbacks.views.compare.sides import Floats, Ints, Side
from te_precision_callbacks.views.report.overview import Columns, Overview
from te_precision_callbacks.views.report.subjects import FamilySeries, Subjects

_MOST_POINTS = 1000

_MOST_CURVES = 1500


class ComparedSeries(NamedTuple):
    """Both sides of a series.

    Attributes:
        strength: the largest difference, as a multiple of the bound.
        every: the interval of the steps; the step of the departure is added.
        iterations, a, b: [n].
        below, above: [n]: a value between them is too near to ``a`` to count.
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


@dataclass
class DifferenceMap:
    """The heat map of the differences in a statistic of a tensor.

    Attributes:
        overview: the differences, with their signs.
        unit: ``spreads`` with a noise floor, otherwise the unit of the statistic's scale.
        bound: the difference that counts, in ``unit``; nan without any difference.
    """

    overview: Overview
    unit: str
    bound: float = math.nan


class ComparedNumbers:
    """Collects values for a page; pass a new one to ``compare(numbers=)``."""

    a: Side
    b: Side
    subjects: Subjects

    def __init__(self) -> None:
        self._curves: list[ComparedSeries] = []
        self._maps: list[DifferenceMap] = []
        self._map_of: dict[int, DifferenceMap] = {}

    def collect_from(
        self, a: Side, b: Side, paired: Sequence[Subject], *, has_noise: bool
    ) -> Callable[[Compared], None]:
        """Begin to collect values of the series that pair; returns the function that collects them."""
        self.a, self.b, self.subjects = a, b, Subjects(a.run)
        numbers = [a.series[subject] for subject in paired if subject.layer]
        families = [_of_series(family, np.isin(family.series, numbers)) for family in self.subjects.families]
        families = [family for family in families if len(family.series)]
        columns = Columns.for_rows(a.run, sum(len(family.rows) * len(family.ranks) for family in families))
        for family in families:
            unit = "spreads" if has_noise else scale_of(family.family.tensor, family.family.statistic).unit
            made = DifferenceMap(Overview(family, columns, math.nan), unit)
            self._maps.append(made)
            self._map_of.update(dict.fromkeys(family.series.tolist(), made))
        return self._collect

    @property
    def heat_maps(self) -> list[DifferenceMap]:
        return [heat_map for heat_map in self._maps if not math.isnan(heat_map.bound)]

    @property
    def curves(self) -> list[ComparedSeries]:
        return sorted(self._curves, key=lambda curve: (not curve.departs, -curve.strength))

    def _collect(self, part: Compared) -> None:
        begin_of = dict(zip(part.series[part.begins].tolist(), part.begins.tolist(), strict=True))
        edges = np.searchsorted(part.series, np.arange(len(part.subjects) + 1))
        for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            if begin == end:
                continue
            subject, own = part.subjects[number], slice(begin, end)
            made = self._map_of.get(self.a.series.get(subject, -1))
            measure = part.spread[own] if made is not None and made.unit == "spreads" else np.ones(end - begin)
            if made is not None and not np.isnan(measure).any():
                made.overview.add(self.a.series[subject], part.iterations[own], part.difference[own] / measure)
                made.bound = float(np.fmin(made.bound, np.median(part.limit[own] / measure)))
            every = -(-(end - begin) // _MOST_POINTS)
            at = np.arange(begin, end, every)
            if number in begin_of:
                at = np.unique(np.append(at, begin_of[number]))
            strength = float(np.max(np.abs(part.difference[own]) / part.limit[own]))
            a, b, below, above = (column[at] for column in (part.a, part.b, part.below, part.above))
            departs = number in begin_of
            curve = ComparedSeries(subject, departs, strength, every, part.iterations[at], a, b, below, above)
            self._curves.append(curve)
            if len(self._curves) >= 2 * _MOST_CURVES:
                self._curves = self.curves[:_MOST_CURVES]


def _of_series(family: FamilySeries, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> FamilySeries:
    columns = {name: getattr(family, name)[chosen] for name in ("series", "layer", "rank", "count")}
    return replace(family, **columns)
