"""Time ways to do the same thing on a machine of varying speed, until their difference is resolved.

Usage::

    ways = {"ours": in_session, "theirs": in_other}
    results = in_turn(ways, plainly(step), device, share=0.02, seconds=300)
    results["ours"].ratio()  # 1.034 (1.027 to 1.041)

A way is timed once, and the base once, in random order. Such pairs of all ways take turns, in
an order that is drawn too. A machine that becomes slower for a second changes one pair, or both parts of one. The ratio
of a way to the base is the median of the ratios of its pairs. Its interval is found by resampling the pairs with
replacement (Efron 1979, the percentile bootstrap, 95 %).

A way is resolved once its interval is narrow enough, whatever its claim: an interval of 95 % that is compared with a
claim after each pair would decide it by chance in two of five runs, if the truth is the claim itself.

Two clocks run: wall time, and the processor time of all threads of the process. Other work on the machine changes the
second one less.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from measuring import Spent, progress, spent

Clock = Literal["wall", "processor"]
Verdict = Literal["holds", "does not hold", "not resolved"]

LEAST_PAIRS = 8
"""With fewer, the interval of a median has less than its stated probability."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.value)} ({_short(self.low)} to {_short(self.high)})"

    def scaled(self, factor: float, shift: float = 0.0) -> Interval:
        """``factor * (self + shift)``, of a factor above zero."""
        return Interval(*(factor * (number + shift) for number in (self.value, self.low, self.high)))

    def at_most(self, claim: float) -> Verdict:
        """Check the claim that the value is at most this."""
        return "holds" if self.high <= claim else "does not hold" if self.low > claim else "not resolved"

    def beside(self, claim: float | None, unit: str = "") -> str:
        """Format a claim with its verdict: ``3 %: holds``; empty without a claim."""
        return "" if claim is None else f"{claim:g}{unit}: {self.at_most(claim)}"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of samples with its interval.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("No samples: a median needs at least one.")
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(seed).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Interval(float(np.median(values)), float(low), float(high))


Way = Callable[[], AbstractContextManager[Callable[[], object]]]
"""What must hold around a call, which it gives. Entering and leaving is not timed."""


def plainly(function: Callable[[], object]) -> Way:
    """A call around which nothing must hold."""
    return lambda: contextlib.nullcontext(function)


def _timed(way: Way, device: torch.device) -> Spent:
    """The second call of two: the first one warms up."""
    with way() as function:
        function()
        return spent(function, device)


@dataclass
class Pairs:
    """The pairs of a way.

    Attributes:
        ways, bases: times of the way, and of the base in the same pair.
    """

    ways: list[Spent] = field(default_factory=list)
    bases: list[Spent] = field(default_factory=list)

    @property
    def latest(self) -> float:
        """The way over the base in the last pair, by wall time."""
        return self.ways[-1].wall / self.bases[-1].wall

    def ratios(self, clock: Clock = "wall") -> list[float]:
        """The way over the base, of each pair."""
        return [getattr(way, clock) / getattr(base, clock) for way, base in zip(self.ways, self.bases, strict=True)]

    def ratio(self, clock: Clock = "wall") -> Interval:
        """The way over the base."""
        return interval(self.ratios(clock))

    def within(self, share: float) -> bool:
        ratio = self.ratio()
        return ratio.high - ratio.low <= 2 * share * ratio.value

    def added(self, clock: Clock = "wall") -> Interval:
        """The way less the base, in milliseconds."""
        pairs = zip(self.ways, self.bases, strict=True)
        return interval([getattr(way, clock) - getattr(base, clock) for way, base in pairs])

    def base(self, clock: Clock = "wall") -> Interval:
        """The base, in milliseconds."""
        return interval([getattr(base, clock) for base in self.bases])

    def way(self, clock: Clock = "wall") -> Interval:
        """The way, in milliseconds."""
        return interval([getattr(way, clock) for way in self.ways])


def add_arguments(parser: argparse.ArgumentParser, seconds: float, what: str) -> None:
    """Let a benchmark take ``--seconds`` and ``--least`` of :func:`in_turn`.

    Args:
        parser: of the benchmark.
        seconds: where nothing else is given.
        what: takes so long at most, in words.
    """
    parser.add_argument("--seconds", type=float, default=seconds, help=f"the longest {what} (default: {seconds:g})")
    parser.add_argument("--least", type=int, default=LEAST_PAIRS, help=f"pairs of each case (default: {LEAST_PAIRS})")


def in_turn(
    ways: Mapping[str, Way],
    base: Way,
    device: torch.device,
    *,
    share: float,
    seconds: float,
    least: int = LEAST_PAIRS,
    seed: int = 0,
) -> dict[str, Pairs]:
    """Time ways and a base in pairs until each way is resolved, or the time is over.

    Args:
        ways: name -> way.
        base: baseline of all ways.
        device: device to wait for.
        share: a way is resolved when the interval of its ratio is at most this share of it to either side.
        seconds: time limit of rounds, once each way has its least pairs.
        least: pairs of each way.
        seed: of the order.
    """
    order, results = random.Random(seed), {name: Pairs() for name in ways}
    open_ways, end = list(ways), time.monotonic() + seconds
    number = 0
    while open_ways and (number < least or time.monotonic() < end):
        number += 1
        order.shuffle(open_ways)
        for name in open_ways:
            both = [(results[name].ways, ways[name]), (results[name].bases, base)]
            order.shuffle(both)
            for times, way in both:
                times.append(_timed(way, device))
        if number >= least:
            open_ways = [name for name in open_ways if not results[name].within(share)]
        latest = [f"{name} {_short(results[name].latest)}" for name in sorted(open_ways)]
        progress(f"round {number}: " + (", ".join(latest) or "all ways are resolved"))
    return results
