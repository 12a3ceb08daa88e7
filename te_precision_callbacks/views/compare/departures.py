"""Search for the series that depart: since which step, and how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.judging_scales import LEVEL, MAGNITUDE, NO_NUMBER, NoiseScale, scale_of
from te_precision_callbacks.views.compare.result import StatisticDeparture
from te_precision_callbacks.views.compare.sides import Floats, Ints, Numbers, Side, family
from te_precision_callbacks.views.compare.spread import Noise, Spread, grouped_quantile, measure
from te_precision_callbacks.views.report.overview import pieces

_LEAST_BOUND, _BEYOND_NOISE = 6.0, 1.25
"""A difference counts if it is at least so many spreads, and so many times the largest lasting one in the noise."""

_PART_OF_BOUND, _LEAST_BEGIN = 0.5, 4.0
"""A difference that has passed the bound began where it passed half of it, which is at least so many spreads."""


class Found(NamedTuple):
    """A lasting difference of a series. ``since`` is the first iteration after the last value without it."""

    subject: Subject
    since: int
    departure: StatisticDeparture


class Compared(NamedTuple):
    """The values of some series on both sides, by series and iteration.

    Attributes:
        series, iterations: [n]: of each value; series as places in ``subjects``.
        a, b: [n].
        difference: [n]: on the scale.
        spread: [n]: the ordinary spread; nan without a noise floor.
        limit: [n]: the difference that counts.
        below, above: [n]: the values that are just far enough from a to count; a itself if it is not finite.
        begins: the places of the first values of lasting differences.
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


@dataclass
class Search:
    """The search for differences, with its counts.

    Attributes:
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        show: receives all compared values, in parts.
        without_steps: the number of series without a common step.
        without_noise: the number of series without a baseline.
        all_equal: whether all values that pair are equal, to the last bit.
        iterations: the common iterations, in order.
    """

    a: Side
    b: Side
    noise: Sequence[Side]
    lasting: int
    show: Callable[[Compared], None] | None = None
    without_steps: int = 0
    without_noise: int = 0
    all_equal: bool = True
    iterations: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def run(self, subjects: Sequence[Subject]) -> Iterator[Found]:
        ordered = sorted(subjects, key=family)
        counts = np.array([self.a.count(subject) for subject in ordered], np.int64)
        for piece in pieces(counts):
            # In the order of the records nothing has to be sorted.
            part = sorted(ordered[piece], key=lambda subject: self.a.series.get(subject, math.inf))
            yield from self._part(part)

    def _part(self, subjects: Sequence[Subject]) -> Iterator[Found]:
        sides = [side.read(subjects) for side in (self.a, self.b, *self.noise)]
        scales = _Scales(subjects, sides)
        series, iterations, ours, theirs = _both(sides[0], sides[1])
        self.iterations = np.union1d(self.iterations, iterations)
        counts = np.bincount(series, minlength=len(subjects))
        self.without_steps += int((counts == 0).sum())
        self.all_equal &= np.array_equal(ours, theirs, equal_nan=True)
        place = scales.places(series, ours)
        difference = scales.places(series, theirs) - place

        spread, bound = self._noise_at(scales, [sides[0], *sides[2:]], series, iterations)
        known = ~np.isnan(spread)
        limit = np.where(known, bound * spread, scales.bound[series])
        begin = np.where(known, np.minimum(limit, np.fmax(_LEAST_BEGIN, _PART_OF_BOUND * bound) * spread), limit)
        beyond, begun = _runs(series, difference, limit), _runs(series, difference, begin)
        lasting = beyond.lengths >= np.minimum(self.lasting, counts[series[beyond.starts]])
        starts = beyond.starts[lasting]
        starts = starts[np.unique(series[starts], return_index=True)[1]]
        # The stretch in which it has begun.
        within = np.searchsorted(begun.starts, starts, "right") - 1
        begins, lengths = begun.starts[within], begun.lengths[within]
        if self.show is not None:
            finite = np.isfinite(ours)
            below, above = (np.where(finite, scales.values(series, place + way * limit), ours) for way in (-1, 1))
            values = (ours, theirs, difference, spread, limit, below, above)
            self.show(Compared(subjects, series, iterations, *values, begins))
        yield from self._described(
            subjects, begins, lengths, series, iterations, (ours, theirs, difference), (spread, limit)
        )

    def _noise_at(
        self, scales: _Scales, sides: Sequence[Numbers], series: Ints, iterations: Ints
    ) -> tuple[Floats, Floats]:
        """The ordinary spread at each difference, and the multiple of it that counts; nan without known noise."""
        number = len(scales.family)
        noise = _noise(scales, sides)
        has = np.bincount(noise.series, minlength=number) > 0
        self.without_noise += int((~has).sum()) if self.noise else 0
        if not has.any():
            nothing = np.full(len(series), np.nan)
            return nothing, nothing
        spread = measure(noise, scales.family, scales.families, scales.least, self.lasting)
        largest = _largest(noise, spread, scales, self.lasting)
        families = scales.family[series]
        bound = np.fmax(_LEAST_BOUND, _BEYOND_NOISE * largest[families])
        return np.where(has[series], spread.at(families, series, iterations), np.nan), bound

    def _described(
        self,
        subjects: Sequence[Subject],
        begins: Ints,
        lengths: Ints,
        series: Ints,
        iterations: Ints,
        values: tuple[Floats, ...],
        limits: tuple[Floats, Floats],
    ) -> Iterator[Found]:
        group = np.repeat(np.arange(len(begins)), lengths)
        inside = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(len(group))
        medians = [grouped_quantile(group, column[inside], len(begins), 0.5) for column in values]
        ends = begins + lengths - 1
        spread, limit = limits
        last = np.append(series[1:] != series[:-1], True)
        for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            subject = subjects[series[begin]]
            ours, theirs, difference = (float(column[number]) for column in medians)
            scale = scale_of(subject.tensor, subject.statistic)
            if scale is MAGNITUDE and ours < 0 and theirs < 0:  # the smaller magnitude is the larger number
                difference = -difference
            is_known = not math.isnan(spread[begin])
            departure = StatisticDeparture(
                statistic=subject.statistic,
                gemm=subject.gemm,
                iteration=int(iterations[begin]),
                until=int(iterations[end]),
                steps=end - begin + 1,
                to_the_end=bool(last[end]),
                a=ours,
                b=theirs,
                difference=difference,
                unit=scale.unit,
                spread=float(spread[begin]) if is_known else None,
                bound=float(limit[begin]),
            )
            is_first = not begin or series[begin - 1] != series[begin]
            yield Found(subject, 0 if is_first else int(iterations[begin - 1]) + 1, departure)


class _Scales:
    def __init__(self, subjects: Sequence[Subject], sides: Sequence[Numbers]) -> None:
        families = {key: number for number, key in enumerate(dict.fromkeys(map(family, subjects)))}
        self.families = len(families)
        self.family: Ints = np.array([families[family(subject)] for subject in subjects], np.int64)
        scales = [scale_of(tensor, statistic) for tensor, _, statistic in families]
        self._kinds: dict[str, NoiseScale] = {scale.name: scale for scale in scales}
        names = list(self._kinds)
        self._kind = np.array([names.index(scale.name) for scale in scales])[self.family]
        self.least = np.array([scale.least for scale in scales])
        self.bound = np.array([scale.bound for scale in scales])[self.family]
        levels = np.array([scale is LEVEL for scale in scales])[self.family]
        self._magnitudes = np.where(levels, _ordinary(sides, len(subjects)), _smallest(sides, len(subjects)))

    def places(self, series: Ints, values: Floats) -> Floats:
        return self._each(NoiseScale.places, series, values)

    def values(self, series: Ints, places: Floats) -> Floats:
        return self._each(NoiseScale.values, series, places)

    def _each(self, apply: Callable[[NoiseScale, Floats, Floats], Floats], series: Ints, numbers: Floats) -> Floats:
        result = np.empty(len(numbers))
        kinds = self._kind[series]
        for number, scale in enumerate(self._kinds.values()):
            chosen = slice(None) if len(self._kinds) == 1 else kinds == number
            result[chosen] = apply(scale, numbers[chosen], self._magnitudes[series[chosen]])
        return result


def _smallest(sides: Sequence[Numbers], number: int) -> Floats:
    """[series]: the smallest magnitude but 0 on any side; 1 without one."""
    smallest = np.full(number, np.inf)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        magnitudes[~(magnitudes > 0)] = np.inf
        np.minimum.at(smallest, numbers.series, magnitudes)
    return np.where(np.isfinite(smallest), smallest, 1.0)


def _ordinary(sides: Sequence[Numbers], number: int) -> Floats:
    ordinary = np.zeros(number)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        finite = np.isfinite(magnitudes)
        counts = np.bincount(numbers.series[finite], minlength=number)
        mean = np.bincount(numbers.series[finite], magnitudes[finite], number) / np.maximum(counts, 1)
        ordinary = np.where(ordinary > 0, ordinary, mean)
    return np.where((ordinary > 0) & np.isfinite(ordinary), ordinary, 1.0)


def _both(a: Numbers, b: Numbers) -> tuple[Ints, Ints, Floats, Floats]:
    stride = 1 + max((int(part.iterations.max()) for part in (a, b) if len(part.iterations)), default=0)
    ours, theirs = (part.series * stride + part.iterations for part in (a, b))
    _, first, second = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return a.series[first], a.iterations[first], a.values[first], b.values[second]


def _noise(scales: _Scales, sides: Sequence[Numbers]) -> Noise:
    parts = []
    for number, (first, other) in enumerate(combinations(sides, 2)):
        series, iterations, ours, theirs = _both(first, other)
        difference = scales.places(series, theirs) - scales.places(series, ours)
        parts.append((series, iterations, np.full(len(series), number), difference))
    if not parts:
        return Noise(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Noise(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _largest(noise: Noise, spread: Spread, scales: _Scales, lasting: int) -> Floats:
    """[families]: the largest lasting difference in the noise, in multiples of its spread."""
    z = noise.differences / spread.at(scales.family[noise.series], noise.series, noise.iterations)
    largest = np.zeros(scales.families)
    if len(z) < lasting:
        return largest
    length = len(z) - lasting + 1
    least = np.abs(z[:length])
    same = np.ones(length, bool)
    for ahead in range(1, lasting):
        after = slice(ahead, ahead + length)
        least = np.minimum(least, np.abs(z[after]))
        same &= (noise.series[after] == noise.series[:length]) & (noise.pair[after] == noise.pair[:length])
        same &= np.sign(z[after]) == np.sign(z[:length])
    np.maximum.at(largest, scales.family[noise.series[:length][same]], least[same])
    return largest


class _Runs(NamedTuple):
    """Stretches of a series with differences beyond a limit on one side. Inf and nan continue the stretch before
    them."""

    starts: Ints
    lengths: Ints


def _runs(series: Ints, difference: Floats, limit: Floats) -> _Runs:
    size = np.abs(difference)
    state: npt.NDArray[np.int8] = np.where(size > limit, np.sign(difference), 0).astype(np.int8)
    others = np.append(True, series[1:] != series[:-1])[: len(state)]
    begins = others | (size <= NO_NUMBER) | ~np.append(False, state[:-1] != 0)[: len(state)]
    state = state[np.maximum.accumulate(np.where(begins, np.arange(len(state)), 0))]
    starts = np.flatnonzero(others | np.append(True, state[1:] != state[:-1])[: len(state)])
    lengths = np.diff(np.append(starts, len(state)))
    beyond = state[starts] != 0
    return _Runs(starts[beyond], lengths[beyond])
