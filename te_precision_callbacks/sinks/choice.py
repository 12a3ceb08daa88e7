"""Choice of the series that go to a trainer's loggers, for a whole run: few series, without gaps.

A *family* are the series of one statistic of one tensor, over the layers.

- Until the run has had :data:`MOST_SERIES` series, all of them are logged.
- In the first step with more, each family gets up to :data:`PLACES` layers: the worst, or the largest if the statistic
  has no direction. Series that were logged before stay.
- A layer joins later if its value is not finite, up to :data:`LATER_PLACES` in each family.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from te_precision_callbacks.sinks.worst import ByLayer, worst_first
from te_precision_callbacks.statistics.series import Family

MOST_SERIES = 2_000
PLACES = 50
LATER_PLACES = 50


class SeriesChoice:
    """The series that go to loggers, of a run; ``crowded`` once there are more than :data:`MOST_SERIES`."""

    def __init__(self) -> None:
        self.crowded = False
        self._logged: dict[Family, set[str]] = {}
        self._count = 0

    def take(self, families: Mapping[Family, ByLayer], telling: Mapping[Family, ByLayer]) -> None:
        """Choose among the series of a step.

        Args:
            families: the values of the step, and its histograms with any value.
            telling: the values that count for the worst of the run, see
                :func:`~te_precision_callbacks.sinks.worst.judged`.
        """
        new = {family: values.keys() - self.logged(family) for family, values in families.items()}
        if not self.crowded:
            self._count += sum(map(len, new.values()))
            self.crowded = self._count > MOST_SERIES
        if not self.crowded:
            for family, layers in new.items():
                self._logged.setdefault(family, set()).update(layers)
            return
        chosen = [family for family in families if new[family]]
        # Counts and histograms have no worst layer: they follow the other statistics of their tensor.
        for family in sorted(chosen, key=_has_no_order):
            values = telling[family]
            if _has_no_order(family):
                self._add(family, self._most_logged(family.tensor, values), PLACES)
                continue
            worst = worst_first(PLACES, family, values)
            self._add(family, worst, PLACES)
            lost = [layer for layer in worst if family.badness(values[layer]) == math.inf]
            self._add(family, lost, PLACES + LATER_PLACES)

    def logged(self, family: Family) -> Set[str]:
        return self._logged.get(family, frozenset())

    def _add(self, family: Family, layers: Iterable[str], most: int) -> None:
        logged = self._logged.setdefault(family, set())
        for layer in layers:
            if len(logged) < most:
                logged.add(layer)

    def _most_logged(self, tensor: str, layers: Iterable[str]) -> list[str]:
        logged = Counter(layer for family, known in self._logged.items() if family.tensor == tensor for layer in known)
        return sorted(layers, key=lambda layer: -logged[layer])


def _has_no_order(family: Family) -> bool:
    return family.request is not None and family.request.statistic.is_count and not family.has_direction
