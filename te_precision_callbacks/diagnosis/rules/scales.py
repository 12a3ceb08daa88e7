"""Rules on the scale of delayed scaling, which is made from earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.numerics.bits import E4M3, E5M2
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.lasting import ColumnStreaks
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.diagnosis.rule import Judge, Rule, Sighting
from te_precision_callbacks.diagnosis.rules.losses import loses, most_overflow

FAR, TOO_SMALL, TOO_SMALL_STEPS = 2.0, 1.0, 3
"""Powers of two by which amax is above the range of the scale, the same where elements overflow, and due steps in a
row."""

RISING, RISEN = 0.25, 4.0
"""The same of an activation or gradient whose amax rises from due step to due step, and by how much it must have risen.
A scale of delayed scaling is a step late, so amax is a little above its range as long as gradients grow: in healthy
runs, due in each step, by up to 2^1.5 for two steps, and while amax rises by up to 2^2.6."""

TOO_LARGE, TOO_LARGE_STEPS, LOST = 5.0, 2, 0.5
"""Powers of two by which the range is above amax, due steps in a row, and percent of the elements that round to 0."""

APART, APART_STEPS = 1.0, 2
"""Powers of two between the scales of ranks that are a warning, and due steps in a row."""

_LARGEST = {"FP8 E4M3": E4M3.max, "FP8 E5M2": E5M2.max}
"""Format of an operand -> its largest number."""


class StaleScale(Judge):
    """The range of a scale of delayed scaling, compared with the amax of the same step."""

    needed = TOO_SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.applies = None
        self._small = ColumnStreaks(TOO_SMALL_STEPS)
        self._large = ColumnStreaks(TOO_LARGE_STEPS)
        self._last: dict[str, Column] = {}
        self._begins: dict[str, Column] = {}  # amax before it began to rise, of layers in which it does

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        """As of :class:`Judge`."""
        if facts.layers:
            self.applies = facts.has_delayed_scaling
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        """As of :class:`Judge`."""
        for scales in numbers.all("scale_inv_max", facts=facts):
            tensor = scales.family.tensor
            amax = numbers.one("cur_amax", tensor)
            if amax is None:
                continue
            amax = numbers.unbroken(amax)  # the scale may follow an inf
            largest = _largest(numbers, facts, scales)
            if np.isnan(largest).all():
                continue
            found = amax.at(scales.layers, np.nan)
            before = self._last.get(tensor, amax).at(scales.layers, np.inf)  # the same at first: it does not rise
            self._last[tensor] = amax
            with np.errstate(divide="ignore", invalid="ignore"):
                above = np.log2(largest * scales.values / found)
            above[~np.isfinite(above)] = np.nan
            if np.isfinite(above).any():
                self.saw(numbers.iteration)
            lost = numbers.one("underflows%", tensor, facts)
            losing = np.zeros(len(scales.layers)) if lost is None else lost.at(scales.layers, 0.0)
            with np.errstate(invalid="ignore"):
                rises = (found > before) & (tensor != "weight")
                rises &= above <= -RISING
                begin = self._begins.get(tensor, amax).at(scales.layers, np.nan)
                begin = np.where(rises, np.where(np.isfinite(begin) & (begin > 0), begin, before), np.nan)
                begin = np.where(rises & (begin == 0), found, begin)
                risen = rises & (found >= 2**RISEN * begin)
                self._begins[tensor] = scales._replace(values=begin)
                overflows = loses(numbers, facts, scales, overflows=lambda lost: most_overflow(lost.family.tensor))
                small = (above <= -FAR) | ((above <= -TOO_SMALL) & overflows)
                large = (above >= TOO_LARGE) & (losing >= LOST)
            yield from self._small.sightings(
                numbers,
                facts,
                scales,
                small,
                "amax is {:.3g} times the range of its scale",
                np.exp2(-above),
                key="small",
            )
            yield from self._small.sightings(
                numbers,
                facts,
                scales,
                rises,
                "amax rises, and is {:.3g} times the range of its scale",
                np.exp2(-above),
                tells=risen & ~small,
                key="rising",
            )
            yield from self._large.sightings(
                numbers,
                facts,
                scales,
                large,
                "the range of its scale is {:.3g} times its amax, and {:.3g} % of the elements round to 0",
                np.exp2(above),
                losing,
                key="large",
            )


class ScalesDiffer(Judge):
    """The least and the largest scale of delayed scaling over ranks, of a tensor that has one scale on each."""

    needed = APART_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.applies = None
        self._streaks = ColumnStreaks(APART_STEPS)

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        """As of :class:`Judge`."""
        if facts.settings is not None and facts.layers:
            # With several micro-batches a rank has several scales in a step: those of activations change after each.
            self.applies = facts.has_delayed_scaling and facts.settings.ranks > 1 and facts.micro_batches == 1
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        """As of :class:`Judge`."""
        if not self.applies:
            return
        for largest in numbers.all("scale_inv_max", facts=facts):
            least = numbers.one("scale_inv_min", largest.family.tensor, facts)
            known = ~np.isnan(_largest(numbers, facts, largest))
            if least is None or not known.any():
                continue
            self.saw(numbers.iteration)
            with np.errstate(divide="ignore", invalid="ignore"):
                apart = np.log2(largest.values / least.at(largest.layers, np.nan))
            apart = np.where(known & np.isfinite(apart), apart, 0.0)
            far = apart >= APART
            kinds: tuple[tuple[Severity, npt.NDArray[np.bool_]], ...] = (
                ("warning", far),
                ("note", (apart > 0) & ~far),
            )
            for severity, mask in kinds:
                yield from self._streaks.sightings(
                    numbers,
                    facts,
                    largest,
                    mask,
                    "the largest scale of a rank is {:.4g} times the least of another",
                    np.exp2(apart),
                    severity=severity,
                    key=severity,
                )


def _largest(numbers: StepNumbers, facts: Facts, column: Column) -> npt.NDArray[np.float64]:
    """[layers of the column]: the largest number of the operand's format; nan where a layer does not run delayed
    scaling."""
    tensor = column.family.tensor

    def make() -> npt.NDArray[np.float64]:
        names = numbers.names_of(column)
        formats = (facts.format_of(name, tensor) for name in names)
        found = [_LARGEST.get(text, np.nan) for text in formats]
        of_delayed = [facts.recipe_of(name) == "fp8_delayed_scaling" for name in names]
        return np.where(of_delayed, found, np.nan)

    return facts.once("largest number", tensor, column.layers, make)


RULES = (
    Rule(
        id="stale-scale",
        title="the scale of delayed scaling does not fit the tensor",
        subject="tensor",
        needs="scale_inv_max and cur_amax of the tensors of layers with delayed scaling",
        collect="LogFp8TensorStats with stats: [scale_inv_max, underflows%] and LogTensorStats with stats: [cur_amax]",
        condition=(
            f"amax is at least 2^{FAR:g} times the range of the scale in {TOO_SMALL_STEPS} due steps in a row, or"
            f" 2^{TOO_SMALL:g} times with as many overflows as the rule overflow takes; or 2^{RISING:g} times while it"
            f" rises by 2^{RISEN:g} in all, but for weights; or the range is at least"
            f" 2^{TOO_LARGE:g} times amax and underflows% at least {LOST:g} in {TOO_LARGE_STEPS} due steps in a row"
        ),
        silent=(
            "the first step, which has no scale yet; the growth of gradients in the first steps of a healthy run, which"
            " the scale follows a step late; steps in which the tensor has inf or nan"
        ),
        severity="warning",
        source="arXiv 2605.26189 (a stale amax); the thresholds are ours, calibrated on planted spikes",
        why="a spike stays in the amax history, and until it has left, small elements round to 0",
        disproof="underflows% falls when the history has passed the spike",
        remedy=(
            "Shorten amax_history_len, use amax_compute_algo='most_recent', or use Float8CurrentScaling. Where"
            " amax keeps"
            " rising, look for the cause of the growth"
        ),
        cost="current scaling reads each tensor once more, for its amax",
        recipes=("fp8_delayed_scaling",),
        judge=StaleScale,
        consequence_of=("diverging-loss",),
    ),
    Rule(
        id="scales-differ",
        title="the scale of delayed scaling differs by rank",
        subject="tensor",
        needs="scale_inv_min and scale_inv_max of delayed scaling, reduced over ranks, with one micro-batch in a step",
        collect=(
            "LogFp8TensorStats with stats: [scale_inv_min, scale_inv_max], or no config at all; and statistics that are"
            " reduced over ranks"
        ),
        condition=(
            f"the scales of a tensor differ between ranks in {APART_STEPS} due steps in a row. A warning if by"
            f" 2^{APART:g} or more, else a note"
        ),
        silent=(
            "current and block scaling, whose scales are each rank's own; the first step, which has no scale yet; steps"
            " of several micro-batches, after each of which a rank gets new scales"
        ),
        severity="warning",
        source=(
            "NVIDIA/Megatron-LM#442: with a group that left out tensor parallelism, runs diverged after some 1,000"
            " steps; the threshold is ours"
        ),
        why=(
            "ranks round the same weights differently, and what tensor-parallel ranks gather in FP8 has one scale for"
            " all"
        ),
        disproof=(
            "the group is smaller on purpose, as with Megatron's tp_only_amax_red, or the ranks have different layers"
            " under one name"
        ),
        remedy=(
            "Pass a group with all data-parallel and tensor-parallel ranks as te.autocast(amax_reduction_group=...), in"
            " Megatron get_amax_reduction_group(); keep reduce_amax=True"
        ),
        cost="one all-reduce of some numbers for each layer in each forward and backward",
        recipes=("fp8_delayed_scaling",),
        judge=ScalesDiffer,
    ),
)
