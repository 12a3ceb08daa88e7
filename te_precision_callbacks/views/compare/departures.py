"""The search for departures: series that differ by more than noise, since when, and how far.

Both sides' values are compared on scales, with a noise floor: how far runs of one config are apart.

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

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.recorded import Curve
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.views.compare.result import ComparisonError, StatisticDeparture
from te_precision_callbacks.views.report.data import curves_of, pieces

_NOTHING = Curve(np.empty(0, np.int64), np.empty(0))


class Pair(NamedTuple):
    """The values of a series on two sides, at their common steps, [n]."""

    iterations: Ints
    a: Floats
    b: Floats


def join(a: Curve, b: Curve) -> Pair:
    iterations, rows_a, rows_b = np.intersect1d(a.iterations, b.iterations, assume_unique=True, return_indices=True)
    return Pair(iterations, a.values[rows_a], b.values[rows_b])


class Side:
    """One side of a comparison.

    Attributes:
        subjects: subject -> its number: the series of the run, then the metrics of the trainer by name.
        metrics: the curves of the metrics.
        counts: the number of values of each subject.
        layers: scope and name of the layers with statistics, in the order of the records.
    """

    def __init__(self, run: RecordedRun, name: str) -> None:
        self.run = run
        self.name = name
        self.subjects: dict[Subject, int] = {}
        for number, subject in enumerate(run.subjects):
            request = logged_request(subject.statistic) if subject.tensor else None
            if request is None or not request.statistic.is_histogram:
                self.subjects[subject] = number
        self.layers = dict.fromkeys((subject.scope, subject.layer) for subject in self.subjects if subject.layer)
        metrics = sorted(run.metrics)
        for number, metric in enumerate(metrics, len(run.subjects)):
            self.subjects[Subject("", "", "", "", metric, None)] = number
        if not self.subjects:
            raise ComparisonError(f"{name} has no statistics and no loss yet.{run.notes_sentence}")
        self.metrics = [run.metrics[metric] for metric in metrics]
        lengths = [len(curve.values) for curve in self.metrics]
        self.counts = np.append(run.series["count"].to_numpy(), lengths).astype(np.int64)

    def read(self, subjects: Sequence[Subject]) -> list[Curve]:
        """Read the values of subjects; empty for a subject that this side lacks."""
        numbers = [self.subjects.get(subject, -1) for subject in subjects]
        first_metric = len(self.run.subjects)
        curves = curves_of(self.run, [number for number in numbers if 0 <= number < first_metric], whole=True)
        curves |= dict(enumerate(self.metrics, first_metric))
        return [curves.get(number, _NOTHING) for number in numbers]


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

    def resolution_of(self, curves: Sequence[Curve]) -> float:
        """The resolution of a series, given its values in all runs, A first; nan on the scale of shares."""
        if not self.resolution:
            return math.nan
        size = 2.0
        if self.resolution == "usual":
            size = _quantile(np.abs(curves[0].values), 0.5)
        elif self.resolution == "smallest":
            magnitudes = np.abs(np.concatenate([curve.values for curve in curves]))
            size = _BELOW_SMALLEST * float(magnitudes[magnitudes > 0].min(initial=np.inf))
        if 0 < size < math.inf:
            return size
        return 1.0

    def places(self, values: Floats, resolution: float) -> Floats:
        """Map values to places on the scale, including inf and nan; both [n]."""
        scaled = values
        if self.resolution:
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = np.arcsinh(values / resolution) / self.step
        scaled = np.where(np.isinf(values), np.copysign(_INFINITE, values), scaled)
        return np.where(np.isnan(values), _NAN, scaled)

    def differences(self, pair: Pair, resolution: float) -> Floats:
        return self.places(pair.b, resolution) - self.places(pair.a, resolution)


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


class NoiseFloor:
    """The spread of the noise in a family.

    Args:
        noise: [series][pairs]: the differences between runs of one config.
        least: the minimum spread.
        lasting: the minimum number of steps of a difference.

    Attributes:
        ratio: [series]: the spread of the series, relative to the family; 1 or more; nan without noise.
        bound: the smallest difference that counts, in spreads.
    """

    def __init__(self, noise: Sequence[Sequence[Curve]], least: float, lasting: int) -> None:
        pooled = [Curve._make(map(np.concatenate, zip(_NOTHING, *curves, strict=True))) for curves in noise]
        self._edges = _part_edges(np.unique(np.concatenate([iterations for iterations, _ in pooled])), lasting)
        parts = len(self._edges) + 1
        by_series = np.full((len(noise), parts), np.nan)
        for row, (iterations, differences) in enumerate(pooled):
            part = np.searchsorted(self._edges, iterations, "right")
            for part_number in np.unique(part).tolist():
                by_series[row, part_number] = _spread(differences[part == part_number])
        by_part = np.full(parts + 2, np.nan)
        for part_number, spreads in enumerate(by_series.T, 1):
            measured = spreads[~np.isnan(spreads)]
            by_part[part_number] = _spread(np.minimum(measured, _WILD * _quantile(measured, 0.5)))
        # A beginning may be in the part before.
        self._by_part = np.maximum(np.fmax(np.fmax(by_part[:-2], by_part[2:]), by_part[1:-1]), least)
        self.ratio = np.ones(len(noise))
        for row, curve in enumerate(pooled):
            self.ratio[row] = np.maximum(_spread(curve.values / self.spread(row, curve.iterations)), 1.0)
        # The bound is above the largest lasting difference, in one direction, within the noise.
        self.bound = _LEAST_BOUND
        for row, curves in enumerate(noise):
            for iterations, differences in curves:
                if len(iterations) >= lasting:
                    multiples = differences / self.spread(row, iterations)
                    windows = np.lib.stride_tricks.sliding_window_view(multiples, lasting)
                    # It is negative where the direction changes.
                    largest = float(np.maximum(windows.min(1), -windows.max(1)).max())
                    self.bound = max(self.bound, _BEYOND_NOISE * largest)

    def spread(self, row: int, iterations: Ints) -> Floats:
        """The spread of the noise of a series, [n]; nan without noise."""
        return np.asarray(self._by_part[np.searchsorted(self._edges, iterations, "right")] * self.ratio[row])


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


def _spread(differences: Floats) -> float:
    """The root mean square, with the largest tenth clipped; nan without values.

    A median would not see a few series of a family that differ far more than the others.
    """
    if not len(differences):
        return math.nan
    sizes = np.abs(differences)
    clipped = np.minimum(sizes, _quantile(sizes, _CLIPPED_AT))
    return math.sqrt(float(clipped @ clipped) / len(sizes)) / _OF_CLIPPED


def _quantile(values: Floats, share: float) -> float:
    """A quantile, of its numbers the upper one; nan without values."""
    if not len(values):
        return math.nan
    return float(np.sort(values)[min(int(len(values) * share), len(values) - 1)])


_PART_OF_BOUND = 0.5
_LEAST_BEGIN = 4.0
"""A difference that has passed the bound began where it passed half of it, which is at least so many spreads."""


class ComparedValues(NamedTuple):
    """The values of a series on both sides.

    Attributes:
        resolution: of the series, on its scale.
        difference: [n]: on the scale.
        limit: [n]: the smallest difference that counts.
        begin: the index of the first value of the lasting difference; None without one.
    """

    subject: Subject
    scale: Scale
    resolution: float
    pair: Pair
    difference: Floats
    limit: Floats
    begin: int | None


@dataclass
class Search:
    """The search for lasting differences, with its counts.

    Attributes:
        lasting: the minimum number of steps of a difference; in shorter series it must last all steps.
        show: receives each compared series.
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
        counts = self.a.counts[[self.a.subjects[subject] for subject in ordered]]
        departures: list[tuple[Subject, StatisticDeparture]] = []
        for piece in pieces(counts):
            sides = [side.read(ordered[piece]) for side in (self.a, self.b, *self.noise)]
            rows = zip(ordered[piece], *sides, strict=True)
            for _, family_rows in itertools.groupby(rows, key=lambda row: family(row[0])):
                departures += self._compare([(subject, curves) for subject, *curves in family_rows])
        return sorted(departures, key=lambda departed: self.a.subjects[departed[0]])

    def _compare(self, rows: Sequence[tuple[Subject, Sequence[Curve]]]) -> Iterator[tuple[Subject, StatisticDeparture]]:
        """Compare the series of a family, given their values in both runs and in the baselines."""
        scale = scale_of(rows[0][0].tensor, rows[0][0].statistic)
        resolutions = [scale.resolution_of(curves) for _, curves in rows]
        noise = []
        for (_, curves), resolution in zip(rows, resolutions, strict=True):
            pairs = [join(*pair) for pair in itertools.combinations((curves[0], *curves[2:]), 2)]
            noise.append([Curve(pair.iterations, scale.differences(pair, resolution)) for pair in pairs])
        floor = NoiseFloor(noise, scale.least, self.lasting)
        if self.noise:
            self.without_noise += int(np.isnan(floor.ratio).sum())
        for number, ((subject, curves), resolution) in enumerate(zip(rows, resolutions, strict=True)):
            pair = join(curves[0], curves[1])
            if not len(pair.iterations):
                self.without_steps += 1
                continue
            self.iterations = np.union1d(self.iterations, pair.iterations)
            self.all_equal &= np.array_equal(pair.a, pair.b, equal_nan=True)
            difference = scale.differences(pair, resolution)
            spread = floor.spread(number, pair.iterations)
            limit = np.where(np.isnan(spread), scale.bound, floor.bound * spread)
            starts, lengths = _stretches(difference, limit)
            starts = starts[lengths >= min(self.lasting, len(difference))]
            compared = ComparedValues(subject, scale, resolution, pair, difference, limit, None)
            if len(starts):
                # Extend the difference back to the beginning, by the lower threshold.
                lower = np.fmin(limit, np.maximum(_LEAST_BEGIN, _PART_OF_BOUND * floor.bound) * spread)
                begins, lengths = _stretches(difference, lower)
                containing = np.searchsorted(begins, starts[0], "right") - 1
                begin = int(begins[containing])
                compared = compared._replace(begin=begin)
                yield subject, _describe_departure(compared, begin, int(lengths[containing]), float(spread[begin]))
            if self.show is not None:
                self.show(compared)


def _describe_departure(compared: ComparedValues, begin: int, length: int, spread: float) -> StatisticDeparture:
    """Describe a lasting difference, given the spread of the noise at its beginning."""
    subject, scale, _, (iterations, values_a, values_b), differences, limit, _ = compared
    end = begin + length
    a, b, difference = (float(np.sort(column[begin:end])[length // 2]) for column in (values_a, values_b, differences))
    if scale is MAGNITUDE and a < 0 and b < 0:  # the smaller magnitude is the larger value
        difference = -difference
    return StatisticDeparture(
        statistic=subject.statistic,
        gemm=subject.gemm,
        iteration=int(iterations[begin]),
        until=int(iterations[end - 1]),
        steps=length,
        to_the_end=end == len(iterations),
        a=a,
        b=b,
        difference=difference,
        unit=scale.unit,
        spread=None if math.isnan(spread) else spread,
        bound=float(limit[begin]),
        since=int(iterations[begin - 1]) + 1 if begin else 0,
    )


def _stretches(difference: Floats, limit: Floats) -> tuple[Ints, Ints]:
    """Find stretches with differences beyond a limit, of one sign; returns their starts and lengths.

    Inf and nan continue the stretch before them.
    """
    size = np.abs(difference)
    state: npt.NDArray[np.int8] = np.where(size > limit, np.sign(difference), 0).astype(np.int8)
    has_state = np.append(True, state[:-1] == 0) | (size <= NO_NUMBER)
    state = state[np.maximum.accumulate(np.where(has_state, np.arange(len(state)), 0))]
    starts = np.flatnonzero(np.append(True, state[1:] != state[:-1]))
    lengths = np.diff(np.append(starts, len(state)))
    beyond = state[starts] != 0
    return starts[beyond], lengths[beyond]
