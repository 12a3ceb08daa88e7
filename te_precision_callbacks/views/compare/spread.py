"""The noise floor: the ordinary spread of a statistic.

The differences of runs of one config are noise. One pair of runs has a single sample of a constant difference, such as
between two initializations. So statistics borrow from similar ones: the spread of a *family*, one statistic of one
tensor in all layers, is estimated from all its series together, for each part of the run. Parts are short at the
beginning, since runs of one seed are equal before the first update. The spread of a series is between its own and its
family's, weighted by their degrees of freedom (empirical Bayes with moderated t, G. K. Smyth, 2004,
doi:10.2202/1544-6115.1027). The bound for a difference is Student's t for these degrees of freedom, over all series and
stretches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FALSE_FINDINGS = 0.01

BEYOND_NOISE = 1.25

_FEWEST, _MOST = 2.0, 1e6

_CLIPPED_AT = 0.9

_OF_CLIPPED = 0.9118
"""The root mean square of standard normal numbers that are clipped so."""

_WILD = 3.0
"""A series whose spread is more than so many times the median of its family's counts as that in the family's."""

_DRAWS = 20_000
_LEAST_RATIO = 1e-3
_MOST_PARTS = 16

_HARDLY_ANY = 1e-3
"""A spread of so many times the smallest one that is believed is that of runs that are equal."""


def grouped_quantile(groups: Ints, values: Floats, number: int, share: float) -> Floats:
    """A quantile of the values of each group, by the nearest rank; nan of a group without values. ``groups`` are [n],
    from 0 to ``number`` - 1.
    """
    counts = np.bincount(groups, minlength=number)
    ordered = values[np.lexsort((values, groups))]
    ranks = np.cumsum(counts) - counts + np.minimum((counts * share).astype(np.int64), counts - 1)
    quantiles = np.full(number, np.nan)
    has = counts > 0
    quantiles[has] = ordered[ranks[has]]
    return quantiles


def grouped_spread(groups: Ints, values: Floats, number: int) -> Floats:
    """The standard deviation of each group's values about 0, with the largest tenth clipped; nan of an empty group."""
    magnitudes = np.abs(values)
    clipped = np.minimum(magnitudes, grouped_quantile(groups, magnitudes, number, _CLIPPED_AT)[groups])
    with np.errstate(invalid="ignore"):
        squares = np.bincount(groups, clipped**2, number) / np.bincount(groups, minlength=number)
    return np.asarray(np.sqrt(squares) / _OF_CLIPPED)


@dataclass(frozen=True)
class Noise:
    """Differences of runs of one config.

    Attributes:
        series: [n], int64; consecutive for a series and a pair of runs.
        iterations: [n], int64, ascending within a series and a pair.
        pair: [n], int64: the pair of runs.
        differences: [n], on the statistic's scale.
    """

    series: Ints
    iterations: Ints
    pair: Ints
    differences: Floats


@dataclass(frozen=True)
class Spread:
    """The ordinary spread of the series of some families.

    Attributes:
        edges: [parts - 1]: the first iterations of the parts of the run.
        of_family: [families, parts]: as measured; nan without noise.
        least: [families]: the smallest credible spread.
        ratio: [series]: the spread of the series, relative to its family.
        degrees: [series]: the degrees of freedom of this ratio.
    """

    edges: Ints
    of_family: Floats
    least: Floats
    ratio: Floats
    degrees: Floats

    def at(self, families: Ints, series: Ints, iterations: Ints) -> Floats:
        """The spread of a difference of a family's series at an iteration; nan where no noise is known."""
        measured = self._measured(families, series, iterations)
        return np.where(np.isnan(measured), np.nan, np.fmax(measured, self.least[families]))

    def degrees_at(self, families: Ints, series: Ints, iterations: Ints) -> Floats:
        """The degrees of freedom of :meth:`at`: as measured, and many if the smallest credible spread stands for the
        measured one (Welch and Satterthwaite).
        """
        measured = np.fmin(self._measured(families, series, iterations), self.least[families])
        with np.errstate(divide="ignore"):
            degrees = self.degrees[series] * (self.least[families] / measured) ** 4
        return np.fmin(degrees, _MOST)

    def _measured(self, families: Ints, series: Ints, iterations: Ints) -> Floats:
        return self.of_family[families, np.searchsorted(self.edges, iterations, "right")] * self.ratio[series]


def measure(noise: Noise, family_of: Ints, families: int, least: Floats, lasting: int) -> Spread:
    """Estimate the spread of the noise.

    Args:
        family_of: [series]: the family of each series.
        least: [families]: the smallest credible spread.
        lasting: the minimum number of steps of a difference.
    """
    edges = _edges(np.unique(noise.iterations), lasting)
    parts = len(edges) + 1
    part = np.searchsorted(edges, noise.iterations, "right")
    family = family_of[noise.series]
    number = len(family_of)
    of_series = grouped_spread(noise.series * parts + part, noise.differences, number * parts)
    known = np.flatnonzero(~np.isnan(of_series))
    its_family = family_of[known // parts] * parts + known % parts
    middle = grouped_quantile(its_family, of_series[known], families * parts, 0.5)
    tame = np.minimum(of_series[known], _WILD * middle[its_family])
    by_part = grouped_spread(its_family, tame, families * parts).reshape(families, parts)
    of_family = _beside(by_part)
    of_family = np.where(np.isnan(of_family), np.nan, np.fmax(of_family, _HARDLY_ANY * least[:, None]))

    normed = noise.differences / of_family[family, part]
    ratio = grouped_spread(noise.series, normed, number)
    own = _effective(noise, number)
    has = own > 0
    prior = _degrees_of_families(ratio[has], own[has])
    squares = np.where(has, ratio, 1.0) ** 2
    moderated = (prior + own * squares) / (prior + own)
    # One that its family cannot explain stands for itself.
    alone = squares > 1 + 4 * np.sqrt(2 / np.fmax(own, 1.0))
    degrees = 1 / (1 / (prior + own) + 1 / np.fmax(np.bincount(family_of, own, families), 1.0)[family_of])
    return Spread(edges, of_family, least, np.sqrt(np.where(alone, np.fmax(squares, moderated), moderated)), degrees)


def _edges(steps: Ints, lasting: int) -> Ints:
    """The first iterations of the parts of the run. The first parts have 1, 1, 2, 4, ... steps, as long as these are
    shorter than the others: noise changes fastest in the first steps.
    """
    parts = int(np.clip(len(steps) // (4 * lasting), 1, _MOST_PARTS))
    width = len(steps) // parts
    early = 2 ** np.arange(width.bit_length() - 1)
    return np.asarray(steps[np.concatenate([early, (np.arange(1, parts) * len(steps)) // parts])])


def _beside(by_part: Floats) -> Floats:
    """The largest value of each part and its neighbours; parts without noise have the value of the nearest other
    one.
    """
    known = ~np.isnan(by_part)
    parts = by_part.shape[1]
    places = np.arange(parts)
    distance = np.where(known[:, None, :], np.abs(places[None, :, None] - places[None, None, :]), parts)
    filled = np.take_along_axis(by_part, distance.argmin(2), 1)
    padded = np.pad(filled, ((0, 0), (1, 1)), mode="edge")
    return np.fmax(np.fmax(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:])


def _effective(noise: Noise, number: int) -> Floats:
    """[series]: the effective number of independent differences, by the correlation from step to step; a constant
    difference counts once. Clipped values count less.
    """
    values, series = noise.differences, noise.series
    follows = (series[1:] == series[:-1]) & (noise.pair[1:] == noise.pair[:-1])
    squares = np.bincount(series, values**2, number)
    products = np.bincount(series[1:][follows], (values[1:] * values[:-1])[follows], number)
    counts = np.bincount(series, minlength=number).astype(np.float64)
    pairs = np.zeros(number)
    starts = np.flatnonzero(np.append(True, ~follows)) if len(series) else np.empty(0, np.int64)
    np.add.at(pairs, series[starts], 1.0)
    correlation = np.divide(products, squares, out=np.ones(number), where=squares > 0)
    # A sum of products has fewer terms than one of squares.
    correlation *= np.divide(counts, counts - pairs, out=np.ones(number), where=counts > pairs)
    correlation = np.clip(correlation, 0, 1)
    worth = 0.8 * counts * (1 - correlation) / (1 + correlation)
    return np.where(counts > 0, np.fmax(worth, pairs), 0.0)


def _degrees_of_families(ratios: Floats, own: Floats) -> float:
    """The degrees of freedom of a family for its series: many if the spreads of its series differ no more than
    estimates do.

    With d degrees, the squares of the ratios have an F distribution, with the series' own and d degrees of freedom. Its
    distance from the median to the 90th percentile is computed from draws, for each d.
    """
    if len(ratios) < 8:
        return _FEWEST
    logs = np.log(np.fmax(ratios, _LEAST_RATIO) ** 2)
    draw = np.random.default_rng(0)
    freedom = draw.choice(own, _DRAWS)
    mine = np.log(draw.chisquare(freedom) / freedom)
    grid = np.geomspace(_FEWEST, 1000.0, 24)
    drawn = [_upper(mine - np.log(draw.chisquare(degrees, _DRAWS) / degrees)) for degrees in grid]
    if _upper(logs) <= min(_upper(mine), drawn[-1]):
        return _MOST
    return float(np.interp(_upper(logs), drawn[::-1], grid[::-1]))


def _upper(values: Floats) -> float:
    median, high = np.quantile(values, (0.5, 0.9))
    return float(high - median)


def bounds(degrees: Floats, looked_at: int) -> Floats:
    """The bound for a difference in multiples of its spread: of ``looked_at`` ordinary differences together,
    :data:`FALSE_FINDINGS` exceed it.
    """
    return _students(degrees, FALSE_FINDINGS / max(looked_at, 1))


def _students(degrees: Floats, probability: float) -> Floats:
    inverse = np.linspace(0, 1 / _FEWEST, 33)
    table = _beyond(probability, 1 / np.fmax(inverse, 1 / _MOST))
    return np.interp(1 / np.fmax(degrees, _FEWEST), inverse, table)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


def _beyond(probability: float, degrees: Floats) -> Floats:
    low, high = np.zeros(len(degrees)), np.full(len(degrees), 1e6)
    for _ in range(100):
        middle = (low + high) / 2
        is_beyond = 2 * _tail(middle, degrees) > probability
        low, high = np.where(is_beyond, middle, low), np.where(is_beyond, high, middle)
    return high


def _tail(bounds: Floats, degrees: Floats) -> Floats:
    """[n]: P(t > bound), of bounds above 0. With t = bound / u the density is integrated over u from 0 to 1."""
    constant = [math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi) for n in degrees]
    u = (_NODES + 1) / 2
    t = bounds[:, None] / u
    density = np.exp(-(degrees[:, None] + 1) / 2 * np.log1p(t * t / degrees[:, None]))
    return np.asarray(constant * bounds * (density @ (_WEIGHTS / 2 / u**2)))
