"""The values of a comparison that its page shows.

Runs may be large, and are read in pieces. Of each piece this keeps curves with a bounded number of points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import Compared
from te_precision_callbacks.views.compare.sides import Floats, Ints, Side
from te_precision_callbacks.views.report.subjects import Subjects

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


class ComparedNumbers:
    """Collects values for a page; pass a new one to ``compare(numbers=)``."""

    a: Side
    b: Side
    subjects: Subjects

    def __init__(self) -> None:
        self._curves: list[ComparedSeries] = []

    def collect_from(self, a: Side, b: Side) -> Callable[[Compared], None]:
        """Begin to collect values of the series that pair; returns the function that collects them."""
        self.a, self.b, self.subjects = a, b, Subjects(a.run)
        return self._collect

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
