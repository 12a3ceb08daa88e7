"""The options and the result of a search."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.speed.devices import Device, device_named
from te_precision_callbacks.views.compare.paired import TOLERANCE, PairedDifference
from te_precision_callbacks.views.compare.wording import describe_pairs


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Keywords of a search, in Python and on the command line. A search needs a budget; several must all hold.

    Attributes:
        low_share: budget: the least share of the searched layers' multiply-adds in low precision.
        extra_ms: budget: the most planned milliseconds of a step, which has the batches of the sweep, over all-low.
        cosine: budget: the least cosine of the gradient to the gradient in high precision.
        device: a GPU's name, for planned milliseconds, such as ``h200``.
        together: regular expressions of whole layer names. Layers that match one, with equal captures, are chosen
            together: ``layers\\.(\\d+)\\.(?:q|k|v)``.
        sweep_batches: batches of each measurement.
        seeds: pairs of short trainings; 3 at least to decide, 0 for none.
        steps: steps of each short training.
        tolerance: see ``te-precision compare --tolerance``.
        max_time: seconds after which no measurement starts; the choice then follows from the measurements so far.
        folder: where the config, the recipe, Megatron's file, the page and ``search.json`` are written.
        progress: whether to show a bar on a terminal.

    Raises:
        OptionError: an option has a wrong value.
    """

    low_share: float | None = None
    extra_ms: float | None = None
    cosine: float | None = None
    device: str | None = None
    together: Sequence[str] = ()
    sweep_batches: int = 1
    seeds: int = 3
    steps: int = 20
    tolerance: float = TOLERANCE
    max_time: float = math.inf
    folder: str | Path | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (("seeds", 0), ("steps", 1), ("sweep_batches", 1)):
            value = getattr(self, name)
            if value < least:
                raise OptionError(f"{name}={value} must be {least} or more.")
        for name in ("low_share", "cosine"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise OptionError(f"{name}={share} must be between 0 and 1.")
        if self.extra_ms is not None and not self.extra_ms >= 0:
            raise OptionError(f"extra_ms={self.extra_ms} must be 0 or more milliseconds.")
        if self.gpu is None and self.extra_ms is not None:
            raise OptionError("extra_ms= needs a device, such as device='h200'.")
        if (self.low_share, self.extra_ms, self.cosine) == (None, None, None):
            raise OptionError("A search needs a budget: low_share=0.85, extra_ms=3 with a device, or cosine=0.999.")
        for pattern in self.together:
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError(f"together={pattern!r} is not a regular expression: {error}.") from None

    @property
    def gpu(self) -> Device | None:
        """The device of planned milliseconds; raises a DeviceError if it is unknown."""
        return None if self.device is None else device_named(self.device)


@dataclass(frozen=True)
class GradientEffect:
    """A measurement against high precision, over the batches of the sweep.

    Gradients are compared parameter by parameter, whatever their scale, as an optimizer such as Adam sees them. Means
    are weighted by the number of elements.

    Attributes:
        loss: the mean loss.
        error: mean of |g - h|^2 / |h|^2, of the gradient g and the gradient h in high precision; at most 2 of each
            parameter.
        cosine: mean cosine of both gradients.
    """

    loss: float
    error: float
    cosine: float


@dataclass(frozen=True)
class MeasuredGroup:
    """A group of GEMMs, and its effect in low precision alone; ``level`` is ``block``, ``layer`` or ``gemm``."""

    name: str
    level: str
    effect: GradientEffect


@dataclass(frozen=True)
class Point:
    """A point of the frontier: the first groups of the greedy order are in high precision.

    Attributes:
        kept: the group that was added last; empty for all-low.
        expected_error: the error of all-low, times the share of the effects of the groups in low precision.
    """

    kept: str
    low_share: float
    extra_ms: float | None
    expected_error: float


@dataclass(frozen=True)
class Confirmation:
    """Paired differences of final losses, each the mean of the last quarter of the steps.

    Attributes:
        choice, low: against all-high.
    """

    steps: int
    choice: PairedDifference
    low: PairedDifference


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        recipe: the name of the recipe in low precision.
        high: layer -> its GEMMs to keep in high precision; without layers wholly in low precision.
        low_share: the share of the searched layers' multiply-adds in low precision.
        extra_ms: planned milliseconds of a step over all-low; None without a device.
        effect, all_low: against high precision: the choice, and all-low.
        measured: the groups of the sweep, the largest effect first.
        frontier: costs and expected errors.
        confirmation: None without an optimizer or seeds, and if the time was up.
        passes: forwards with backward of the sweep and the solution.
        notes: limits of the result.
    """

    recipe: str
    high: dict[str, tuple[str, ...]]
    low_share: float
    extra_ms: float | None
    effect: GradientEffect
    all_low: GradientEffect
    measured: tuple[MeasuredGroup, ...]
    frontier: tuple[Point, ...]
    confirmation: Confirmation | None
    passes: int
    notes: tuple[str, ...]

    def describe(self) -> Iterator[str]:
        """Yield the confirmation's lines: of the choice and of all-low, against all-high."""
        if self.confirmation is not None:
            yield from describe_pairs(self.confirmation.choice, "loss", "all-high", "choice")
            yield from describe_pairs(self.confirmation.low, "loss", "all-high", "all-low")
