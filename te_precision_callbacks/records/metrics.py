"""Which of a step's numbers go to a trainer's loggers, and under which names.

    selection = MetricSelection(prefix="te", log_filter=["*/activation/*", "*underflows%"])
    logger.log_metrics(selection(records), step=records.logging_step)

The name is ``<prefix>/<layer>/<tensor>/<statistic>``. Up to :data:`MOST_METRICS` numbers a step all of them go to the
loggers; above that the :data:`WORST_LAYERS` worst layers of each statistic of a tensor, and its minimum, median and
maximum over the layers (``<prefix>/all/<tensor>/<statistic>/min``). The statistics log always has all. Numbers of one
rank alone, where statistics are reduced over ranks, stand under ``<prefix>/local/``: they are no points of the same
series.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from te_precision_callbacks.engine.statistics import histogram_bins
from te_precision_callbacks.errors import OptionError
from te_precision_callbacks.records.loggers import Histogram
from te_precision_callbacks.records.model import Row, StepRecords

logger = logging.getLogger(__name__)

MOST_METRICS = 2_000
WORST_LAYERS = 50

LogFilter = str | Sequence[str] | Callable[[str], bool] | None
"""Patterns with ``*`` and ``?`` of which a metric name must match one, or a function of the name, or None."""

_LOW_IS_WORSE = ("sqnr", "min_nonzero")
_SIGNED_LOW = "min"


def metric_name(prefix: str, row: Row) -> str:
    """``te/<layer>/<tensor>/<statistic>``; the GEMM stands before the statistic where the number belongs to one."""
    return "/".join(part for part in (prefix, row.layer, row.tensor, row.gemm, row.statistic) if part)


def badness(statistic: str, value: float) -> float:
    """A key that grows as a value gets worse: not finite first, then by size; for a few statistics a low one is bad."""
    if not math.isfinite(value):
        return math.inf
    if statistic == _SIGNED_LOW or any(low in statistic for low in _LOW_IS_WORSE):
        return -value
    return abs(value)


class MetricSelection:
    """Turns the records of a step into the metrics of a logger.

    Args:
        prefix: first part of every name.
        log_filter: which names go to the loggers. None: all, within the limit.

    Raises:
        OptionError: ``log_filter`` is neither patterns nor a function.
    """

    def __init__(self, prefix: str = "te", log_filter: LogFilter = None) -> None:
        self._prefix = prefix
        self._wanted = _predicate(log_filter)
        self._said = False
        self._last: tuple[StepRecords | None, dict[str, float]] = (None, {})

    def __call__(self, records: StepRecords) -> dict[str, float]:
        """The metrics of a step: name -> value. Chosen once, however many loggers ask for them."""
        if self._last[0] is not records:
            self._last = (records, self._choose(records))
        return dict(self._last[1])

    def _choose(self, records: StepRecords) -> dict[str, float]:
        prefix = self._prefix_of(records)
        named = [(metric_name(prefix, row), row) for row in records]
        if self._wanted is not None:
            return {name: row.value for name, row in named if self._wanted(name)}
        if len(named) <= MOST_METRICS:
            return {name: row.value for name, row in named}
        if not self._said:
            self._said = True
            logger.warning(
                "A step has %d statistics; the trainer's loggers get the %d worst layers of each, and min, median and"
                " max over the layers. The statistics log has all. log_filter= chooses otherwise.",
                len(named),
                WORST_LAYERS,
            )
        return self._worst(named, prefix)

    def _prefix_of(self, records: StepRecords) -> str:
        return "/".join(part for part in (self._prefix, "local" if records.local else "") if part)

    def histograms(self, records: StepRecords) -> dict[str, Histogram]:
        """The histograms of a step that go to the loggers: name -> counts with their bins."""
        named = {
            metric_name(self._prefix_of(records), Row(layer, tensor, None, statistic, 0.0)): Histogram(
                counts, histogram_bins(statistic)
            )
            for (layer, tensor, statistic), counts in records.vectors.items()
        }
        return {name: counts for name, counts in named.items() if self._wanted is None or self._wanted(name)}

    def _worst(self, named: Iterable[tuple[str, Row]], prefix: str) -> dict[str, float]:
        groups: dict[tuple[str, str | None, str], list[tuple[str, Row]]] = {}
        for name, row in named:
            groups.setdefault((row.tensor, row.gemm, row.statistic), []).append((name, row))
        chosen: dict[str, float] = {}
        for (tensor, gemm, statistic), entries in groups.items():
            entries.sort(key=lambda entry: badness(statistic, entry[1].value), reverse=True)
            chosen.update((name, row.value) for name, row in entries[:WORST_LAYERS])
            values = [row.value for _, row in entries if not math.isnan(row.value)] or [math.nan]
            over_all = metric_name(prefix, Row("all", tensor, gemm, statistic, 0.0))
            chosen[f"{over_all}/min"] = min(values)
            chosen[f"{over_all}/median"] = statistics.median(values)
            chosen[f"{over_all}/max"] = max(values)
        return chosen


def _predicate(log_filter: LogFilter) -> Callable[[str], bool] | None:
    if log_filter is None or callable(log_filter):
        return log_filter
    patterns = [log_filter] if isinstance(log_filter, str) else log_filter
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            "log_filter takes patterns such as ['*/activation/*'] or a function of the metric's name, not"
            f" {log_filter!r}."
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
