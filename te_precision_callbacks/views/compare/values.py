"""The recorded values of the sides of a comparison, and their join by series and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.result import ComparisonError


class Numbers(NamedTuple):
    """The values of some series, sorted by series and iteration, [n]; ``series`` are indices in the request."""

    series: Ints
    iterations: Ints
    values: Floats


class Joined(NamedTuple):
    """The values of two sides at their common steps, sorted by series and iteration, [n]."""

    series: Ints
    iterations: Ints
    a: Floats
    b: Floats


def join(a: Numbers, b: Numbers) -> Joined:
    stride = 1 + max(a.iterations.max(initial=0), b.iterations.max(initial=0))
    keys_a = a.series * stride + a.iterations
    keys_b = b.series * stride + b.iterations
    _, rows_a, rows_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    return Joined(a.series[rows_a], a.iterations[rows_a], a.values[rows_a], b.values[rows_b])


@dataclass(frozen=True)
class Side:
    """One side of a comparison. ``subjects``: subject -> its series; None for a metric of the trainer."""

    run: RecordedRun
    name: str
    subjects: Mapping[Subject, int | None]

    @classmethod
    def of(cls, run: RecordedRun, name: str) -> Side:
        subjects: dict[Subject, int | None] = {}
        for number, subject in enumerate(run.subjects):
            request = logged_request(subject.statistic) if subject.tensor else None
            if request is None or not request.statistic.is_histogram:
                subjects[subject] = number
        subjects |= {Subject("", "", "", "", name, None): None for name in run.metrics}
        if not subjects:
            raise ComparisonError(f"{name} has no statistics and no loss yet.{run.notes_sentence}")
        return cls(run, name, subjects)

    @cached_property
    def layers(self) -> dict[tuple[str, str], None]:
        """Scope and name of the layers with statistics, in the order of the records."""
        return dict.fromkeys((subject.scope, subject.layer) for subject in self.subjects if subject.layer)

    def place_in_records(self, subject: Subject) -> float:
        number = self.subjects[subject]
        if number is None:
            return math.inf
        return number

    def count(self, subject: Subject) -> int:
        number = self.subjects[subject]
        if number is None:
            return len(self.run.metrics[subject.statistic].values)
        return int(self.run.series["count"][number].as_py())

    def read(self, subjects: Sequence[Subject]) -> Numbers:
        """Read the values of subjects that this side has."""
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
        index_of: dict[int, int] = {}
        for index, subject in enumerate(subjects):
            number = self.subjects.get(subject)
            if number is not None:
                index_of[number] = index
            elif subject in self.subjects:
                iterations, values = self.run.metrics[subject.statistic]
                parts.append((np.full(len(values), index), iterations, values))
        if index_of:
            table = self.run.values(index_of)
            indices = np.zeros(max(index_of) + 1, np.int64)
            indices[list(index_of)] = list(index_of.values())
            series = indices[table["series"].to_numpy()]
            parts.append((series, table["iteration"].to_numpy(), table["value"].to_numpy()))
        series, iterations, values = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((iterations, series))
        return Numbers(series[order], iterations[order], values[order])
