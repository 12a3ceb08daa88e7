"""The sides of a comparison: series of values with equal subjects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.tables import EXTREME
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.result import ComparisonError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def family(subject: Subject) -> tuple[str, str, str]:
    return subject.tensor, subject.gemm, subject.statistic


class Numbers(NamedTuple):
    """The values of some series, by series and iteration: [n], with series as places in the request."""

    series: Ints
    iterations: Ints
    values: Floats


@dataclass(frozen=True)
class Side:
    """One side of a comparison. ``scalars``: subject -> the iterations and values of a metric of the trainer."""

    run: RecordedRun
    name: str
    series: Mapping[Subject, int]
    scalars: Mapping[Subject, tuple[Ints, Floats]] = field(default_factory=dict)

    @property
    def subjects(self) -> list[Subject]:
        return [*self.series, *self.scalars]

    def count(self, subject: Subject) -> int:
        if subject in self.scalars:
            return len(self.scalars[subject][0])
        return int(self.run.series["count"][self.series[subject]].as_py())

    def read(self, subjects: Sequence[Subject]) -> Numbers:
        """The values of some subjects, which are numbered by their places in the list; others are left out."""
        numbers = [self.series.get(subject, -1) for subject in subjects]
        wanted = [number for number in numbers if number >= 0]
        parts = []
        if wanted:
            table = self.run.values(wanted)
            if self.run.thinned:  # an extreme says nothing of the steps around it, of which the other side may have all
                table = table.filter(pa.array(table["flags"].fill_null(0).to_numpy() & EXTREME == 0))
            place = np.full(max(wanted) + 1, -1, np.int64)
            place[wanted] = [number for number, series_number in enumerate(numbers) if series_number >= 0]
            parts.append((place[table["series"].to_numpy()], table["iteration"].to_numpy(), table["value"].to_numpy()))
        for number, subject in enumerate(subjects):
            if subject in self.scalars:
                iterations, values = self.scalars[subject]
                parts.append((np.full(len(values), number, np.int64), iterations, values))
        if not parts:
            return Numbers(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        series, iterations, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return _in_order(series, iterations.astype(np.int64, copy=False), values)


def _in_order(series: Ints, iterations: Ints, values: Floats) -> Numbers:
    later = (series[1:] > series[:-1]) | ((series[1:] == series[:-1]) & (iterations[1:] > iterations[:-1]))
    if not later.all():
        order = np.lexsort((iterations, series))
        series, iterations, values = series[order], iterations[order], values[order]
        last = np.append((series[1:] != series[:-1]) | (iterations[1:] != iterations[:-1]), True)
        series, iterations, values = series[last], iterations[last], values[last]
    return Numbers(series, iterations, values)


def side_of_run(run: RecordedRun, name: str) -> Side:
    series, scalars = {}, {}
    for number, subject in enumerate(run.subjects):
        request = logged_request(subject.statistic) if subject.tensor else None
        if request is None or not request.statistic.is_histogram:  # without histograms
            series[subject] = number
    for metric, (iterations, values) in run.metrics.items():
        numbers = _in_order(np.zeros(len(values), np.int64), iterations, values)
        scalars[Subject("", "", "", "", metric, None)] = numbers.iterations, numbers.values
    if not series and not scalars:
        raise ComparisonError(f"{name} has no numbers yet: no statistic was recorded, and no loss.{run.notes_in_words}")
    return Side(run, name, series, scalars)
