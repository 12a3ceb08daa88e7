"""Paired seeds: the difference of final losses over several pairs of runs, and whether it is within a tolerance.

Runs i of both sides have the same seed, hence the same data, so the spread of their differences is small. A tolerance
is held if two one-sided tests at 5 % reject a difference beyond it on both sides, that is, if the 90 % confidence
interval is inside of it. The intervals follow from the normal distribution, widened for few pairs as Wallace does
(Biometrika 46, 1959), to Student's t or a little more: 4 % with 3 pairs, 1 % with 4; 39 % with 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.compare.loss import compare_losses
from te_precision_callbacks.views.compare.result import ComparisonError, LossComparison

TOLERANCE = 0.0025
"""Share of A's loss: the bound for FP8 against BF16 of DeepSeek-V3, arXiv 2412.19437, 3.3."""

_MOST_PAIRS = 1000

Decision = Literal["within", "beyond", "undecided"]


@dataclass(frozen=True)
class PairedDifference:
    """The difference of paired losses, b - a.

    A run of ``b`` whose loss is inf or nan is beyond the tolerance; one of ``a`` leaves it undecided.

    Attributes:
        a, b: mean losses.
        difference: mean difference, as a share of ``a``, like all other shares below.
        interval: its 95 % confidence interval; (nan, nan) with one pair.
        test_interval: its 90 % confidence interval, of the two one-sided tests.
        decision: whether the difference is shown to be within or beyond the tolerance.
        pairs_needed: how many pairs would decide, if mean and spread stay as they are; None if decided, for one pair,
            and beyond 1,000.
    """

    pairs: int
    a: float
    b: float
    difference: float
    interval: tuple[float, float]
    test_interval: tuple[float, float]
    tolerance: float
    decision: Decision
    pairs_needed: int | None


def paired_difference(a: Sequence[float], b: Sequence[float], tolerance: float = TOLERANCE) -> PairedDifference:
    """Compare the final losses of pairs of runs; a[i] and b[i] have the same seed.

    Raises:
        OptionError: the sides differ in length, or the tolerance is not a positive share.
    """
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance={tolerance} must be a share of the loss between 0 and 1, such as 0.0025.")
    _require_pairs(a, b)
    count = len(a)
    mean_a = float(np.mean(a))
    mean_b = float(np.mean(b))
    with np.errstate(invalid="ignore"):
        differences = np.subtract(b, a) / (abs(mean_a) or 1.0)
        mean = float(differences.mean())
        spread = float(differences.std(ddof=1)) if count > 1 else math.nan

    def interval(confidence: float, pairs: int) -> tuple[float, float]:
        width = _quantile(0.5 + confidence / 2, pairs - 1) * spread / math.sqrt(pairs)
        return mean - width, mean + width

    def decide(pairs: int) -> Decision:
        low, high = interval(0.9, pairs)
        if -tolerance < low and high < tolerance:
            return "within"
        if low > tolerance or high < -tolerance:
            return "beyond"
        return "undecided"

    decision = decide(count)
    if math.isfinite(mean_a) and not math.isfinite(mean_b):
        decision = "beyond"
    needed = None
    if decision == "undecided" and count > 1:
        needed = next((pairs for pairs in range(count, _MOST_PAIRS + 1) if decide(pairs) != "undecided"), None)
    wide = interval(0.95, count)
    return PairedDifference(count, mean_a, mean_b, mean, wide, interval(0.9, count), tolerance, decision, needed)


def _require_pairs(a: Sequence[object], b: Sequence[object]) -> None:
    if not a or len(a) != len(b):
        raise OptionError(f"Pairs need the same number of runs on both sides, not {len(a)} and {len(b)}.")


def _quantile(probability: float, freedom: int) -> float:
    """Return a quantile above the median of Student's t, or a little more."""
    if not freedom:
        return math.nan
    normal = NormalDist().inv_cdf(probability) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(normal**2 / freedom))


@dataclass(frozen=True)
class SeedComparison:
    """The final losses of paired runs: means over the last quarter of their common steps, after a running median.

    Attributes:
        loss: the name of the metric.
        since: the first of these steps, by pair.
        lost: the runs that end with inf or nan, so that their final loss is nan, and since when.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    loss: str
    since: tuple[int, ...]
    losses_a: tuple[float, ...]
    losses_b: tuple[float, ...]
    paired: PairedDifference
    lost: tuple[str, ...] = ()


def compare_seeds(a: Sequence[RecordedRun], b: Sequence[RecordedRun], tolerance: float = TOLERANCE) -> SeedComparison:
    """Compare runs with several seeds; a[i] and b[i] have the same seed.

    Raises:
        ComparisonError: a pair has no common loss.
        OptionError: a run is given twice; see also :func:`paired_difference`.
    """
    runs = [*a, *b]
    for number, run in enumerate(runs):
        if run.run_id in [other.run_id for other in runs[:number]]:
            raise OptionError(f"{run.path} is given twice: each run counts once, as one seed of one side.")
    losses: list[LossComparison] = []
    lost: list[str] = []
    for run_a, run_b in zip(a, b, strict=False):
        loss = compare_losses(run_a, run_b)
        if loss is None:
            raise ComparisonError(
                f"{run_a.path} and {run_b.path} have no loss at common steps. Record it: docs/records.md."
            )
        final = loss
        if (loss.lost_a is None) != (loss.lost_b is None):
            # The other run against itself: all its steps, not only those before the loss is lost.
            finite = run_a if loss.lost_a is None else run_b
            final = compare_losses(finite, finite) or loss
        changes: dict[str, Any] = {}
        for side, run, end in (("a", run_a, loss.lost_a), ("b", run_b, loss.lost_b)):
            if end is not None:
                changes[side] = math.nan
                lost.append(f"The {loss.name} of {run.path} is {end.what} from step {end.since} on.")
        losses.append(replace(final, **changes))
    _require_pairs(a, b)
    losses_a = tuple(loss.a for loss in losses)
    losses_b = tuple(loss.b for loss in losses)
    return SeedComparison(
        a=tuple(f"{run.path} ({run.run_id})" for run in a),
        b=tuple(f"{run.path} ({run.run_id})" for run in b),
        loss=losses[0].name,
        since=tuple(loss.stable_since for loss in losses),
        losses_a=losses_a,
        losses_b=losses_b,
        paired=paired_difference(losses_a, losses_b, tolerance),
        lost=tuple(lost),
    )
