"""Metrics of a step for a trainer's loggers: names, values, and the selection of series.

    selection = MetricSelection(prefix="te", log_filter=["*/activation/*", "*underflows%"])
    logger.log_metrics(selection(records), step=records.logging_step)

=====================================  ================================================================================
``te.<layer>/<tensor>/<statistic>``    a series of one layer
``te/worst_underflows%``               the worst value of the step, over all layers and tensors; also
                                       ``worst_overflows%``, ``worst_sqnr_db`` and ``nonfinite_num``
``te/findings``                        number of errors and warnings so far; also ``te/findings/<rule>``
``te/all/<tensor>/<statistic>/max``    over the layers, in steps with the statistic of all layers; also ``min`` and
                                       ``median``
=====================================  ================================================================================

TensorBoard and W&B group metrics by the part of the name before the first slash: each layer is a group, and the prefix
alone is the group of the whole model. If statistics are reduced over ranks, local values are
``te.local.<layer>/...``.

In a run with many series, only some series are logged, but those without gaps. A *family* is the set of series of a
statistic of a tensor, over the layers.

- Until the run has more than :data:`MOST_SERIES` series, all are logged.
- Then each family logs up to :data:`PLACES` layers: the worst, or the largest if the statistic has no worse direction.
  Series that were logged before stay.
- Up to :data:`LATER_PLACES` layers per family are added later, when their values are not finite.

A sink passes metrics to loggers; some loggers need a conversion of histograms::

    class Board(LoggerSink):                       # in your own loop: sinks=[Board(MetricSelection())]
        def log(self, metrics, histograms, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            for name, histogram in histograms.items():
                add_to_tensorboard(writer, name, histogram, step)
"""

from __future__ import annotations

import heapq
import logging
import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import numpy as np

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.sinks.step_records import Row, Sink, StepRecords, row_of
from te_precision_callbacks.statistics.series import Family, Series, SeriesTable, Summaries
from te_precision_callbacks.statistics.table import EXPONENT_EDGES

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

WORST_OF_ALL: Mapping[str, str] = {
    "underflows%": "worst_underflows%",
    "overflows%": "worst_overflows%",
    "sqnr_db": "worst_sqnr_db",
    "nonfinite_num": "nonfinite_num",
}
"""Statistic -> last part of a metric's name. The metric is its worst value over all layers, tensors, recipes, element
formats and directions."""

MOST_SERIES = 2_000
PLACES = 50
LATER_PLACES = 50


ByLayer = Mapping[str, float]
"""Layer -> value."""

_Place = TypeVar("_Place", bound=Hashable)


def comparable_values(records: StepRecords) -> Mapping[Family, ByLayer]:
    """Return the values of a step that count as worst values: without delayed scaling's first step."""
    if not records.unscaled:
        return records.families
    families = dict(records.families)
    for family, values in families.items():
        if family.is_of_delayed_scaling:
            families[family] = {layer: value for layer, value in values.items() if layer not in records.unscaled}
    return families


def worst_of_all(families: Mapping[Family, ByLayer]) -> dict[str, float]:
    """Return the metrics of :data:`WORST_OF_ALL`, given the result of :func:`comparable_values`."""
    worst: dict[str, tuple[float, float]] = {}  # badness and value
    for family, values in families.items():
        key = family.request and WORST_OF_ALL.get(family.request.statistic.name)
        if key:
            rated = [(family.badness(value), value) for value in values.values()]
            worst[key] = max([worst.get(key, (-math.inf, math.nan)), *rated])
    # An SQNR of inf is never the worst: the quantized tensor is exact.
    return {key: value for key, (badness, value) in worst.items() if badness > -math.inf}


class Worst(NamedTuple):
    """The worst value of a series, and the first debug iteration with this value."""

    row: Row
    iteration: int


class RunStatistics:
    """Keeps the last value of each series of a run, and the worst value of series with a worse direction."""

    def __init__(self, table: SeriesTable) -> None:
        self._table = table
        self._summaries = Summaries()

    def add(self, records: StepRecords) -> None:
        # After an interruption, the next step adds the new series.
        self._summaries.grow([series.family for series in self._table.since(len(self._summaries.rows))])
        first_step = np.zeros(len(records), bool)
        if records.unscaled:
            first_step[:] = [self._table[number].layer in records.unscaled for number in records.series.tolist()]
        iterations = np.full(len(records), records.iteration)
        self._summaries.rows["count"][records.series] = 1
        self._summaries.note_values(records.series, iterations, np.frombuffer(records.values), first_step)

    def last(self) -> Iterator[Row]:
        rows = self._summaries.rows
        for number in np.flatnonzero(rows["count"]).tolist():
            yield row_of(self._table[number], float(rows["latest"][number]))

    def worst(self) -> Iterator[Worst]:
        rows = self._summaries.rows
        for number in np.flatnonzero(rows["worst_at"] >= 0).tolist():
            if self._table[number].family.has_direction:
                yield Worst(row_of(self._table[number], float(rows["worst"][number])), int(rows["worst_at"][number]))


def worst_first(most: int, family: Family, values: Mapping[_Place, float]) -> list[_Place]:
    """Return the keys of the worst values, at most ``most``, worst first."""
    return heapq.nlargest(most, values, key=lambda place: family.badness(values[place]))


def _has_no_order(values: tuple[Family, ByLayer]) -> bool:
    family = values[0]
    return family.request is not None and family.request.statistic.is_count and not family.has_direction


LogFilter = str | Sequence[str] | Callable[[str], bool] | None
"""Patterns with ``*`` and ``?``, of which a metric name must match one; or a predicate of the name; or None."""


def metric_name(prefix: str, series: Series) -> str:
    """Return ``te.<layer>/<tensor>/<statistic>``, or with a GEMM ``te.<layer>/<tensor>/<gemm>/<statistic>``."""
    family = series.family
    group = ".".join(filter(None, (prefix, series.layer)))
    return "/".join(filter(None, (group, family.tensor, family.gemm, family.statistic)))


def overall_name(prefix: str, name: str) -> str:
    return "/".join(filter(None, (prefix, name)))


class MetricSelection:
    """Converts the records of a step to metrics for loggers; use one object per run.

    Args:
        prefix: first part of all names.
        log_filter: selects the names that go to the loggers. None for all, within the limits of this module.

    Raises:
        OptionError: ``log_filter`` is neither patterns nor a function.
    """

    def __init__(self, prefix: str = "te", log_filter: LogFilter = None) -> None:
        self._prefix = prefix
        self._wanted = _predicate(log_filter)
        self._warns_if_none = log_filter is not None and log_filter not in ([], ())
        self._crowded = False
        self._logged: dict[Family, set[str]] = {}
        self._notices = Notices()
        self._layers_of: dict[Family, int] = {}
        self._last: StepRecords | None = None
        self._metrics: dict[str, float] = {}
        self._histograms: dict[str, tuple[float, ...]] = {}

    def __call__(self, records: StepRecords) -> dict[str, float]:
        self._choose(records)
        return dict(self._metrics)

    def histograms(self, records: StepRecords) -> dict[str, tuple[float, ...]]:
        """Return the histograms of a step for the loggers: name -> counts by exponent."""
        self._choose(records)
        return self._histograms

    def _choose(self, records: StepRecords) -> None:
        if self._last is records:
            return
        comparable = comparable_values(records)
        prefix = ".".join(filter(None, (self._prefix, "local" if records.local else "")))
        metrics = dict(self._overall(records.families, comparable, prefix))
        metrics[overall_name(prefix, "findings")] = float(sum(records.findings.values()))
        for rule, count in records.findings.items():
            metrics[overall_name(prefix, f"findings/{rule}")] = float(count)
        if self._wanted is None:
            self._take_series(records, comparable)
        metrics |= self._named(prefix, records.table, zip(records.series.tolist(), records.values, strict=True))
        self._histograms = self._filtered(self._named(prefix, records.table, records.histograms.items()))
        self._metrics = self._filtered(metrics)
        self._last = records
        if (
            self._warns_if_none
            and len(records)
            and self._notices.first("the result of log_filter=")
            and not self._metrics
        ):
            logger.warning(
                "log_filter= matches none of the %d metrics of iteration %d, such as %r, so the loggers get none. To"
                " turn metrics off, set log_filter=[].",
                len(records),
                records.iteration,
                metric_name(prefix, records.table[int(records.series[0])]),
            )

    def _named(self, prefix: str, table: SeriesTable, values: Iterable[tuple[int, ValueT]]) -> dict[str, ValueT]:
        """Return the values of the chosen series, by name; with a filter, of all series."""
        named = {}
        for number, value in values:
            series = table[number]
            if self._wanted is not None or series.layer in self._logged.get(series.family, ()):
                named[metric_name(prefix, series)] = value
        return named

    def _filtered(self, named: dict[str, ValueT]) -> dict[str, ValueT]:
        is_wanted = self._wanted
        if is_wanted is None:
            return named
        return {name: value for name, value in named.items() if is_wanted(name)}

    def _take_series(self, records: StepRecords, comparable: Mapping[Family, ByLayer]) -> None:
        """Choose among the series of a step."""
        histograms: dict[Family, dict[str, float]] = {}
        for number in records.histograms:
            series = records.table[number]
            histograms.setdefault(series.family, {})[series.layer] = 0.0
        if not self._crowded:
            logged = dict(self._logged)
            for family, values in {**records.families, **histograms}.items():
                logged[family] = self._logged.get(family, set()) | values.keys()
            if sum(map(len, logged.values())) <= MOST_SERIES:
                self._logged = logged
                return
            self._crowded = True
            logger.warning(
                "More than %d series: for each statistic, the trainer's loggers get only known series, the %d worst"
                " layers, up to %d that get worse later, and min, median and max over layers. The statistics log has"
                " all. Choose with log_filter=.",
                MOST_SERIES,
                PLACES,
                LATER_PLACES,
            )
        # Counts and histograms have no worst layers: use the layers that other statistics of the tensor selected.
        for family, values in sorted({**comparable, **histograms}.items(), key=_has_no_order):
            layers = self._logged.setdefault(family, set())
            if _has_no_order((family, values)):
                chosen_series = (chosen for other, chosen in self._logged.items() if other.tensor == family.tensor)
                worst = sorted(values, key=set().union(*chosen_series).__contains__, reverse=True)
            else:
                worst = worst_first(PLACES, family, values)
            for layer in worst:
                is_lost = family.badness(values[layer]) == math.inf
                if len(layers) < PLACES + is_lost * LATER_PLACES:
                    layers.add(layer)

    def _overall(
        self, families: Mapping[Family, ByLayer], comparable: Mapping[Family, ByLayer], prefix: str
    ) -> Iterator[tuple[str, float]]:
        for key, value in worst_of_all(comparable).items():
            yield overall_name(prefix, key), value
        for family, by_layer in families.items():
            values = [value for layer, value in by_layer.items() if layer]
            # With different freq, some steps have only some of the layers, which are not "all".
            self._layers_of[family] = max(self._layers_of.get(family, 2), len(values))
            if len(values) < self._layers_of[family]:
                continue
            numbers = [value for value in values if not math.isnan(value)] or [math.nan]
            name = overall_name(prefix, metric_name("all", Series("", family)))
            for part, summarize in (("min", min), ("median", statistics.median), ("max", max)):
                yield f"{name}/{part}", summarize(numbers)


def _predicate(log_filter: LogFilter) -> Callable[[str], bool] | None:
    if log_filter is None or callable(log_filter):
        return log_filter
    patterns = [log_filter] if isinstance(log_filter, str) else log_filter
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            "log_filter= takes patterns such as ['*/activation/*'] or a function of the metric's name, not"
            f" {log_filter!r}."
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def names_for_mlflow(metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Rename metrics to names that MLflow accepts: ``_pct`` for ``%``, ``_`` for other invalid characters."""
    return {_NOT_IN_MLFLOW.sub("_", name.replace("%", "_pct")): value for name, value in metrics.items()}


_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
"""Characters that MLflow 3.17 rejects (``utils/validation.py``)."""


def _filled(counts: Sequence[float]) -> tuple[list[float], Sequence[float]]:
    """Return the counts from the first to the last non-empty bin, and the edges of these bins."""
    filled_bins = [bin_number for bin_number, count in enumerate(counts) if count] or [0]
    first = filled_bins[0]
    end = filled_bins[-1] + 1
    return list(map(float, counts[first:end])), EXPONENT_EDGES[first : end + 1]


def add_to_tensorboard(writer: Any, name: str, counts: Sequence[float], step: int) -> None:
    """Log a histogram of exponents (powers of two) to TensorBoard.

    Args:
        writer: a ``SummaryWriter`` of ``torch.utils.tensorboard`` or tensorboardX.
        counts: counts by exponent.
    """
    filled, edges = _filled(counts)
    writer.add_histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=sum(filled),
        sum=sum(edge * count for edge, count in zip(edges[:-1], filled, strict=True)),
        sum_squares=sum(edge**2 * count for edge, count in zip(edges[:-1], filled, strict=True)),
        bucket_limits=edges[1:],
        bucket_counts=filled,
        global_step=step,
    )


def wandb_histogram(counts: Sequence[float]) -> Any:
    """Convert counts by exponent to a ``wandb.Histogram`` over powers of two."""
    import wandb

    filled, edges = _filled(counts)
    return wandb.Histogram(np_histogram=(np.array(filled), np.array(edges)))


class LoggerSink(Sink):
    """Passes the metrics and histograms of a step to :meth:`log`; all sinks of a run may share ``select``."""

    def __init__(self, select: MetricSelection) -> None:
        self._select = select

    def write(self, records: StepRecords) -> None:
        metrics = self._select(records)
        histograms = self._select.histograms(records)
        if metrics or histograms:
            self.log(metrics, histograms, records.logging_step)

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log the metrics of a step.

        Args:
            metrics: name -> value; empty if the step has only histograms.
            histograms: name -> counts by exponent, for :func:`add_to_tensorboard` and :func:`wandb_histogram`.
            step: the logging step of the trainer's own metrics of the batch.
        """
        raise NotImplementedError
