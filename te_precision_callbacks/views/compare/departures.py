"""Search for departures: series that differ by more than noise, since when, and how far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.compare.noise import (
    MAGNITUDE,
    NO_NUMBER,
    Families,
    Joined,
    NoiseFloor,
    Side,
    family,
    join,
)
from te_precision_callbacks.views.compare.result import StatisticDeparture
from te_precision_callbacks.views.report.families import pieces

_PART_OF_BOUND = 0.5
_LEAST_BEGIN = 4.0
"""A difference that has passed the bound began where it passed half of it, which is at least so many spreads."""


class ComparedValues(NamedTuple):
    """The values of some series on both sides.

    Attributes:
        subjects: of the series.
        families: their scales.
        joined: the values, [n]; its series are indices in ``subjects``.
        difference: [n]: on the scale.
        spread: [n]: the spread of the noise; nan without a noise floor.
        limit: [n]: the smallest difference that counts.
        begins, lengths: the indices of the first values of lasting differences, and their numbers of values.
    """

    subjects: Sequence[Subject]
    families: Families
    joined: Joined
    difference: Floats
    spread: Floats
    limit: Floats
    begins: Ints
    lengths: Ints


@dataclass
class Search:
    """The search for lasting differences, with its counts.

    Attributes:
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        show: receives all compared values, some series at a time.
        without_steps: the number of series without a common step.
        without_noise: the number of series without a baseline.
        all_equal: whether all values that pair are equal, to the last bit.
        iterations: the common iterations, in order.
    """

    a: Side
    b: Side
    noise: Sequence[Side]
    lasting: int
    show: Callable[[ComparedValues], None] | None = None
    without_steps: int = 0
    without_noise: int = 0
    all_equal: bool = True
    iterations: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def run(self, subjects: Sequence[Subject]) -> list[tuple[Subject, StatisticDeparture]]:
        """Return the series with lasting differences, in the order of A's records."""
        ordered = sorted(subjects, key=family)
        counts = np.array([self.a.count(subject) for subject in ordered], np.int64)
        departures: list[tuple[Subject, StatisticDeparture]] = []
        for piece in pieces(counts):
            values = self._compare(ordered[piece])
            if self.show is not None:
                self.show(values)
            departures += _describe_departures(values)
        return sorted(departures, key=lambda departed: self.a.place_in_records(departed[0]))

    def _compare(self, subjects: Sequence[Subject]) -> ComparedValues:
        sides = [side.read(subjects) for side in (self.a, self.b, *self.noise)]
        joined = join(sides[0], sides[1])
        series, iterations, a, b = joined
        self.iterations = np.union1d(self.iterations, iterations)
        self.without_steps += len(subjects) - len(np.unique(series))
        self.all_equal &= np.array_equal(a, b, equal_nan=True)
        families = Families.of(subjects, sides)
        noise_pairs = [join(*pair) for pair in itertools.combinations((sides[0], *sides[2:]), 2)]
        floor = NoiseFloor.measure(noise_pairs, families, self.lasting)
        if self.noise:
            self.without_noise += int(np.isnan(floor.ratio).sum())
        difference = families.differences(joined)
        spread = floor.spread(series, iterations)
        bound = floor.bound[families.number[series]]
        limit = np.where(np.isnan(spread), families.bounds(series), bound * spread)
        starts, lengths = _stretches(series, difference, limit)
        starts = starts[lengths >= np.minimum(self.lasting, np.bincount(series)[series[starts]])]
        starts = starts[np.unique(series[starts], return_index=True)[1]]
        # Extend the difference back to the beginning, by the lower threshold.
        lower = np.fmin(limit, np.maximum(_LEAST_BEGIN, _PART_OF_BOUND * bound) * spread)
        begins, lengths = _stretches(series, difference, lower)
        containing = np.searchsorted(begins, starts, "right") - 1
        return ComparedValues(
            subjects, families, joined, difference, spread, limit, begins[containing], lengths[containing]
        )


def _describe_departures(values: ComparedValues) -> Iterator[tuple[Subject, StatisticDeparture]]:
    series, iterations, of_a, of_b = values.joined
    for begin, length in zip(values.begins.tolist(), values.lengths.tolist(), strict=True):
        number = series[begin]
        subject = values.subjects[number]
        scale = values.families.scales[values.families.number[number]]
        end = begin + length
        a, b, difference = (
            float(np.sort(column[begin:end])[length // 2]) for column in (of_a, of_b, values.difference)
        )
        if scale is MAGNITUDE and a < 0 and b < 0:  # the smaller magnitude is the larger value
            difference = -difference
        spread = float(values.spread[begin])
        is_first = begin == 0 or series[begin - 1] != number
        yield (
            subject,
            StatisticDeparture(
                statistic=subject.statistic,
                gemm=subject.gemm,
                iteration=int(iterations[begin]),
                until=int(iterations[end - 1]),
                steps=length,
                to_the_end=bool((series[end : end + 1] != number).all()),
                a=a,
                b=b,
                difference=difference,
                unit=scale.unit,
                spread=None if math.isnan(spread) else spread,
                bound=float(values.limit[begin]),
                since=0 if is_first else int(iterations[begin - 1]) + 1,
            ),
        )


def _stretches(series: Ints, difference: Floats, limit: Floats) -> tuple[Ints, Ints]:
    """Find stretches of a series with differences beyond a limit, of one sign; returns their starts and lengths. Inf
    and nan continue the stretch before them.
    """
    size = np.abs(difference)
    state: npt.NDArray[np.int8] = np.where(size > limit, np.sign(difference), 0).astype(np.int8)
    new_series = np.append(True, series[1:] != series[:-1])[: len(state)]
    after_none = np.append(True, state[:-1] == 0)[: len(state)]
    own_state = new_series | after_none | (size <= NO_NUMBER)
    state = state[np.maximum.accumulate(np.where(own_state, np.arange(len(state)), 0))]
    starts = np.flatnonzero(new_series | np.append(True, state[1:] != state[:-1])[: len(state)])
    lengths = np.diff(np.append(starts, len(state)))
    beyond = state[starts] != 0
    return starts[beyond], lengths[beyond]
