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

import logging
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.sinks.step_records import Row, Sink, StepRecords, row_of
from te_precision_callbacks.sinks.worst import ByLayer, comparable_values, worst_first, worst_of_all
from te_precision_callbacks.statistics.series import Family, Series
from te_precision_callbacks.statistics.table import EXPONENT_EDGES

logger = logging.getLogger(__name__)


MOST_SERIES = 2_000
PLACES = 50
LATER_PLACES = 50


class SeriesChoice:
    """Selects the series of a run that go to loggers; ``crowded`` after more than :data:`MOST_SERIES` series."""

    def __init__(self) -> None:
        self.crowded = False
        self._logged: dict[Family, set[str]] = {}
        self._count = 0

    def take(self, families: Mapping[Family, ByLayer], comparable: Mapping[Family, ByLayer]) -> None:
        """Choose among the series of a step.

        Args:
            families: the values of the step; for histograms, any value.
            comparable: the result of :func:`~te_precision_callbacks.sinks.worst.comparable_values`.
        """
        new = {family: values.keys() - self.logged_layers(family) for family, values in families.items()}
        if not self.crowded:
            self._count += sum(map(len, new.values()))
            self.crowded = self._count > MOST_SERIES
        if not self.crowded:
            for family, layers in new.items():
                self._logged.setdefault(family, set()).update(layers)
            return
        # Counts and histograms have no worst layers: use the layers that other statistics of the tensor selected.
        for family in sorted(families, key=_has_no_order):
            if not new[family]:
                continue
            values = comparable[family]
            if _has_no_order(family):
                self._add(family, self._most_logged(family.tensor, values), PLACES)
                continue
            worst = worst_first(PLACES, family, values)
            self._add(family, worst, PLACES)
            lost = [layer for layer in worst if family.badness(values[layer]) == math.inf]
            self._add(family, lost, PLACES + LATER_PLACES)

    def logged_layers(self, family: Family) -> Set[str]:
        return self._logged.get(family, frozenset())

    def _add(self, family: Family, layers: Iterable[str], most: int) -> None:
        logged = self._logged.setdefault(family, set())
        for layer in layers:
            if len(logged) < most:
                logged.add(layer)

    def _most_logged(self, tensor: str, layers: Iterable[str]) -> list[str]:
        logged: Counter[str] = Counter()
        for family, known in self._logged.items():
            if family.tensor == tensor:
                logged.update(known)
        return sorted(layers, key=lambda layer: -logged[layer])


def _has_no_order(family: Family) -> bool:
    return family.request is not None and family.request.statistic.is_count and not family.has_direction


LogFilter = str | Sequence[str] | Callable[[str], bool] | None
"""Patterns with ``*`` and ``?``, of which a metric name must match one; or a predicate of the name; or None."""


def metric_name(prefix: str, row: Row) -> str:
    """Return ``te.<layer>/<tensor>/<statistic>``, or with a GEMM ``te.<layer>/<tensor>/<gemm>/<statistic>``."""
    group = f"{prefix}.{row.layer}" if prefix and row.layer else prefix or row.layer
    return "/".join(filter(None, (group, row.tensor, row.gemm, row.statistic)))


def series_name(prefix: str, series: Series) -> str:
    return metric_name(prefix, row_of(series, 0.0))


def _histograms(records: StepRecords) -> Iterator[tuple[Series, tuple[float, ...]]]:
    for number, counts in records.histograms.items():
        yield records.table[number], counts


def overall_name(prefix: str, name: str) -> str:
    if prefix:
        return f"{prefix}/{name}"
    return name


def prefix_of(prefix: str, *, local: bool) -> str:
    """Return the first part of metric names: ``te``, or ``te.local`` for local values."""
    return ".".join(filter(None, (prefix, "local" if local else "")))


class MetricSelection:
    """Converts the records of a step to metrics for loggers; use one object per run.

    Args:
        prefix: first part of all names.
        log_filter: selects the names that go to the loggers. None for all, within the limits of :class:`SeriesChoice`.

    Raises:
        OptionError: ``log_filter`` is neither patterns nor a function.
    """

    def __init__(self, prefix: str = "te", log_filter: LogFilter = None) -> None:
        self._prefix = prefix
        self._wanted = _predicate(log_filter)
        self._says_if_idle = log_filter not in ([], ())
        self._series = SeriesChoice()
        self._notices = Notices()
        self._layers_of: dict[Family, int] = {}
        self._last: tuple[StepRecords | None, dict[str, float]] = (None, {})

    def __call__(self, records: StepRecords) -> dict[str, float]:
        return dict(self._chosen(records))

    def histograms(self, records: StepRecords) -> dict[str, tuple[float, ...]]:
        """Return the histograms of a step for the loggers: name -> counts by exponent."""
        self._chosen(records)
        prefix = prefix_of(self._prefix, local=records.local)
        chosen = {}
        for series, counts in _histograms(records):
            name = series_name(prefix, series)
            is_logged = self._wanted is None and series.layer in self._series.logged_layers(series.family)
            if is_logged or (self._wanted is not None and self._wanted(name)):
                chosen[name] = counts
        return chosen

    def _chosen(self, records: StepRecords) -> dict[str, float]:
        if self._last[0] is not records:
            self._last = (records, self._choose(records))
        return self._last[1]

    def _choose(self, records: StepRecords) -> dict[str, float]:
        families = records.families
        comparable = comparable_values(records)
        prefix = prefix_of(self._prefix, local=records.local)
        overall = dict(self._overall(families, comparable, prefix))
        overall[overall_name(prefix, "findings")] = float(sum(records.findings.values()))
        for rule, count in records.findings.items():
            overall[overall_name(prefix, f"findings/{rule}")] = float(count)
        if self._wanted is not None:
            table = records.table
            numbers = records.series.tolist()
            named = {
                series_name(prefix, table[number]): value for number, value in zip(numbers, records.values, strict=True)
            }
            chosen = {name: value for name, value in {**overall, **named}.items() if self._wanted(name)}
            first = bool(named) and self._says_if_idle and self._notices.first("the result of log_filter=")
            if first and not chosen:
                logger.warning(
                    "log_filter= matches none of the %d metrics of iteration %d, such as %r, so the loggers get"
                    " none. To turn metrics off, set log_filter=[].",
                    len(named),
                    records.iteration,
                    next(iter(named)),
                )
            return chosen
        histogram_families: dict[Family, dict[str, float]] = {}
        for series, _ in _histograms(records):
            histogram_families.setdefault(series.family, {})[series.layer] = 0.0
        self._series.take({**families, **histogram_families}, {**comparable, **histogram_families})
        if self._series.crowded and self._notices.first("crowded"):
            logger.warning(
                "More than %d series: for each statistic, the trainer's loggers get only known series, the %d worst"
                " layers, up to %d that get worse later, and min, median and max over layers. The statistics log has"
                " all. Choose with log_filter=.",
                MOST_SERIES,
                PLACES,
                LATER_PLACES,
            )
        for family, values in families.items():
            logged = self._series.logged_layers(family)
            for layer, value in values.items():
                if layer in logged:
                    overall[series_name(prefix, Series(layer, family))] = value
        return overall

    def _overall(
        self, families: Mapping[Family, ByLayer], comparable: Mapping[Family, ByLayer], prefix: str
    ) -> Iterator[tuple[str, float]]:
        worst = worst_of_all(comparable)
        # In the first step of delayed scaling, shares are not meaningful: log 0, so that alerts have a value.
        for key in worst_of_all(families):
            if key.endswith("%") and key not in worst:
                yield overall_name(prefix, key), 0.0
        for key, (_, value) in worst.items():
            yield overall_name(prefix, key), value
        for family, by_layer in families.items():
            values = [value for layer, value in by_layer.items() if layer]
            # With different freq, some steps have only some of the layers, which are not "all".
            self._layers_of[family] = max(self._layers_of.get(family, 2), len(values))
            if len(values) < self._layers_of[family]:
                continue
            known = [value for value in values if not math.isnan(value)] or [math.nan]
            name = overall_name(prefix, series_name("all", Series("", family)))
            yield f"{name}/min", min(known)
            yield f"{name}/median", statistics.median(known)
            yield f"{name}/max", max(known)


def _predicate(log_filter: LogFilter) -> Callable[[str], bool] | None:
    if log_filter is None or callable(log_filter):
        return log_filter
    patterns = log_filter
    if isinstance(log_filter, str):
        patterns = [log_filter]
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            "log_filter= takes patterns such as ['*/activation/*'] or a function of the metric's name, not"
            f" {log_filter!r}."
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


ValueT = TypeVar("ValueT")


def names_for_mlflow(metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Rename metrics to names that MLflow accepts: ``_pct`` for ``%``, ``_`` for other invalid characters."""
    return {_NOT_IN_MLFLOW.sub("_", name.replace("%", "_pct")): value for name, value in metrics.items()}


_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
"""Characters that MLflow 3.17 rejects (``utils/validation.py``)."""


def _filled(counts: Sequence[float]) -> tuple[list[float], Sequence[float]]:
    """Return the counts from the first to the last non-empty bin, and the edges of these bins."""
    places = [place for place, count in enumerate(counts) if count] or [0]
    first = places[0]
    end = places[-1] + 1
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
    import numpy
    import wandb

    filled, edges = _filled(counts)
    return wandb.Histogram(np_histogram=(numpy.array(filled), numpy.array(edges)))


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
