"""What is compared: a run, a rank of a run, or a run from a step on, as series of numbers with equal subjects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.tables import EXTREME
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.errors import ComparisonError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def family(subject: Subject) -> tuple[str, str, str]:
    """A key that is equal for one statistic of one tensor, in any layer."""
    return subject.tensor, subject.gemm, subject.statistic


class Numbers(NamedTuple):
    """The values of some series, by series and iteration; of each iteration of a series there is one.

    Attributes:
        series: [n], as numbered by who asked for them.
        iterations: [n].
        values: [n].
    """

    series: Ints
    iterations: Ints
    values: Floats


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        run: whose numbers they are.
        name: what it is called.
        series: subject -> the series' number in the run.
        scalars: subject -> the iterations and values of a number of the trainer.
        since: the first iteration; the steps from it on are numbered from 0. None: all of them, with their own numbers.
        steps: how many steps of each series.
        behind: how many steps of each series are skipped.
    """

    run: RecordedRun
    name: str
    series: Mapping[Subject, int]
    scalars: Mapping[Subject, tuple[Ints, Floats]] = field(default_factory=dict)
    since: int | None = None
    steps: int = 0
    behind: int = 0

    @property
    def subjects(self) -> list[Subject]:
        """All that it has numbers of."""
        return [*self.series, *self.scalars]

    def count(self, subject: Subject) -> int:
        """How many values a subject has in the whole run."""
        if subject in self.scalars:
            return len(self.scalars[subject][0])
        return self._counts[self.series[subject]]

    @cached_property
    def _counts(self) -> Sequence[int]:
        found: Sequence[int] = self.run.series["count"].to_pylist()
        return found

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
            place[wanted] = [number for number, found in enumerate(numbers) if found >= 0]
            parts.append((place[table["series"].to_numpy()], table["iteration"].to_numpy(), table["value"].to_numpy()))
        for number, subject in enumerate(subjects):
            if subject in self.scalars:
                iterations, values = self.scalars[subject]
                parts.append((np.full(len(values), number, np.int64), iterations, values))
        if not parts:
            return Numbers(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        series, iterations, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return self._from_since(_in_order(series, iterations.astype(np.int64, copy=False), values))

    def _from_since(self, numbers: Numbers) -> Numbers:
        if self.since is None:
            return numbers
        kept = numbers.iterations >= self.since
        series, values = numbers.series[kept], numbers.values[kept]
        places = np.arange(len(series)) - np.searchsorted(series, series) - self.behind
        chosen = (places >= 0) & (places < self.steps)
        return Numbers(series[chosen], places[chosen], values[chosen])


def _in_order(series: Ints, iterations: Ints, values: Floats) -> Numbers:
    """By series and iteration, without a second value of an iteration."""
    later = (series[1:] > series[:-1]) | ((series[1:] == series[:-1]) & (iterations[1:] > iterations[:-1]))
    if not later.all():
        order = np.lexsort((iterations, series))
        series, iterations, values = series[order], iterations[order], values[order]
        last = np.append((series[1:] != series[:-1]) | (iterations[1:] != iterations[:-1]), True)
        series, iterations, values = series[last], iterations[last], values[last]
    return Numbers(series, iterations, values)


def side_of_run(run: RecordedRun, name: str) -> Side:
    """A whole run, with the trainer's numbers.

    Raises:
        ComparisonError: it has no numbers at all.
    """
    series = {subject: number for number, subject in _subjects(run)}
    scalars = _scalars(run)
    if not series and not scalars:
        raise ComparisonError(f"{name} has no numbers yet: no statistic was recorded, and no loss.{run.notes_in_words}")
    return Side(run, name, series, scalars)


def side_of_step(run: RecordedRun, since: int, steps: int, *, behind: bool = False) -> Side:
    """The first steps from one on; or those right behind them.

    Raises:
        ComparisonError: there is none.
    """
    last = run.series["last"].to_pylist()
    series = {each: number for number, each in _subjects(run) if last[number] >= since}
    scalars = {each: found for each, found in _scalars(run).items() if found[0][-1] >= since}
    if not series and not scalars:
        ended = f"; its last one is {max(last)}" if last else ""
        raise ComparisonError(f"{run.path} has no numbers from step {since} on{ended}.{run.notes_in_words}")
    name = f"the {steps} steps {'behind those ' if behind else ''}from step {since} on"
    return Side(run, name, series, scalars, since, steps, steps if behind else 0)


def _subjects(run: RecordedRun) -> Iterator[tuple[int, Subject]]:
    """The number and the subject of each series, without histograms."""
    for number, subject in enumerate(run.subjects):
        request = logged_request(subject.statistic) if subject.tensor else None
        if request is None or request.statistic.bins is None:
            yield number, subject


def _scalars(run: RecordedRun) -> dict[Subject, tuple[Ints, Floats]]:
    found = {}
    for name, (iterations, values) in run.metrics.items():
        numbers = _in_order(np.zeros(len(values), np.int64), iterations, values)
        found[Subject("", "", "", "", name, None)] = numbers.iterations, numbers.values
    return found
