"""Comparison of the losses of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from te_precision_callbacks.base.vocabulary import HIGH_PRECISION, LOW_PRECISION
from te_precision_callbacks.runs.recorded import Curve, RecordedRun
from te_precision_callbacks.runs.summary import is_loss, is_training_loss, loss_first
from te_precision_callbacks.statistics.arrays import Floats
from te_precision_callbacks.views.compare.departures import join
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


class LossCurves:
    """The losses of two sides at their common steps. A *lost* loss is not finite from a step to the end of its run.

    Attributes:
        steps: the number of steps before either loss is lost.
        window: the steps of the running median.
        smooth_a, smooth_b: [n], running medians; nan after ``steps``.
        relative: [n]: (b - a) / |a| of the running medians: nan where either is not finite, inf where only a is 0, 0
            where both are.
        lost_a, lost_b: the steps of each lost loss.
        stable: the last quarter of the steps.
        difference: the mean of ``relative`` there.
    """

    def __init__(self, name: str, a: Curve, b: Curve) -> None:
        self.name = name
        self.iterations, self.a, self.b = join(a, b)
        self.lost_a = _lost(a)
        self.lost_b = _lost(b)
        self.steps = len(self.iterations)
        for loss in filter(None, (self.lost_a, self.lost_b)):
            self.steps = min(self.steps, int(np.searchsorted(self.iterations, loss.since)))
        self.window = min(max(_LEAST_WINDOW, self.steps // _PARTS_OF_WINDOW), self.steps)
        self.smooth_a = _smooth(self.a, self.steps, self.window)
        self.smooth_b = _smooth(self.b, self.steps, self.window)
        with np.errstate(divide="ignore", invalid="ignore"):
            change = (self.smooth_b - self.smooth_a) / np.abs(self.smooth_a)
        self.relative = np.where(self.smooth_a == self.smooth_b, 0.0, change)
        self.relative[~(np.isfinite(self.smooth_a) & np.isfinite(self.smooth_b))] = np.nan
        self.stable = slice(3 * self.steps // 4, self.steps)
        self.difference = _mean(self.relative[self.stable])

    @property
    def spikes(self) -> Floats:
        """The factor between two losses in each step before one is lost; 1 if the factor between their running medians
        is a tenth of it or more.
        """
        factors = _factors(self.a[: self.steps], self.b[: self.steps])
        smooth = _factors(self.smooth_a[: self.steps], self.smooth_b[: self.steps])
        return np.where(factors >= _SPIKE * smooth, factors, 1.0)


def loss_curves(a: RecordedRun, b: RecordedRun) -> LossCurves | None:
    """The most likely loss among the metrics; preferably a lost loss, since a trainer may also log it filtered."""
    losses = [name for name in loss_first(a.metrics.keys() & b.metrics.keys()) if is_loss(name)]
    for name in losses:
        if is_training_loss(name) and (_lost(a.metrics[name]) or _lost(b.metrics[name])):
            return _curves(a, b, name)
    if losses:
        return _curves(a, b, losses[0])
    return None


def _curves(a: RecordedRun, b: RecordedRun, name: str) -> LossCurves | None:
    if name not in b.metrics:
        return None
    curves = LossCurves(name, a.metrics[name], b.metrics[name])
    if not len(curves.iterations):
        return None
    return curves


def _lost(curve: Curve) -> LostLoss | None:
    iterations, values = curve
    since = int(np.flatnonzero(np.isfinite(values)).max(initial=-1)) + 1
    if since == len(values):
        return None
    kinds = sorted({f"{value:g}" for value in values[since:].tolist()})
    return LostLoss(int(iterations[since]), int(iterations[-1]), " or ".join(kinds))


def compare_losses(
    a: RecordedRun, b: RecordedRun, noise: Sequence[RecordedRun] = (), shares: tuple[Shares, Shares] = ({}, {})
) -> LossComparison | None:
    """Compare the losses of two runs; None without a common loss. ``shares``: precision -> share of each run."""
    curves = loss_curves(a, b)
    if curves is None:
        return None
    baselines = [baseline for run in noise if (baseline := _curves(a, run, curves.name)) is not None]
    stable = curves.stable
    early = curves.steps // 4
    sizes = np.nan_to_num(np.abs(curves.relative[early:]), nan=-1.0, posinf=np.inf)
    index = early + int(sizes.argmax())
    precisions = (_precision(shares[0]), _precision(shares[1]))
    kinds = tuple("high" if name in HIGH_PRECISION else name for name in precisions)
    yardsticks = []
    for (name, bound, source), runs in _YARDSTICKS.items():
        holds = None
        if kinds == runs and not math.isnan(curves.difference):
            holds = abs(curves.difference) < bound
        yardsticks.append(Yardstick(name, bound, source, holds))
    return LossComparison(
        name=curves.name,
        steps=curves.steps,
        window=curves.window,
        stable_since=int(curves.iterations[stable.start]),
        begin=float(curves.smooth_a[0]),
        a=_mean(curves.smooth_a[stable]),
        b=_mean(curves.smooth_b[stable]),
        relative=curves.difference,
        largest=abs(float(curves.relative[index])),
        largest_at=int(curves.iterations[index]),
        floor=max((abs(baseline.difference) for baseline in baselines), default=None),
        yardsticks=tuple(yardsticks),
        spike=_spike(curves, baselines),
        precisions=precisions,
        lost_a=curves.lost_a,
        lost_b=curves.lost_b,
    )


def _mean(values: Floats) -> float:
    numbers = values[~np.isnan(values)]
    if numbers.size:
        return float(numbers.mean())
    return math.nan


def _spike(curves: LossCurves, noise: Sequence[LossCurves]) -> LossSpike | None:
    """Find steps with very different losses but similar running medians; None if the noise has such steps too."""
    spikes = curves.spikes
    largest = spikes.max(initial=0.0)
    if largest < _SPIKE or any(baseline.spikes.max(initial=0.0) >= largest for baseline in noise):
        return None
    index = int(spikes.argmax())
    steps = int((spikes >= _SPIKE).sum())
    return LossSpike(steps, int(curves.iterations[index]), float(curves.a[index]), float(curves.b[index]))


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


def _precision(shares: Shares) -> str:
    """``nvfp4`` or ``fp8`` if any product uses it, else the most frequent precision; empty if unknown."""
    for kind in ("nvfp4", "fp8"):
        if not LOW_PRECISION[kind].isdisjoint(shares):
            return kind
    return max(shares, key=shares.__getitem__, default="")
