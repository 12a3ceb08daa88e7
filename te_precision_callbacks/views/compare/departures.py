"""Search for departures: series that differ by more than noise, since when, and how far.

Differences are measured on a scale. Magnitudes differ by factors (an amax of 400 is as far from 200 as 0.04 from 0.02),
shares by points (6 % is as far from 5 % as 2 % from 1 %).

The differences of runs of one config are noise, and their spread is the noise floor. One pair of runs has a single
sample of a constant difference, such as between two initializations. Therefore the spread is estimated for a *family*
(one statistic of one tensor in all layers) from all its series, separately for each part of the run. The first parts
are short, since runs of one seed are equal before the first update. A series with a larger spread than its family keeps
its own spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.result import ComparisonError, StatisticDeparture
from te_precision_callbacks.views.report.overview import pieces


def family(subject: Subject) -> tuple[str, str, str]:
    return subject.tensor, subject.gemm, subject.statistic


class Numbers(NamedTuple):
    """The values of some series, sorted by series and iteration, [n]; ``series`` are indices in the request."""

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
        """Read the values of subjects that this side has; ``series`` are indices in ``subjects``."""
        wanted = []
        places = []
        for place, subject in enumerate(subjects):
            if subject in self.series:
                wanted.append(self.series[subject])
                places.append(place)
        parts = []
        if wanted:
            table = self.run.values(wanted)
            place_of = np.full(max(wanted) + 1, -1, np.int64)
            place_of[wanted] = places
            series = place_of[table["series"].to_numpy()]
            parts.append((series, table["iteration"].to_numpy(), table["value"].to_numpy()))
        for place, subject in enumerate(subjects):
            if subject in self.scalars:
                iterations, values = self.scalars[subject]
                parts.append((np.full(len(values), place, np.int64), iterations, values))
        if not parts:
            return Numbers(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        series, iterations, values = map(np.concatenate, zip(*parts, strict=True))
        return _in_order(series, iterations.astype(np.int64, copy=False), values)


def _in_order(series: Ints, iterations: Ints, values: Floats) -> Numbers:
    later = (series[1:] > series[:-1]) | ((series[1:] == series[:-1]) & (iterations[1:] > iterations[:-1]))
    if not later.all():
        order = np.lexsort((iterations, series))
        series = series[order]
        iterations = iterations[order]
        values = values[order]
        last = np.append((series[1:] != series[:-1]) | (iterations[1:] != iterations[:-1]), True)
        series = series[last]
        iterations = iterations[last]
        values = values[last]
    return Numbers(series, iterations, values)


def side_of_run(run: RecordedRun, name: str) -> Side:
    series = {}
    scalars = {}
    for number, subject in enumerate(run.subjects):
        request = logged_request(subject.statistic) if subject.tensor else None
        if request is None or not request.statistic.is_histogram:  # without histograms
            series[subject] = number
    for metric, (iterations, values) in run.metrics.items():
        numbers = _in_order(np.zeros(len(values), np.int64), iterations, values)
        scalars[Subject("", "", "", "", metric, None)] = numbers.iterations, numbers.values
    if not series and not scalars:
        raise ComparisonError(f"{name} has no statistics and no loss yet.{run.notes_sentence}")
    return Side(run, name, series, scalars)


ZERO_BELOW = 20.0
"""How many powers of two the number 0 is below the smallest other number of a series."""

_INFINITE = 2000.0
_NAN = 4000.0
"""The places of inf and nan on every scale, beyond all numbers."""

NO_NUMBER = 1000.0
"""A difference beyond it is one with inf or nan."""


@dataclass(frozen=True)
class NoiseScale:
    """A scale for differences of a statistic.

    Attributes:
        least: the minimum spread, however small the observed noise.
        bound: the smallest difference that counts without a noise floor.
        onto: values, and the magnitude of each value's series -> positions on the scale.
        back: positions and magnitudes -> values.
    """

    name: str
    unit: str
    least: float
    bound: float
    onto: Callable[[Floats, Floats], Floats]
    back: Callable[[Floats, Floats], Floats]

    def places(self, values: Floats, magnitudes: Floats) -> Floats:
        """Map values to positions on the scale, including inf and nan.

        ``magnitudes`` are positive, and constant within a series: for :data:`MAGNITUDE` its smallest magnitude above 0,
        otherwise its mean magnitude.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            places = self.onto(values, magnitudes)
        places = np.where(np.isinf(values), np.copysign(_INFINITE, values), places)
        return np.where(np.isnan(values), _NAN, places)

    def values(self, places: Floats, magnitudes: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.back(places, magnitudes)


def _powers(values: Floats, magnitudes: Floats) -> Floats:
    above = np.log2(np.abs(values)) - np.log2(magnitudes) + ZERO_BELOW
    return np.where(values == 0, 0.0, np.sign(values) * above)


def _from_powers(places: Floats, magnitudes: Floats) -> Floats:
    return np.asarray(np.where(places == 0, 0.0, np.sign(places) * magnitudes * 2.0 ** (np.abs(places) - ZERO_BELOW)))


def _same(values: Floats, magnitudes: Floats) -> Floats:
    return values


MAGNITUDE = NoiseScale("magnitude", "powers of two", 0.01, 1.0, _powers, _from_powers)
SQUARE = NoiseScale("square", "powers of two", 0.01, 2.0, _powers, _from_powers)
LEVEL = NoiseScale(
    "level",
    "of its size",
    0.02,
    6.0,
    lambda values, sizes: np.arcsinh(values / sizes),
    lambda places, sizes: sizes * np.sinh(places),
)
SHARE = NoiseScale("share", "points", 0.02, 5.0, _same, _same)
DECIBELS = NoiseScale("decibels", "dB", 0.1, 3.0, _same, _same)
POWERS = NoiseScale("powers", "powers of two", 0.05, 12.0, _same, _same)
COUNT = NoiseScale(
    "count",
    "powers of two",
    0.01,
    1.0,
    lambda values, sizes: np.log2(1 + np.abs(values)),
    lambda places, sizes: 2.0 ** np.fmax(places, 0.0) - 1,
)

_BY_UNIT = {
    "of the tensor": MAGNITUDE,
    "square of the tensor's": SQUARE,
    "%": SHARE,
    "dB": DECIBELS,
    "powers of two": POWERS,
    "elements": COUNT,
}


def scale_of(tensor: str, statistic: str) -> NoiseScale:
    """The scale of a statistic; ``tensor`` is empty for a metric of the trainer or of a custom feature."""
    request = logged_request(statistic) if tensor else None
    if request is None:
        if statistic.endswith("%"):
            return SHARE
        return LEVEL
    if request.statistic.signed:
        return LEVEL
    return _BY_UNIT.get(request.statistic.unit, LEVEL)


_CLIPPED_AT = 0.9

_OF_CLIPPED = 0.9118
"""The root mean square of standard normal numbers that are clipped so."""

_WILD = 3.0
"""A series whose spread is more than so many times the median of its family's counts as that in the family's."""

_MOST_PARTS = 16


def grouped_quantile(groups: Ints, values: Floats, count: int, share: float) -> Floats:
    """A quantile of each group's values, by the nearest rank; nan for an empty group. ``groups``: [n], from 0 to
    ``count`` - 1.
    """
    counts = np.bincount(groups, minlength=count)
    ordered = values[np.lexsort((values, groups))]
    ranks = np.cumsum(counts) - counts + np.minimum((counts * share).astype(np.int64), counts - 1)
    quantiles = np.full(count, np.nan)
    has = counts > 0
    quantiles[has] = ordered[ranks[has]]
    return quantiles


def grouped_spread(groups: Ints, values: Floats, count: int) -> Floats:
    """The standard deviation of each group's values about 0, with the largest tenth clipped; nan for an empty group."""
    magnitudes = np.abs(values)
    clipped = np.minimum(magnitudes, grouped_quantile(groups, magnitudes, count, _CLIPPED_AT)[groups])
    with np.errstate(invalid="ignore"):
        squares = np.bincount(groups, clipped**2, count) / np.bincount(groups, minlength=count)
    return np.asarray(np.sqrt(squares) / _OF_CLIPPED)


@dataclass(frozen=True)
class Noise:
    """Differences of runs of one config.

    Attributes:
        series: [n], int64; values of a series and a pair of runs are consecutive.
        iterations: [n], int64; ascending within a series and a pair.
        pair: [n], int64: the index of the pair of runs.
        differences: [n], on the statistic's scale.
    """

    series: Ints
    iterations: Ints
    pair: Ints
    differences: Floats


@dataclass(frozen=True)
class Spread:
    """The spread of the noise, by family, part of the run, and series.

    Attributes:
        edges: [parts - 1]: the first iteration of each part but the first.
        by_family: [families, parts].
        ratio: [series]: the spread of the series, relative to its family; 1 or more.
    """

    edges: Ints
    by_family: Floats
    ratio: Floats

    def at(self, families: Ints, series: Ints, iterations: Ints) -> Floats:
        """[n]: the spread of the noise, given family, series and iteration of each difference."""
        return self.by_family[families, np.searchsorted(self.edges, iterations, "right")] * self.ratio[series]


def measure_noise(noise: Noise, family_of: Ints, families: int, least: Floats, lasting: int) -> Spread:
    """Estimate the spread of the noise.

    Args:
        family_of: [series]: the family of each series.
        least: [families]: the smallest credible spread.
        lasting: the minimum number of steps of a difference.
    """
    edges = _edges(np.unique(noise.iterations), lasting)
    parts = len(edges) + 1
    part = np.searchsorted(edges, noise.iterations, "right")
    number = len(family_of)
    of_series = grouped_spread(noise.series * parts + part, noise.differences, number * parts)
    known = np.flatnonzero(~np.isnan(of_series))
    its_family = family_of[known // parts] * parts + known % parts
    middle = grouped_quantile(its_family, of_series[known], families * parts, 0.5)
    tame = np.minimum(of_series[known], _WILD * middle[its_family])
    by_part = grouped_spread(its_family, tame, families * parts).reshape(families, parts)
    by_family = np.fmax(_max_with_neighbors(by_part), least[:, None])
    normed = noise.differences / by_family[family_of[noise.series], part]
    return Spread(edges, by_family, np.fmax(grouped_spread(noise.series, normed, number), 1.0))


def _edges(steps: Ints, lasting: int) -> Ints:
    """The first iteration of each part of the run but the first.

    The first parts have 1, 1, 2, 4, ... steps, up to the width of the others: noise changes fastest at the beginning.
    """
    parts = int(np.clip(len(steps) // (4 * lasting), 1, _MOST_PARTS))
    width = len(steps) // parts
    early = 2 ** np.arange(width.bit_length() - 1)
    return np.asarray(steps[np.concatenate([early, (np.arange(1, parts) * len(steps)) // parts])])


def _max_with_neighbors(by_part: Floats) -> Floats:
    """The maximum of each part and its neighbors; a part without noise gets the value of the nearest other part."""
    known = ~np.isnan(by_part)
    parts = by_part.shape[1]
    places = np.arange(parts)
    distance = np.where(known[:, None, :], np.abs(places[None, :, None] - places[None, None, :]), parts)
    filled = np.take_along_axis(by_part, distance.argmin(2), 1)
    padded = np.pad(filled, ((0, 0), (1, 1)), mode="edge")
    return np.fmax(np.fmax(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:])


_LEAST_BOUND = 6.0
_BEYOND_NOISE = 1.25
"""A difference counts if it is at least so many spreads, and so many times the largest lasting one in the noise."""

_PART_OF_BOUND = 0.5
_LEAST_BEGIN = 4.0
"""A difference that has passed the bound began where it passed half of it, which is at least so many spreads."""


class SeriesDeparture(NamedTuple):
    """A series with a lasting difference. ``since``: its possible beginning, right after the last value without it."""

    subject: Subject
    since: int
    departure: StatisticDeparture


class ComparedValues(NamedTuple):
    """The values of some series on both sides, sorted by series and iteration.

    Attributes:
        series, iterations: [n]; ``series`` are indices in ``subjects``.
        a, b: [n].
        difference: [n]: on the scale.
        spread: [n]: the spread of the noise; nan without a noise floor.
        limit: [n]: the smallest difference that counts.
        below, above: [n]: the nearest values to a that count as different; a itself if it is not finite.
        begins: the indices of the first values of lasting differences.
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
    """The search for lasting differences, with its counts.

    Attributes:
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        show: receives all compared values, in pieces.
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

    def run(self, subjects: Sequence[Subject]) -> Iterator[SeriesDeparture]:
        ordered = sorted(subjects, key=family)
        counts = np.array([self.a.count(subject) for subject in ordered], np.int64)
        for piece in pieces(counts):
            # In the order of the records, values need no sorting.
            part = sorted(ordered[piece], key=lambda subject: self.a.series.get(subject, math.inf))
            yield from self._search_piece(part)

    def _search_piece(self, subjects: Sequence[Subject]) -> Iterator[SeriesDeparture]:
        sides = [side.read(subjects) for side in (self.a, self.b, *self.noise)]
        scales = _Scales(subjects, sides)
        series, iterations, ours, theirs = _pair_values(sides[0], sides[1])
        self.iterations = np.union1d(self.iterations, iterations)
        counts = np.bincount(series, minlength=len(subjects))
        self.without_steps += int((counts == 0).sum())
        self.all_equal &= np.array_equal(ours, theirs, equal_nan=True)
        place = scales.places(series, ours)
        difference = scales.places(series, theirs) - place

        spread, bound = self._noise_limits(scales, [sides[0], *sides[2:]], series, iterations)
        known = ~np.isnan(spread)
        limit = np.where(known, bound * spread, scales.bound[series])
        begin = np.where(known, np.minimum(limit, np.fmax(_LEAST_BEGIN, _PART_OF_BOUND * bound) * spread), limit)
        beyond_starts, beyond_lengths = _stretches(series, difference, limit)
        starts = beyond_starts[beyond_lengths >= np.minimum(self.lasting, counts[series[beyond_starts]])]
        starts = starts[np.unique(series[starts], return_index=True)[1]]
        # Extend the difference back to the beginning, by the lower threshold.
        begun_starts, begun_lengths = _stretches(series, difference, begin)
        within = np.searchsorted(begun_starts, starts, "right") - 1
        begins = begun_starts[within]
        lengths = begun_lengths[within]
        if self.show is not None:
            finite = np.isfinite(ours)
            below = np.where(finite, scales.values(series, place - limit), ours)
            above = np.where(finite, scales.values(series, place + limit), ours)
            values = (ours, theirs, difference, spread, limit, below, above)
            self.show(ComparedValues(subjects, series, iterations, *values, begins))
        yield from self._describe_departures(
            subjects, begins, lengths, series, iterations, (ours, theirs, difference), (spread, limit)
        )

    def _noise_limits(
        self, scales: _Scales, sides: Sequence[Numbers], series: Ints, iterations: Ints
    ) -> tuple[Floats, Floats]:
        """Return the spread of the noise at each difference, and the multiple of it that counts; nan without noise."""
        number = len(scales.family)
        noise = _noise(scales, sides)
        has = np.bincount(noise.series, minlength=number) > 0
        self.without_noise += int((~has).sum()) if self.noise else 0
        if not has.any():
            nothing = np.full(len(series), np.nan)
            return nothing, nothing
        spread = measure_noise(noise, scales.family, scales.families, scales.least, self.lasting)
        largest = _largest_noise(noise, spread, scales, self.lasting)
        families = scales.family[series]
        bound = np.fmax(_LEAST_BOUND, _BEYOND_NOISE * largest[families])
        return np.where(has[series], spread.at(families, series, iterations), np.nan), bound

    def _describe_departures(
        self,
        subjects: Sequence[Subject],
        begins: Ints,
        lengths: Ints,
        series: Ints,
        iterations: Ints,
        values: tuple[Floats, ...],
        limits: tuple[Floats, Floats],
    ) -> Iterator[SeriesDeparture]:
        group = np.repeat(np.arange(len(begins)), lengths)
        inside = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(len(group))
        medians = np.stack([grouped_quantile(group, column[inside], len(begins), 0.5) for column in values], 1)
        ends = begins + lengths - 1
        spread, limit = limits
        last = np.append(series[1:] != series[:-1], True)
        for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            subject = subjects[series[begin]]
            ours, theirs, difference = medians[number].tolist()
            scale = scale_of(subject.tensor, subject.statistic)
            if scale is MAGNITUDE and ours < 0 and theirs < 0:  # the smaller magnitude is the larger value
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
            yield SeriesDeparture(subject, 0 if is_first else int(iterations[begin - 1]) + 1, departure)


class _Scales:
    def __init__(self, subjects: Sequence[Subject], sides: Sequence[Numbers]) -> None:
        families: dict[tuple[str, str, str], int] = {}
        self.family: Ints = np.array(
            [families.setdefault(family(subject), len(families)) for subject in subjects], np.int64
        )
        self.families = len(families)
        self._kinds: list[NoiseScale] = []
        kinds = []
        for tensor, _, statistic in families:
            scale = scale_of(tensor, statistic)
            if scale not in self._kinds:
                self._kinds.append(scale)
            kinds.append((self._kinds.index(scale), scale.least, scale.bound, scale is LEVEL))
        kind, self.least, bound, is_level = map(np.array, zip(*kinds, strict=True))
        self._kind = kind[self.family]
        self.bound = bound[self.family]
        self._magnitudes = np.where(
            is_level[self.family], _mean_magnitudes(sides, len(subjects)), _smallest_magnitudes(sides, len(subjects))
        )

    def places(self, series: Ints, values: Floats) -> Floats:
        return self._by_kind(NoiseScale.places, series, values)

    def values(self, series: Ints, places: Floats) -> Floats:
        return self._by_kind(NoiseScale.values, series, places)

    def _by_kind(self, apply: Callable[[NoiseScale, Floats, Floats], Floats], series: Ints, numbers: Floats) -> Floats:
        result = np.empty(len(numbers))
        kinds = self._kind[series]
        for number, scale in enumerate(self._kinds):
            chosen = slice(None) if len(self._kinds) == 1 else kinds == number
            result[chosen] = apply(scale, numbers[chosen], self._magnitudes[series[chosen]])
        return result


def _smallest_magnitudes(sides: Sequence[Numbers], count: int) -> Floats:
    """[series]: the smallest nonzero magnitude on any side; 1 without one."""
    smallest = np.full(count, np.inf)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        magnitudes[~(magnitudes > 0)] = np.inf
        np.minimum.at(smallest, numbers.series, magnitudes)
    return np.where(np.isfinite(smallest), smallest, 1.0)


def _mean_magnitudes(sides: Sequence[Numbers], count: int) -> Floats:
    ordinary = np.zeros(count)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        finite = np.isfinite(magnitudes)
        counts = np.bincount(numbers.series[finite], minlength=count)
        mean = np.bincount(numbers.series[finite], magnitudes[finite], count) / np.maximum(counts, 1)
        ordinary = np.where(ordinary > 0, ordinary, mean)
    return np.where((ordinary > 0) & np.isfinite(ordinary), ordinary, 1.0)


def _pair_values(a: Numbers, b: Numbers) -> tuple[Ints, Ints, Floats, Floats]:
    stride = 1 + max(a.iterations.max(initial=0), b.iterations.max(initial=0))
    ours = a.series * stride + a.iterations
    theirs = b.series * stride + b.iterations
    _, first, second = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
    return a.series[first], a.iterations[first], a.values[first], b.values[second]


def _noise(scales: _Scales, sides: Sequence[Numbers]) -> Noise:
    parts = []
    for number, (first, other) in enumerate(combinations(sides, 2)):
        series, iterations, ours, theirs = _pair_values(first, other)
        difference = scales.places(series, theirs) - scales.places(series, ours)
        parts.append((series, iterations, np.full(len(series), number), difference))
    if not parts:
        return Noise(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Noise(*map(np.concatenate, zip(*parts, strict=True)))


def _largest_noise(noise: Noise, spread: Spread, scales: _Scales, lasting: int) -> Floats:
    """[families]: the largest lasting difference within the noise, in multiples of its spread."""
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


def _stretches(series: Ints, difference: Floats, limit: Floats) -> tuple[Ints, Ints]:
    """Find stretches of a series with differences beyond a limit, of one sign; returns their starts and lengths. Inf
    and nan continue the stretch before them.
    """
    size = np.abs(difference)
    state: npt.NDArray[np.int8] = np.where(size > limit, np.sign(difference), 0).astype(np.int8)
    others = np.append(True, series[1:] != series[:-1])[: len(state)]
    begins = others | (size <= NO_NUMBER) | ~np.append(False, state[:-1] != 0)[: len(state)]
    state = state[np.maximum.accumulate(np.where(begins, np.arange(len(state)), 0))]
    starts = np.flatnonzero(others | np.append(True, state[1:] != state[:-1])[: len(state)])
    lengths = np.diff(np.append(starts, len(state)))
    beyond = state[starts] != 0
    return starts[beyond], lengths[beyond]
