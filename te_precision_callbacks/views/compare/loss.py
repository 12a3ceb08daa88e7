"""Comparison of the losses of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.vocabulary import HIGH_PRECISION, LOW_PRECISION
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.summary import is_loss, is_training_loss, loss_first
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.compare.departures import Side
from te_precision_callbacks.views.compare.result import LossComparison, LossSpike, LostLoss, Yardstick

_YARDSTICKS = {
    ("FP8 against BF16", 0.0025, "DeepSeek-V3, arXiv 2412.19437, 3.3"): ("high", "fp8"),
    ("NVFP4 against FP8, in the stable phase", 0.01, "NVIDIA, arXiv 2509.25149"): ("fp8", "nvfp4"),
}
"""Name, bound and source -> the precisions of both runs."""

_SPIKE = 10.0
"""The factor between the losses of one step that counts, if the running medians are no tenth of it apart."""

_PARTS_OF_WINDOW = 20
_LEAST_WINDOW = 5

Shares = Mapping[str, float]


class LossCurves(NamedTuple):
    """The losses of two sides at their common steps. A *lost* loss is not finite from a step to the end of its run.

    Attributes:
        steps: the number of steps before either loss is lost.
        window: the steps of the running median.
        smooth_a, smooth_b: [n], running medians; nan after ``steps``.
        relative: [n]: (b - a) / |a| of the running medians; nan where either is not finite.
        lost_a, lost_b: the steps of each lost loss.
    """

    name: Subject
    iterations: Ints
    a: Floats
    b: Floats
    steps: int
    window: int
    smooth_a: Floats
    smooth_b: Floats
    relative: Floats
    lost_a: LostLoss | None
    lost_b: LostLoss | None


def loss_curves(a: Side, b: Side) -> LossCurves | None:
    """The most likely loss among the metrics; preferably a lost loss, since a trainer may also log it filtered."""
    losses = {subject.statistic: subject for subject in a.scalars if subject in b.scalars}
    names = [losses[name] for name in loss_first(losses) if is_loss(name)]
    names.sort(key=lambda name: not (is_training_loss(name.statistic) and any(_lost(side, name) for side in (a, b))))
    if names:
        return _curves(a, b, names[0])
    return None


def _curves(a: Side, b: Side, name: Subject) -> LossCurves | None:
    left = a.read([name])
    right = b.read([name])
    iterations, at, there = np.intersect1d(left.iterations, right.iterations, assume_unique=True, return_indices=True)
    if not len(iterations):
        return None
    ours = left.values[at]
    theirs = right.values[there]
    lost = _lost(a, name), _lost(b, name)
    since = [loss.since for loss in lost if loss is not None]
    steps = int(np.searchsorted(iterations, min(since))) if since else len(iterations)
    window = min(max(_LEAST_WINDOW, steps // _PARTS_OF_WINDOW), steps)
    x = _smooth(ours, steps, window)
    y = _smooth(theirs, steps, window)
    return LossCurves(name, iterations, ours, theirs, steps, window, x, y, _relative(x, y), *lost)


def _lost(side: Side, name: Subject) -> LostLoss | None:
    numbers = side.read([name])
    finite = np.flatnonzero(np.isfinite(numbers.values))
    rest = slice(int(finite[-1]) + 1 if finite.size else 0, None)
    iterations = numbers.iterations[rest]
    kinds = {f"{value:g}" for value in numbers.values[rest].tolist()}
    if not kinds:
        return None
    return LostLoss(int(iterations[0]), int(iterations[-1]), " or ".join(sorted(kinds)))


def compare_losses(a: Side, b: Side, noise: Sequence[Side], shares: tuple[Shares, Shares]) -> LossComparison | None:
    """Compare the losses of two sides; None without a common loss. ``shares``: precision -> share of each side."""
    curves = loss_curves(a, b)
    if curves is None:
        return None
    iterations = curves.iterations[: curves.steps]
    relative = curves.relative[: curves.steps]
    stable = _stable(curves.steps)
    early = curves.steps // 4
    difference = _mean(relative[stable])
    baselines = []
    floors = []
    for side in noise:
        baseline = _curves(a, side, curves.name) if curves.name in side.scalars else None
        if baseline is not None:
            baselines.append(baseline)
            floors.append(abs(_mean(baseline.relative[: baseline.steps][_stable(baseline.steps)])))
    sizes = np.nan_to_num(np.abs(relative[early:]), nan=-1.0, posinf=np.inf)
    largest = early + int(sizes.argmax()) if sizes.size else None
    kinds = (_kind(shares[0]), _kind(shares[1]))
    yardsticks = []
    for (name, bound, source), runs in _YARDSTICKS.items():
        is_comparable = kinds == runs and not math.isnan(difference)
        yardsticks.append(Yardstick(name, bound, source, abs(difference) < bound if is_comparable else None))
    return LossComparison(
        curves.name.statistic,
        curves.steps,
        curves.window,
        int(curves.iterations[0] if largest is None else iterations[stable][0]),
        _mean(curves.smooth_a[: curves.steps][stable]),
        _mean(curves.smooth_b[: curves.steps][stable]),
        difference,
        math.nan if largest is None else float(abs(relative[largest])),
        int(curves.iterations[0] if largest is None else iterations[largest]),
        max(floors, default=None),
        tuple(yardsticks),
        _spike(curves, baselines),
        (_precision(shares[0]), _precision(shares[1])),
        curves.lost_a,
        curves.lost_b,
    )


def _mean(values: Floats) -> float:
    there = values[~np.isnan(values)]
    if there.size:
        return float(there.mean())
    return math.nan


def _spike(curves: LossCurves, noise: Sequence[LossCurves]) -> LossSpike | None:
    """Find steps with very different losses but similar running medians; None if the noise has such steps too."""
    factors = _spikes(curves)
    at = int(factors.argmax()) if factors.size else None
    if at is None or factors[at] < _SPIKE or any(_spikes(curve).max(initial=0.0) >= factors[at] for curve in noise):
        return None
    steps = int((factors >= _SPIKE).sum())
    return LossSpike(steps, int(curves.iterations[at]), float(curves.a[at]), float(curves.b[at]))


def _spikes(curves: LossCurves) -> Floats:
    """The factor between two losses in each step before one is lost; 1 if the factor between their running medians is
    a tenth of it or more.
    """
    shown = slice(curves.steps)
    factors = _factors(curves.a[shown], curves.b[shown])
    smooth = _factors(curves.smooth_a[shown], curves.smooth_b[shown])
    return np.where(factors >= _SPIKE * smooth, factors, 1.0)


def _factors(a: Floats, b: Floats) -> Floats:
    """The larger magnitude divided by the smaller one; inf where only one of them is 0, inf or nan."""
    x = np.where(np.isfinite(a), np.abs(a), np.inf)
    y = np.where(np.isfinite(b), np.abs(b), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x == y, 1.0, np.maximum(x, y) / np.minimum(x, y))


def _smooth(values: Floats, steps: int, window: int) -> Floats:
    """The running median over ``window`` steps, fewer at both ends; nan without finite values, and after ``steps``."""
    medians = np.full(len(values), np.nan)
    if steps:
        padded = np.pad(values[:steps], (window // 2, window - 1 - window // 2), constant_values=np.nan)
        windows = np.lib.stride_tricks.sliding_window_view(padded, window)
        some = np.flatnonzero(~np.isnan(windows).all(axis=1))
        with np.errstate(invalid="ignore"):
            medians[some] = np.nanmedian(windows[some], axis=1)
    return medians


def _relative(x: Floats, y: Floats) -> Floats:
    """(y - x) / |x|; nan where either is not finite, inf where only x is 0, and 0 where both are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(x == y, 0.0, (y - x) / np.abs(x))
    return np.where(np.isfinite(x) & np.isfinite(y), relative, np.nan)


def _stable(steps: int) -> slice:
    return slice(max(min(steps - 1, 3 * steps // 4), 0), steps)


def _kind(shares: Shares) -> str:
    """``nvfp4`` or ``fp8`` if any product uses it, else ``high``; empty if unknown."""
    for kind in ("nvfp4", "fp8"):
        if not LOW_PRECISION[kind].isdisjoint(shares):
            return kind
    if not shares.keys().isdisjoint(HIGH_PRECISION):
        return "high"
    return ""


def _precision(shares: Shares) -> str:
    kind = _kind(shares)
    if kind == "high":
        return max(shares, key=shares.__getitem__)
    return kind
