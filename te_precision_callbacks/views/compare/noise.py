"""The values of both sides, scales for their differences, and the noise floor: how far runs of one config are apart.

Magnitudes differ by factors (an amax of 400 is as far from 200 as 0.04 from 0.02), shares by points (6 % is as far from
5 % as 2 % from 1 %). The scale of magnitudes is asinh(value / resolution), which is the logarithm of values far above
the resolution, and has a place for 0 and for negative values.

One pair of runs has a single sample of a constant difference, such as between two initializations. Therefore the spread
of the noise is estimated for a *family* (one statistic of one tensor in all layers) from all its series, separately for
each part of the run. The first parts are short, since runs of one seed are equal before the first update. A series with
a larger spread than its family keeps its own spread. A spread is the standard deviation of normal noise with the same
clipped magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

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


# ---------------------------------------------------------------------- scales

_INFINITE = 2000.0
_NAN = 4000.0
"""The places of inf and nan on every scale, beyond all numbers."""

NO_NUMBER = 1000.0
"""A difference beyond it is one with inf or nan."""


class Scale(NamedTuple):
    """A scale for differences of a statistic.

    Attributes:
        least: the minimum spread, however small the observed noise.
        bound: the smallest difference that counts without a noise floor.
        step: the width of a unit on the scale of magnitudes; nan on the scale of shares.
        resolution: what the resolution of magnitudes follows from.
    """

    unit: str
    least: float
    bound: float
    step: float = math.nan
    resolution: Literal["smallest", "usual", "elements", ""] = ""


_BELOW_SMALLEST = 2.0**-19
"""The resolution of magnitudes, relative to the smallest one of a series: 0 is 20 powers of two below that."""

MAGNITUDE = Scale("powers of two", 0.01, 1.0, math.log(2), "smallest")
SQUARE = MAGNITUDE._replace(bound=2.0)
COUNT = MAGNITUDE._replace(resolution="elements")
LEVEL = Scale("of its size", 0.02, 6.0, 1.0, "usual")
SHARE = Scale("points", 0.02, 5.0)
DECIBELS = Scale("dB", 0.1, 3.0)
POWERS = Scale("powers of two", 0.05, 12.0)

_BY_UNIT = {
    "of the tensor": MAGNITUDE,
    "square of the tensor's": SQUARE,
    "%": SHARE,
    "dB": DECIBELS,
    "powers of two": POWERS,
    "elements": COUNT,
}


def scale_of(tensor: str, statistic: str) -> Scale:
    """The scale of a statistic; ``tensor`` is empty for a metric of the trainer or of a custom feature."""
    request = logged_request(statistic) if tensor else None
    if request is None:
        if statistic.endswith("%"):
            return SHARE
        return LEVEL
    if request.statistic.signed:
        return LEVEL
    return _BY_UNIT.get(request.statistic.unit, LEVEL)


@dataclass(frozen=True)
class Families:
    """The series of a search by family, with their scales.

    Attributes:
        scales: [families].
        number: [series]: the family of each series.
        step, resolution: [series]: as in :class:`Scale`.
    """

    scales: Sequence[Scale]
    number: Ints
    step: Floats
    resolution: Floats

    @classmethod
    def of(cls, subjects: Sequence[Subject], sides: Sequence[Numbers]) -> Families:
        """``sides``: the values of both runs, then of the baselines."""
        names: dict[tuple[str, str, str], int] = {}
        number = np.array([names.setdefault(family(subject), len(names)) for subject in subjects], np.int64)
        scales = [scale_of(tensor, statistic) for tensor, _, statistic in names]
        smallest = np.full(len(subjects), np.inf)
        for side in sides:
            magnitudes = np.abs(side.values)
            above = magnitudes > 0
            np.minimum.at(smallest, side.series[above], magnitudes[above])
        usual = _quantile(sides[0].series, np.abs(sides[0].values), len(subjects), 0.5)
        resolution = np.full(len(subjects), np.nan)
        for own, scale in enumerate(scales):
            rows = number == own
            if scale.resolution == "elements":
                resolution[rows] = 2.0
            elif scale.resolution:
                sizes = smallest[rows] * _BELOW_SMALLEST if scale.resolution == "smallest" else usual[rows]
                resolution[rows] = np.where(np.isfinite(sizes) & (sizes > 0), sizes, 1.0)
        step = np.array([scale.step for scale in scales])[number]
        return cls(scales, number, step, resolution)

    def bounds(self, series: Ints) -> Floats:
        return np.array([scale.bound for scale in self.scales])[self.number[series]]

    def places(self, series: Ints, values: Floats) -> Floats:
        """Map values to places on the scales of their series, including inf and nan; both [n]."""
        step = self.step[series]
        with np.errstate(over="ignore", invalid="ignore"):
            places = np.arcsinh(values / self.resolution[series]) / step
        places = np.where(np.isnan(step), values, places)
        places = np.where(np.isinf(values), np.copysign(_INFINITE, values), places)
        return np.where(np.isnan(values), _NAN, places)

    def differences(self, pair: Joined) -> Floats:
        return self.places(pair.series, pair.b) - self.places(pair.series, pair.a)


def family(subject: Subject) -> tuple[str, str, str]:
    return subject.tensor, subject.gemm, subject.statistic


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
    """The spread of the noise.

    Attributes:
        families: of the series.
        edges: [parts - 1]: the first iteration of each part of the run but the first.
        by_part: [families, parts]: the spread of each family.
        ratio: [series]: the spread of the series, relative to its family; 1 or more; nan without noise.
        bound: [families]: the smallest difference that counts, in spreads.
    """

    families: Families
    edges: Ints
    by_part: Floats
    ratio: Floats
    bound: Floats

    @classmethod
    def measure(cls, pairs: Sequence[Joined], families: Families, lasting: int) -> NoiseFloor:
        """Estimate the spread from the pairs of runs of one config.

        Args:
            lasting: the minimum number of steps of a difference.
        """
        count = len(families.scales)
        nothing = Joined(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))
        pooled = Joined._make(map(np.concatenate, zip(nothing, *pairs, strict=True)))
        series, iterations, _, _ = pooled
        differences = families.differences(pooled)
        sizes = np.abs(differences)
        edges = _part_edges(np.unique(iterations), lasting)
        parts = len(edges) + 1
        part = np.searchsorted(edges, iterations, "right")
        by_series = _spread(series * parts + part, sizes, len(families.number) * parts)
        measured = np.flatnonzero(~np.isnan(by_series))
        family_part = families.number[measured // parts] * parts + measured % parts
        medians = _quantile(family_part, by_series[measured], count * parts, 0.5)
        usual = np.minimum(by_series[measured], _WILD * medians[family_part])
        by_part = _spread(family_part, usual, count * parts).reshape(count, parts)
        padded = np.pad(by_part, ((0, 0), (1, 1)), constant_values=np.nan)
        by_part = np.fmax(np.fmax(padded[:, :-2], padded[:, 2:]), by_part)  # a beginning may be in the part before
        least = np.array([scale.least for scale in families.scales])
        by_part = np.maximum(by_part, least[:, None])
        multiples = sizes / by_part[families.number[series], part]
        ratio = np.maximum(_spread(series, multiples, len(families.number)), 1.0)
        floor = cls(families, edges, by_part, ratio, np.full(count, _LEAST_BOUND))
        if len(series) >= lasting:
            # Bounds are above the largest lasting differences, in one direction, within the noise.
            windows = np.lib.stride_tricks.sliding_window_view(differences / floor.spread(series, iterations), lasting)
            smallest = np.maximum(windows.min(1), -windows.max(1))  # negative where the direction changes
            pair = np.repeat(np.arange(len(pairs)), [len(joined.series) for joined in pairs])
            curve = pair * len(families.number) + series
            same = curve[lasting - 1 :] == curve[: len(windows)]
            number = families.number[series[: len(windows)][same]]
            np.maximum.at(floor.bound, number, _BEYOND_NOISE * smallest[same])
        return floor

    def spread(self, series: Ints, iterations: Ints) -> Floats:
        """[n]: the spread of the noise, given series and iteration of each difference; nan without noise."""
        part = np.searchsorted(self.edges, iterations, "right")
        return self.by_part[self.families.number[series], part] * self.ratio[series]


def _part_edges(steps: Ints, lasting: int) -> Ints:
    """The first iteration of each part of the run but the first.

    The first parts have 1, 1, 2, 4, ... steps, up to the width of the others: noise changes fastest at the beginning.
    """
    if not len(steps):
        return steps
    parts = int(np.clip(len(steps) // (4 * lasting), 1, _MOST_PARTS))
    width = len(steps) // parts
    early = 2 ** np.arange(width.bit_length() - 1)
    return np.asarray(steps[np.concatenate([early, (np.arange(1, parts) * len(steps)) // parts])])


def _spread(groups: Ints, sizes: Floats, count: int) -> Floats:
    """[count]: the root mean square of each group, with its largest tenth clipped; nan for an empty one.

    A median would not see a few series of a family that differ far more than the others.
    """
    clipped = np.minimum(sizes, _quantile(groups, sizes, count, _CLIPPED_AT)[groups])
    with np.errstate(invalid="ignore"):
        squares = np.bincount(groups, clipped**2, count) / np.bincount(groups, minlength=count)
    return np.asarray(np.sqrt(squares) / _OF_CLIPPED)


def _quantile(groups: Ints, values: Floats, count: int, share: float) -> Floats:
    """[count]: a quantile of each group, of its numbers the upper one; nan for an empty group. Arguments: [n]."""
    ordered = values[np.lexsort((values, groups))]
    counts = np.bincount(groups, minlength=count)
    ranks = np.cumsum(counts) - counts + np.minimum((counts * share).astype(np.int64), counts - 1)
    quantiles = np.full(count, np.nan)
    has = counts > 0
    quantiles[has] = ordered[ranks[has]]
    return quantiles
