"""Compares the losses of two runs with what is known to be ordinary in low precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.vocabulary import HIGH_PRECISION, LOW_PRECISION
from te_precision_callbacks.runs.answers import is_loss, loss_first
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.result import LossComparison, LossSpike, Yardstick
from te_precision_callbacks.views.compare.sides import Floats, Ints, Side

_FP8_AGAINST_BF16 = ("FP8 against BF16", 0.0025, "DeepSeek-V3, arXiv 2412.19437, 3.3")
_NVFP4_AGAINST_FP8 = ("NVFP4 against FP8, in the stable phase", 0.01, "NVIDIA, arXiv 2509.25149")

_SPIKE = 10.0
"""The factor between the losses of one step that counts, if the running medians are no tenth of it apart."""

_PARTS_OF_WINDOW, _LEAST_WINDOW = 20, 5

Shares = Mapping[str, float]
"""Precision -> its share of a run's multiply-adds."""


class LossCurves(NamedTuple):
    """The losses of two sides at the steps that both have.

    Attributes:
        name: the number's name.
        iterations: [n].
        a, b: [n].
        window: the steps of the running median.
        smooth_a, smooth_b: [n], as running medians.
        relative: [n]: (b - a) / |a| of these.
    """

    name: str
    iterations: Ints
    a: Floats
    b: Floats
    window: int
    smooth_a: Floats
    smooth_b: Floats
    relative: Floats


def loss_curves(a: Side, b: Side) -> LossCurves | None:
    """The losses of two sides; None if they have none in common."""
    name = _in_common(a, b)
    return None if name is None else _curves(a, b, name)


def _in_common(a: Side, b: Side) -> Subject | None:
    return next((subject for subject in _losses(a) if subject in b.scalars), None)


def _curves(a: Side, b: Side, name: Subject) -> LossCurves | None:
    iterations, ours, theirs = _common(a, b, name)
    if not len(iterations):
        return None
    window = min(max(_LEAST_WINDOW, len(iterations) // _PARTS_OF_WINDOW), len(iterations))
    x, y = _smooth(ours, window), _smooth(theirs, window)
    return LossCurves(name.statistic, iterations, ours, theirs, window, x, y, _relative(x, y))


def compare_losses(a: Side, b: Side, noise: Sequence[Side], shares: tuple[Shares, Shares]) -> LossComparison | None:
    """The losses of two sides; None if they have none in common.

    Args:
        a, b: the sides.
        noise: sides whose differences from a are ordinary.
        shares: what each side computes in, as far as it is known.
    """
    name = _in_common(a, b)
    curves = None if name is None else _curves(a, b, name)
    if name is None or curves is None:
        return None
    iterations, relative = curves.iterations, curves.relative
    stable, early = _stable(len(relative)), len(relative) // 4
    difference = float(relative[stable].mean())
    floors = [abs(_stable_relative(a, side, name)) for side in noise if name in side.scalars]
    largest = early + int(np.abs(relative[early:]).argmax())
    return LossComparison(
        curves.name,
        len(iterations),
        curves.window,
        int(iterations[stable][0]),
        float(curves.smooth_a[stable].mean()),
        float(curves.smooth_b[stable].mean()),
        difference,
        float(abs(relative[largest])),
        int(iterations[largest]),
        max(floors, default=None),
        _yardsticks(difference, *shares),
        _spike(curves, [found for side in noise if (found := _curves(a, side, name)) is not None]),
        (_precision(shares[0]), _precision(shares[1])),
    )


def _spike(curves: LossCurves, noise: Sequence[LossCurves]) -> LossSpike | None:
    """The steps whose losses are far apart though the running medians are not, unless the noise has such steps too."""
    factors = _spikes(curves)
    at = int(factors.argmax())
    if factors[at] < _SPIKE or any(_spikes(each).max() >= factors[at] for each in noise):
        return None
    steps = int((factors >= _SPIKE).sum())
    return LossSpike(steps, int(curves.iterations[at]), float(curves.a[at]), float(curves.b[at]))


def _spikes(curves: LossCurves) -> Floats:
    """The factor between two losses in each step; 1 where their running medians have a tenth of it or more."""
    factors = _factors(curves.a, curves.b)
    return np.where(factors >= _SPIKE * _factors(curves.smooth_a, curves.smooth_b), factors, 1.0)


def _factors(a: Floats, b: Floats) -> Floats:
    """The larger magnitude by the smaller one; inf where one of them alone is 0, inf or nan."""
    x, y = (np.where(np.isfinite(values), np.abs(values), np.inf) for values in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x == y, 1.0, np.maximum(x, y) / np.minimum(x, y))


def _losses(side: Side) -> list[Subject]:
    """The trainer's numbers that are a loss of training, the likeliest first."""
    losses = {subject.statistic: subject for subject in side.scalars if is_loss(subject.statistic)}
    return [losses[name] for name in loss_first(losses)]


def _common(a: Side, b: Side, name: Subject) -> tuple[Ints, Floats, Floats]:
    (first, ours), (second, theirs) = (
        (numbers.iterations, numbers.values) for numbers in (a.read([name]), b.read([name]))
    )
    iterations, one, other = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    return iterations, ours[one], theirs[other]


def _smooth(values: Floats, window: int) -> Floats:
    """The running median over ``window`` steps, of fewer at both ends."""
    padded = np.pad(values, (window // 2, window - 1 - window // 2), constant_values=np.nan)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1))


def _relative(x: Floats, y: Floats) -> Floats:
    """(y - x) / |x|; inf where only y is no number, and 0 where x is 0 and y too."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (y - x) / np.abs(x)
    found = np.where(x == y, 0.0, found)
    return np.where(np.isnan(found), np.inf, found)


def _stable(steps: int) -> slice:
    return slice(min(steps - 1, 3 * steps // 4), steps)


def _stable_relative(a: Side, b: Side, name: Subject) -> float:
    curves = _curves(a, b, name)
    return 0.0 if curves is None else float(curves.relative[_stable(len(curves.relative))].mean())


def _yardsticks(relative: float, ours: Shares, theirs: Shares) -> tuple[Yardstick, ...]:
    """The known bounds; with what the runs compute in, the one that is for B against A."""
    kinds = (_kind(ours), _kind(theirs))
    return tuple(
        Yardstick(name, bound, source, abs(relative) < bound if kinds == runs else None)
        for (name, bound, source), runs in (
            (_FP8_AGAINST_BF16, ("high", "fp8")),
            (_NVFP4_AGAINST_FP8, ("fp8", "nvfp4")),
        )
    )


def _kind(shares: Shares) -> str:
    """``nvfp4`` or ``fp8`` where any of it is used, else ``high``; empty if nothing is known."""
    for kind in ("nvfp4", "fp8"):
        if any(name in LOW_PRECISION[kind] for name in shares):
            return kind
    return "high" if any(name in HIGH_PRECISION for name in shares) else ""


def _precision(shares: Shares) -> str:
    """The low precision of a run if it has one, else the precision of its largest share."""
    kind = _kind(shares)
    return max(shares, key=shares.__getitem__) if kind == "high" else kind
