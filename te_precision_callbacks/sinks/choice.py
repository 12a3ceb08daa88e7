"""Chooses the series that go to a trainer's loggers over a whole run: few series, without gaps.

A *series* is one statistic of one tensor of one layer. Series of the same tensor and statistic are a *family*, with a
value from each layer.

- Until the run has had :data:`MOST_SERIES` series, all of them go to the loggers, whatever is due in a step.
- In the first step with more, each family gets up to :data:`PLACES` layers, the worst by the table of statistics, or
  the largest where the table has no direction; series that were logged before stay.
- A layer that gets worse later takes one of :data:`LATER_PLACES` more places: at once if its value is not finite;
  otherwise if it was, in :data:`PATIENCE` consecutive steps, among the worst of its family, and the worst of the layers
  that are not logged.
- A series that goes to the loggers keeps going to the end. No series is replaced.

There are therefore never more than MOST_SERIES + (PLACES + LATER_PLACES) * families series.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from te_precision_callbacks.sinks.worst import ByLayer, worst_beside
from te_precision_callbacks.statistics.series import Family

MOST_SERIES = 2_000
PLACES = 50
LATER_PLACES = 50
PATIENCE = 3


class _LoggedFamily:
    """The layers of one family that go to the loggers."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self._later = 0
        self._waiting: str | None = None
        self._steps = 0

    def fill(self, ranked: Iterable[str]) -> None:
        """Give free places to the worst layers."""
        for layer in ranked:
            if len(self.layers) >= PLACES:
                return
            self.layers.add(layer)

    def join(self, ranked: Iterable[str], values: ByLayer, family: Family) -> None:
        """Give a later place to layers that have become worse than the logged layers."""
        others = [layer for layer in ranked if layer not in self.layers]
        candidate = others[0] if others else None
        self._steps = self._steps + 1 if candidate == self._waiting else 1
        self._waiting = candidate
        for layer in others:
            is_lost = family.badness(values[layer]) == math.inf
            is_worst = layer == candidate and self._steps >= PATIENCE
            if (is_lost or is_worst) and self._later < LATER_PLACES:
                self.layers.add(layer)
                self._later += 1


class SeriesChoice:
    """The series that go to loggers; one object for a run.

    Attributes:
        crowded: whether more than :data:`MOST_SERIES` series were seen.
    """

    def __init__(self) -> None:
        self.crowded = False
        self._families: dict[Family, _LoggedFamily] = {}
        self._count = 0

    def take(self, families: Mapping[Family, ByLayer], telling: Mapping[Family, ByLayer]) -> None:
        """Take the series of a step.

        Args:
            families: the numbers of the step, and its histograms with any value.
            telling: the numbers that count for the worst of the run, see
            :func:`~te_precision_callbacks.sinks.worst.judged`.
        """
        new = {family: values.keys() - self.logged(family) for family, values in families.items()}
        if not self.crowded:
            self._count += sum(map(len, new.values()))
            self.crowded = self._count > MOST_SERIES
        if self.crowded:
            self._take_worst([family for family in families if new[family]], telling)
        else:
            for family, layers in new.items():
                self._families.setdefault(family, _LoggedFamily()).layers.update(layers)

    def logged(self, family: Family) -> Set[str]:
        """The layers whose series of a family go to the loggers."""
        known = self._families.get(family)
        return frozenset() if known is None else known.layers

    def _take_worst(self, families: Iterable[Family], found: Mapping[Family, ByLayer]) -> None:
        without_order = []
        for family in families:
            if family.request is not None and family.request.statistic.is_count and not family.has_direction:
                without_order.append(family)
                continue
            ranked = list(worst_beside(PLACES, family, found[family], found))
            logged = self._families.setdefault(family, _LoggedFamily())
            if len(logged.layers) < PLACES:
                logged.fill(ranked)
            else:
                logged.join(ranked, found[family], family)
        for family in without_order:
            self._families.setdefault(family, _LoggedFamily()).fill(self._most_logged(family.tensor, found[family]))

    def _most_logged(self, tensor: str, layers: Iterable[str]) -> list[str]:
        """Layers whose other statistics of the tensor are logged come first: a count or a histogram has no worst
        layer."""
        logged = Counter(
            layer for family, known in self._families.items() if family.tensor == tensor for layer in known.layers
        )
        return sorted(layers, key=lambda layer: -logged[layer])
