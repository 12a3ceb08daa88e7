"""Scales for differences, and the noise floor: how far runs of one config are apart.

Magnitudes differ by factors (an amax of 400 is as far from 200 as 0.04 from 0.02), shares by points (6 % is as far from
5 % as 2 % from 1 %).

One pair of runs has a single sample of a constant difference, such as between two initializations. Therefore the spread
of the noise is estimated for a *family* (one statistic of one tensor in all layers) from all its series, separately for
each part of the run. The first parts are short, since runs of one seed are equal before the first update. A series with
a larger spread than its family keeps its own spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.values import Joined, Numbers

ZERO_BELOW = 20.0
"""How many powers of two the number 0 is below the smallest other number of a series."""

_INFINITE = 2000.0
_NAN = 4000.0
"""The places of inf and nan on every scale, beyond all numbers."""

NO_NUMBER = 1000.0
"""A difference beyond it is one with inf or nan."""


def _same(values: Floats, magnitudes: Floats) -> Floats:
    return values


@dataclass(frozen=True)
class NoiseScale:
    """A scale for differences of a statistic.

    Attributes:
        least: the minimum spread, however small the observed noise.
        bound: the smallest difference that counts without a noise floor.
        onto: finite values, and the magnitude of each value's series -> positions on the scale.
        back: positions and magnitudes -> values.
    """

    unit: str
    least: float
    bound: float
    onto: Callable[[Floats, Floats], Floats] = _same
    back: Callable[[Floats, Floats], Floats] = _same

    def places(self, values: Floats, magnitudes: Floats) -> Floats:
        """Map values to positions on the scale, including inf and nan.

        ``magnitudes`` are positive, and constant within a series: for :data:`LEVEL` its mean magnitude, otherwise its
        smallest magnitude above 0.
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


MAGNITUDE = NoiseScale("powers of two", 0.01, 1.0, _powers, _from_powers)
SQUARE = NoiseScale("powers of two", 0.01, 2.0, _powers, _from_powers)
LEVEL = NoiseScale(
    "of its size",
    0.02,
    6.0,
    lambda values, sizes: np.arcsinh(values / sizes),
    lambda places, sizes: sizes * np.sinh(places),
)
SHARE = NoiseScale("points", 0.02, 5.0)
DECIBELS = NoiseScale("dB", 0.1, 3.0)
POWERS = NoiseScale("powers of two", 0.05, 12.0)
COUNT = NoiseScale(
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


def smallest_magnitudes(sides: Sequence[Numbers], count: int) -> Floats:
    """[series]: the smallest nonzero magnitude on any side; 1 without one."""
    smallest = np.full(count, np.inf)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        magnitudes[~(magnitudes > 0)] = np.inf
        np.minimum.at(smallest, numbers.series, magnitudes)
    return np.where(np.isfinite(smallest), smallest, 1.0)


def mean_magnitudes(sides: Sequence[Numbers], count: int) -> Floats:
    """[series]: the mean magnitude on the first side that has one above 0; 1 without one."""
    usual = np.zeros(count)
    for numbers in sides:
        magnitudes = np.abs(numbers.values)
        finite = np.isfinite(magnitudes)
        counts = np.bincount(numbers.series[finite], minlength=count)
        mean = np.bincount(numbers.series[finite], magnitudes[finite], count) / np.maximum(counts, 1)
        usual = np.where(usual > 0, usual, mean)
    return np.where((usual > 0) & np.isfinite(usual), usual, 1.0)


_CLIPPED_AT = 0.9

_OF_CLIPPED = 0.9118
"""The root mean square of standard normal numbers that are clipped so."""

_WILD = 3.0
"""A series whose spread is more than so many times the median of its family's counts as that in the family's."""

_MOST_PARTS = 16

_LEAST_BOUND = 6.0
_BEYOND_NOISE = 1.25
"""A difference counts if it is at least so many spreads, and so many times the largest lasting one in the noise."""


@dataclass(frozen=True)
class NoiseFloor:
    """The spread of the noise in a family.

    Attributes:
        edges: [parts - 1]: the first iteration of each part of the run but the first.
        by_part: [parts]: the spread of the family.
        ratio: [series]: the spread of the series, relative to its family; 1 or more; nan without noise.
        bound: the smallest difference that counts, in spreads.
    """

    edges: Ints
    by_part: Floats
    ratio: Floats
    bound: float

    @classmethod
    def measure(
        cls, pairs: Sequence[Joined], scale: NoiseScale, magnitudes: Floats, edges: Ints, lasting: int
    ) -> NoiseFloor:
        """Estimate the spread from the pairs of runs of one config.

        Args:
            magnitudes: [series].
            edges: see :func:`part_edges`.
            lasting: the minimum number of steps of a difference.
        """
        parts = len(edges) + 1
        count = len(magnitudes)
        columns = [(pair.series, pair.iterations, _differences(pair, scale, magnitudes)) for pair in pairs]
        if not any(len(pair.series) for pair in pairs):
            return cls(edges, np.full(parts, np.nan), np.full(count, np.nan), np.nan)
        series, iterations, differences = map(np.concatenate, zip(*columns, strict=True))
        part = np.searchsorted(edges, iterations, "right")
        by_series = _grouped_spread(series * parts + part, differences, count * parts)
        measured = np.flatnonzero(~np.isnan(by_series))
        medians = grouped_quantile(measured % parts, by_series[measured], parts, 0.5)
        usual = np.minimum(by_series[measured], _WILD * medians[measured % parts])
        by_part = np.maximum(_max_with_neighbors(_grouped_spread(measured % parts, usual, parts)), scale.least)
        ratio = np.maximum(_grouped_spread(series, differences / by_part[part], count), 1.0)
        floor = cls(edges, by_part, ratio, _LEAST_BOUND)
        largest = max(
            _largest_lasting(series, differences / floor.spread(series, iterations), lasting)
            for series, iterations, differences in columns
        )
        return cls(edges, by_part, ratio, max(_LEAST_BOUND, _BEYOND_NOISE * largest))

    def spread(self, series: Ints, iterations: Ints) -> Floats:
        """[n]: the spread of the noise, given series and iteration of each difference; nan without noise."""
        return self.by_part[np.searchsorted(self.edges, iterations, "right")] * self.ratio[series]


def _differences(pair: Joined, scale: NoiseScale, magnitudes: Floats) -> Floats:
    sizes = magnitudes[pair.series]
    return scale.places(pair.b, sizes) - scale.places(pair.a, sizes)


def part_edges(steps: Ints, lasting: int) -> Ints:
    """The first iteration of each part of the run but the first.

    The first parts have 1, 1, 2, 4, ... steps, up to the width of the others: noise changes fastest at the beginning.
    """
    parts = int(np.clip(len(steps) // (4 * lasting), 1, _MOST_PARTS))
    width = len(steps) // parts
    early = 2 ** np.arange(width.bit_length() - 1)
    return np.asarray(steps[np.concatenate([early, (np.arange(1, parts) * len(steps)) // parts])])


def _max_with_neighbors(by_part: Floats) -> Floats:
    """The maximum of each part and its neighbors; a part without noise gets the value of the nearest other part."""
    measured = np.flatnonzero(~np.isnan(by_part))
    distances = np.abs(np.arange(len(by_part))[:, None] - measured)
    padded = np.pad(by_part[measured[distances.argmin(1)]], 1, mode="edge")
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, 3).max(1))


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


def _grouped_spread(groups: Ints, values: Floats, count: int) -> Floats:
    """The standard deviation of each group's values about 0, with the largest tenth clipped; nan for an empty group."""
    magnitudes = np.abs(values)
    clipped = np.minimum(magnitudes, grouped_quantile(groups, magnitudes, count, _CLIPPED_AT)[groups])
    with np.errstate(invalid="ignore"):
        squares = np.bincount(groups, clipped**2, count) / np.bincount(groups, minlength=count)
    return np.asarray(np.sqrt(squares) / _OF_CLIPPED)


def _largest_lasting(series: Ints, multiples: Floats, lasting: int) -> float:
    """The largest difference that lasts, in one direction, within the noise of a pair of runs."""
    if len(multiples) < lasting:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(multiples, lasting)
    same = series[lasting - 1 :] == series[: len(windows)]
    least = np.maximum(windows.min(1), -windows.max(1))  # negative where the direction changes
    return float(least[same].max(initial=0.0))
