"""Search for departures: series that differ by more than noise, since when, and how far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.compare.noise import (
    LEVEL,
    MAGNITUDE,
    NO_NUMBER,
    NoiseFloor,
    NoiseScale,
    mean_magnitudes,
    part_edges,
    scale_of,
    smallest_magnitudes,
)
from te_precision_callbacks.views.compare.result import StatisticDeparture
from te_precision_callbacks.views.compare.values import Joined, Side, join
from te_precision_callbacks.views.report.overview import pieces

_PART_OF_BOUND = 0.5
_LEAST_BEGIN = 4.0
"""A difference that has passed the bound began where it passed half of it, which is at least so many spreads."""


def family(subject: Subject) -> tuple[str, str, str]:
    return subject.tensor, subject.gemm, subject.statistic


class SeriesDeparture(NamedTuple):
    """A series with a lasting difference. ``since``: its possible beginning, right after the last value without it."""

    subject: Subject
    since: int
    departure: StatisticDeparture


class ComparedValues(NamedTuple):
    """The values of a family on both sides, sorted by series and iteration.

    Attributes:
        series, iterations: [n]; ``series`` are indices in ``subjects``.
        a, b: [n].
        difference: [n]: on the scale.
        spread: [n]: the spread of the noise; nan without a noise floor.
        limit: [n]: the smallest difference that counts.
        below, above: [n]: the nearest values to a that count as different; a itself if it is not finite.
        begins, lengths: the indices of the first values of lasting differences, and their numbers of values.
    """

    subjects: Sequence[Subject]
    series: Ints
    iterations: Ints
    a: Floats
    b: Floats
    difference: Floats
    spread: Floats
    limit: Floats
    below: Floats
    above: Floats
    begins: Ints
    lengths: Ints


@dataclass
class Search:
    """The search for lasting differences, with its counts.

    Attributes:
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        show: receives all compared values, family by family.
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

    def run(self, subjects: Sequence[Subject]) -> list[SeriesDeparture]:
        """Return the lasting differences, in the order of A's records."""
        ordered = sorted(subjects, key=family)
        counts = np.array([self.a.count(subject) for subject in ordered], np.int64)
        departures: list[SeriesDeparture] = []
        for piece in pieces(counts):
            departures += self._search_piece(ordered[piece])
        return sorted(departures, key=lambda departed: self.a.place_in_records(departed.subject))

    def _search_piece(self, subjects: Sequence[Subject]) -> Iterator[SeriesDeparture]:
        a, b, *noise = (side.read(subjects) for side in (self.a, self.b, *self.noise))
        joined = join(a, b)
        self.iterations = np.union1d(self.iterations, joined.iterations)
        self.without_steps += len(subjects) - len(np.unique(joined.series))
        self.all_equal &= np.array_equal(joined.a, joined.b, equal_nan=True)
        noise_pairs = [join(*pair) for pair in itertools.combinations((a, *noise), 2)]
        noise_steps = np.unique(np.concatenate([joined.iterations[:0], *(pair.iterations for pair in noise_pairs)]))
        edges = part_edges(noise_steps, self.lasting) if len(noise_steps) else noise_steps
        smallest = smallest_magnitudes((a, b, *noise), len(subjects))
        means = mean_magnitudes((a, b, *noise), len(subjects))
        first = 0
        for (tensor, _, statistic), members in itertools.groupby(subjects, key=family):
            scale = scale_of(tensor, statistic)
            family_subjects = list(members)
            end = first + len(family_subjects)
            magnitudes = (means if scale is LEVEL else smallest)[first:end]
            own_noise = [pair.of_series(first, end) for pair in noise_pairs]
            floor = NoiseFloor.measure(own_noise, scale, magnitudes, edges, self.lasting)
            if self.noise:
                self.without_noise += int(np.isnan(floor.ratio).sum())
            values = self._compare(family_subjects, joined.of_series(first, end), scale, magnitudes, floor)
            if self.show is not None:
                self.show(values)
            yield from _describe_departures(values, scale)
            first = end

    def _compare(
        self, subjects: Sequence[Subject], joined: Joined, scale: NoiseScale, magnitudes: Floats, floor: NoiseFloor
    ) -> ComparedValues:
        series, iterations, a, b = joined
        sizes = magnitudes[series]
        place = scale.places(a, sizes)
        difference = scale.places(b, sizes) - place
        spread = floor.spread(series, iterations)
        limit = np.where(np.isnan(spread), scale.bound, floor.bound * spread)
        begin_limit = np.fmin(limit, max(_LEAST_BEGIN, _PART_OF_BOUND * floor.bound) * spread)
        starts, lengths = _stretches(series, difference, limit)
        starts = starts[lengths >= np.minimum(self.lasting, np.bincount(series)[series[starts]])]
        starts = starts[np.unique(series[starts], return_index=True)[1]]
        # Extend the difference back to the beginning, by the lower threshold.
        begins, lengths = _stretches(series, difference, begin_limit)
        containing = np.searchsorted(begins, starts, "right") - 1
        finite = np.isfinite(a)
        below = np.where(finite, scale.values(place - limit, sizes), a)
        above = np.where(finite, scale.values(place + limit, sizes), a)
        begins = begins[containing]
        lengths = lengths[containing]
        return ComparedValues(
            subjects, series, iterations, a, b, difference, spread, limit, below, above, begins, lengths
        )


def _describe_departures(values: ComparedValues, scale: NoiseScale) -> Iterator[SeriesDeparture]:
    for begin, length in zip(values.begins.tolist(), values.lengths.tolist(), strict=True):
        subject = values.subjects[values.series[begin]]
        end = begin + length
        a, b, difference = (_upper_median(column[begin:end]) for column in (values.a, values.b, values.difference))
        if scale is MAGNITUDE and a < 0 and b < 0:  # the smaller magnitude is the larger value
            difference = -difference
        spread = float(values.spread[begin])
        departure = StatisticDeparture(
            statistic=subject.statistic,
            gemm=subject.gemm,
            iteration=int(values.iterations[begin]),
            until=int(values.iterations[end - 1]),
            steps=length,
            to_the_end=bool((values.series[end : end + 1] != values.series[begin]).all()),
            a=a,
            b=b,
            difference=difference,
            unit=scale.unit,
            spread=None if math.isnan(spread) else spread,
            bound=float(values.limit[begin]),
        )
        is_first = begin == 0 or values.series[begin - 1] != values.series[begin]
        yield SeriesDeparture(subject, 0 if is_first else int(values.iterations[begin - 1]) + 1, departure)


def _upper_median(values: Floats) -> float:
    return float(np.sort(values)[len(values) // 2])


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
