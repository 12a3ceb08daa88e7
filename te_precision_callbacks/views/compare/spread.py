"""The noise floor: the ordinary spread of a statistic.

The differences of runs of one config are noise. One pair of runs has a single sample of a constant difference, such as
between two initializations. So statistics borrow from similar ones: the spread of a *family*, one statistic of one
tensor in all layers, is estimated from all its series together, for each part of the run. Parts are short at the
beginning, since runs of one seed are equal before the first update. A series whose own spread is larger than its
family's has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CLIPPED_AT = 0.9

_OF_CLIPPED = 0.9118
"""The root mean square of standard normal numbers that are clipped so."""

_WILD = 3.0
"""A series whose spread is more than so many times the median of its family's counts as that in the family's."""

_MOST_PARTS = 16


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
        of_family: [families, parts].
        ratio: [series]: the spread of the series, relative to its family; 1 or more.
    """

    edges: Ints
    of_family: Floats
    ratio: Floats

    def at(self, families: Ints, series: Ints, iterations: Ints) -> Floats:
        """The spread of a difference of a family's series at an iteration."""
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
    number = len(family_of)
    of_series = grouped_spread(noise.series * parts + part, noise.differences, number * parts)
    known = np.flatnonzero(~np.isnan(of_series))
    its_family = family_of[known // parts] * parts + known % parts
    middle = grouped_quantile(its_family, of_series[known], families * parts, 0.5)
    tame = np.minimum(of_series[known], _WILD * middle[its_family])
    by_part = grouped_spread(its_family, tame, families * parts).reshape(families, parts)
    of_family = np.fmax(_beside(by_part), least[:, None])
    normed = noise.differences / of_family[family_of[noise.series], part]
    return Spread(edges, of_family, np.fmax(grouped_spread(noise.series, normed, number), 1.0))


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
