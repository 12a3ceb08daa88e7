"""Rules on the scales of delayed scaling, which come from the amaxes of earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.bits import E4M3, E5M2
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import ColumnStreaks, Rule, RuleCheck, Sighting, by_tensor
from te_precision_callbacks.diagnosis.rules.lost_elements import FromZero, loses_too_much, overflow_threshold
from te_precision_callbacks.diagnosis.rules.settings import is_scaled
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Mask, holds_any, smallest

FAR = 2.0
TOO_SMALL = 1.0
TOO_SMALL_STEPS = 3
"""Powers of two by which amax is above the range of the scale, the same where elements overflow, and collection steps
in a row."""

RISING = 0.4
RISEN = 4.0
"""The same of an activation or gradient with an amax that rises from collection step to collection step, and the
minimum rise. A scale of delayed scaling is a step late, so amax is a little above its range as long as gradients grow:
in healthy runs, collected in each step, by up to 2^1.5 for two steps, and while amax rises by up to 2^2.6."""

TOO_LARGE = 5.0
TOO_LARGE_STEPS = 2
LOST = 0.5
"""Powers of two by which the range is above amax, collection steps in a row, and percent of
the elements that round to 0."""

APART = 1.0
APART_STEPS = 2
"""Powers of two between the scales of ranks that are a warning, and collection steps in a row."""

UNMOVED_STEPS = 3
"""Collection steps in which a scale has not moved although amax has."""

_LARGEST = {"FP8 E4M3": E4M3.max, "FP8 E5M2": E5M2.max}


class _UnmovedScales:
    """The scales that have not changed since the first collection step.

    A weight with the scale 1 counts only if its amax varies, since an FP8 weight may be frozen.
    """

    def __init__(self) -> None:
        self._rows = np.empty((0, 5))  # scale, collection steps, least and largest amax, 1 if it has moved

    def add(self, numbers: StepNumbers, scales: Column, amaxes: Floats, largest: Floats) -> tuple[Floats, Mask]:
        """Add a collection step: ``scale_inv_max``, amaxes (nan if unknown), and the maximum of each tensor's format.

        Returns:
            [rows of the column]: the number of collection steps with an unchanged scale that should have followed
            amax, otherwise 0; and whether the scale still has its initial value 1.
        """
        self._rows = extend_rows(self._rows, scales.rows, [np.nan, 0.0, np.inf, 0.0, 0.0])
        if smallest(self._rows[scales.rows, 4]) == 1:  # all have moved, for good
            return np.zeros(len(scales.rows)), np.zeros(len(scales.rows), bool)
        first, count, least, most, moved = self._rows[scales.rows].T
        first = np.where(np.isnan(first), scales.values, first)
        used = np.isfinite(amaxes) & (amaxes > 0)
        moved = np.maximum(moved, used & (scales.values != first))
        was_above = most >= 2**TOO_SMALL * largest * first  # an amax history of any length would have raised the scale
        count = count + used
        measured = np.where(used, amaxes, np.nan)
        least = np.fmin(least, measured)
        most = np.fmax(most, measured)
        self._rows[scales.rows] = np.array((first, count, least, most, moved)).T
        unmoved = (moved == 0) & ~np.isnan(largest)
        initial = unmoved & (first == 1)
        varies = least < most
        stays = (initial & (varies | ~numbers.are("weight", scales))) | (unmoved & was_above & varies)
        return count * stays, initial


class _ScaleCheck(RuleCheck):
    """A rule that compares a scale of delayed scaling with the amax of the same step."""

    applies = None

    def __init__(self) -> None:
        super().__init__()
        self._unmoved = _UnmovedScales()

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        if facts.knows_recipes:
            self.applies = facts.has_delayed_scaling
        return ()

    def _scales(self, numbers: StepNumbers, facts: Facts) -> Iterator[tuple[Column, Column, Floats]]:
        """Yield ``scale_inv_max`` with ``cur_amax``, and the maximum of the format, [rows of the scales].

        ``cur_amax`` is nan if the tensor has inf or nan, which its scale may follow.
        """
        amax = numbers.column("cur_amax")
        if amax is None:
            return
        for of_all in numbers.columns("scale_inv_max", facts):
            scales = _of_delayed_scaling(numbers, facts, of_all)
            if len(scales.rows):
                yield scales, numbers.mask_nonfinite(amax), _largest(numbers, facts, scales)


class ScaleNeverUpdated(_ScaleCheck):
    needed = UNMOVED_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.streaks = ColumnStreaks(1)
        self._since: dict[str, int] = {}

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        for scales, amax, largest in self._scales(numbers, facts):
            self.note_data(numbers.iteration)
            for tensor in set(numbers.tensors_of(scales)):
                self._since.setdefault(tensor, numbers.iteration)
            amaxes = amax.at(scales.rows, np.nan)
            counts, initial = self._unmoved.add(numbers, scales, amaxes, largest)
            unmoved = counts >= UNMOVED_STEPS
            if not holds_any(unmoved):
                continue
            values = np.where(initial, "1, its initial value,", [f"{value:.3g}" for value in scales.values.tolist()])
            seen = "its scale is {} in all {:.0f} collection steps; amax is {:.3g}"
            for sighting in self.streaks.sightings(numbers, facts, scales, unmoved, seen, values, counts, amaxes):
                remedy = ""
                if sighting.tensor == "gradient":
                    remedy = _REMEDY_OF_SCALED if is_scaled(facts) else _REMEDY_OF_GRADIENT
                yield sighting._replace(statistic="scale_inv_max", since=self._since[sighting.tensor], remedy=remedy)


_REMEDY_OF_SCALED = (
    "A step that the GradScaler has skipped leaves amaxes of inf in the history: choose a smaller init_scale=, a"
    " shorter amax_history_len=, or Float8CurrentScaling. If no step was skipped, make sure that the first layer inside"
    " te.autocast has a backward"
)

_REMEDY_OF_GRADIENT = (
    "Make sure that the first layer inside te.autocast has a backward, which updates the scales of all gradients. If"
    " a detach() after it is on purpose, run it in a separate te.autocast, or freeze it and all before it. Or use"
    " Float8CurrentScaling"
)


class StaleScale(_ScaleCheck):
    needed = TOO_SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self._large = ColumnStreaks(TOO_LARGE_STEPS)
        self._last: Column | None = None
        self._from_zero = FromZero()
        self._begins: Column | None = None  # amax before its present rise, for rising rows

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        self._from_zero.note(numbers, facts)
        for scales, amax, largest in self._scales(numbers, facts):
            amaxes = amax.at(scales.rows, np.nan)
            before = (self._last or amax).at(scales.rows, np.inf)  # in the first step, no rise
            self._last = amax
            above = np.log2(largest * scales.values / amaxes)
            above[~np.isfinite(above)] = np.nan
            if holds_any(np.isfinite(above)):
                self.note_data(numbers.iteration)
            lost = numbers.column("underflows%", facts)
            losing = np.zeros(len(scales.rows)) if lost is None else lost.at(scales.rows, 0.0)
            rises = (amaxes > before) & (above <= -RISING) & ~numbers.are("weight", scales)
            begin = (self._begins or amax).at(scales.rows, np.nan)
            begin = np.where(rises, np.where(np.isfinite(begin) & (begin > 0), begin, before), np.nan)
            begin = np.where(rises & (begin == 0), amaxes, begin)
            risen = rises & (amaxes >= 2**RISEN * begin)
            self._begins = scales.with_values(begin)
            small = above <= -TOO_SMALL
            if holds_any(small):
                small &= (above <= -FAR) | loses_too_much(
                    numbers, facts, scales, overflows=lambda lost: overflow_threshold(numbers, lost)
                )
            large = (above >= TOO_LARGE) & (losing >= LOST)
            counts, initial = self._unmoved.add(numbers, scales, amaxes, largest)
            follows = ~initial & (counts < UNMOVED_STEPS)  # otherwise the rule scale-never-updated applies
            is_new = self._from_zero.grow(numbers, scales)
            small = small & follows & ~is_new
            rises = rises & follows & ~is_new
            large = large & follows
            times = np.exp2(-above)
            seen = "amax is {:.3g} times the range of its scale"
            of_small = self.streaks.sightings(numbers, facts, scales, small, seen, times, key="small")
            seen = "amax rises and is {:.3g} times the range of its scale"
            reported = risen & ~small
            of_rising = self.streaks.sightings(
                numbers, facts, scales, rises, seen, times, reported=reported, key="rising"
            )
            seen = "the range of its scale is {:.3g} times its amax, and {:.3g} % of the elements round to 0"
            of_large = self._large.sightings(numbers, facts, scales, large, seen, np.exp2(above), losing, key="large")
            yield from by_tensor(numbers, scales, of_small, of_rising, of_large)


class ScalesDiffer(RuleCheck):
    """The range over ranks of a delayed scaling scale, for tensors with one scale per rank."""

    needed = APART_STEPS
    applies = None

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        if facts.settings is not None and facts.layers:
            # With several micro-batches a rank has several scales in a step: scales of activations change after each.
            self.applies = facts.has_delayed_scaling and facts.settings.ranks > 1 and facts.micro_batches == 1
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        if not self.applies:
            return
        least = numbers.column("scale_inv_min", facts)
        for largest in numbers.columns("scale_inv_max", facts):
            known = ~np.isnan(_largest(numbers, facts, largest))
            if least is None or not known.any():
                continue
            self.note_data(numbers.iteration)
            apart = np.log2(largest.values / least.at(largest.rows, np.nan))
            apart = np.where(known & np.isfinite(apart), apart, 0.0)
            far = apart >= APART
            yield from self.streaks.sightings_by_severity(
                numbers,
                facts,
                largest,
                far,
                (apart > 0) & ~far,
                "the largest scale of one rank is {:.4g} times the smallest scale of another",
                np.exp2(apart),
            )


class LostScales(RuleCheck):
    """The scales that a resume has lost, as the audit of a resume reports them."""

    applies = False

    def event(self, event: Event) -> Iterator[Sighting]:
        if event.kind == "resume_audited":
            self.applies = True
            self.checked = True
            layers = tuple(event.data.get("without_scales", ()))
            if layers:
                seen = f"the resume has lost the scales and amax histories of {many(len(layers), 'layer')}"
                yield Sighting(layers, "", "", seen, event.iteration)


def _of_delayed_scaling(numbers: StepNumbers, facts: Facts, column: Column) -> Column:
    return column.select("delayed", facts, lambda: ~np.isnan(_largest(numbers, facts, column)))


def _largest(numbers: StepNumbers, facts: Facts, column: Column) -> Floats:
    """[rows of the column]: the maximum of the operand's format; nan without delayed scaling."""

    def make() -> Floats:
        largest = np.full(len(column.rows), np.nan)
        for place, (name, tensor) in enumerate(zip(numbers.names_of(column), numbers.tensors_of(column), strict=True)):
            if facts.recipe_of(name) == "fp8_delayed_scaling":
                largest[place] = _LARGEST.get(facts.format_of(name, tensor), np.nan)
        return largest

    return column.cached("largest number", facts, make)


_COLLECT = (
    "LogFp8TensorStats with stats: [scale_inv_max, underflows%] and LogTensorStats with stats: [cur_amax], or the"
    " default config"
)

RULES = (
    Rule(
        id="lost-scales",
        title="a resume lost the scales and amax histories of delayed scaling",
        subject="layer",
        needs="a resume",
        collect="the session's state in the checkpoint (session.state_dict()), and delayed scaling",
        condition=(
            "scales and amax histories of the checkpoint's fingerprint are missing, or 1, in the restored model. Or,"
            " without a fingerprint, the optimizer has stepped before, and all layers run their first step in the"
            " session with scales of 1 and without an amax of an earlier step"
        ),
        silent="optimizers without a count of steps, such as SGD; recipes without history",
        severity="warning",
        source="NVIDIA-NeMo/Megatron-Bridge#1730, NVIDIA/TransformerEngine#982",
        why="the first steps run with scales of 1: gradients round to 0, and large values are clipped",
        disproof="the earlier steps ran in high precision, or with another recipe",
        remedy=(
            "Save and load the whole state_dict(), with the keys that end in _extra_state, and without strict=False."
            " docs/resuming.md explains how to save and load a checkpoint of FP8 training"
        ),
        recipes=("fp8_delayed_scaling",),
        check=LostScales,
    ),
    Rule(
        id="scale-never-updated",
        title="the scale of delayed scaling is never updated",
        subject="tensor",
        needs="scale_inv_max and cur_amax of the tensors of layers with delayed scaling",
        collect=_COLLECT,
        condition=(
            f"in all collection steps (at least {UNMOVED_STEPS}) the scale is 1, its initial value; or the scale"
            f" never changes although amax was 2^{TOO_SMALL:g} times its range"
        ),
        silent=(
            "the first step, which has no scale yet; a scale held by the largest amax in the history; weights with a"
            " constant amax, such as frozen ones; tensors that are 0, such as those of experts without tokens"
        ),
        severity="warning",
        source="NVIDIA/TransformerEngine#3456 (gradients) and #3284 (te.autocast inside of te.checkpoint)",
        why=("with a scale of 1 the format covers one fixed range, in which small gradients and weights round to 0"),
        disproof="amax always equals the format's maximum, so a scale of 1 is correct",
        remedy=(
            "Enter te.autocast around te.checkpoint, not inside the checkpointed function (a reentrant checkpoint"
            " runs it without gradients), and not inside te.autocast(enabled=False). Or use Float8CurrentScaling"
        ),
        cost="current scaling reads each tensor once more to compute amax",
        recipes=("fp8_delayed_scaling",),
        check=ScaleNeverUpdated,
        essential=True,
        consequence_of=("dead-gradient", "missing-gradient", "nonfinite"),
    ),
    Rule(
        id="stale-scale",
        title="the scale of delayed scaling does not fit the tensor",
        subject="tensor",
        needs="scale_inv_max and cur_amax of the tensors of layers with delayed scaling",
        collect=_COLLECT,
        condition=(
            f"amax is at least 2^{FAR:g} times the range of the scale in {TOO_SMALL_STEPS} collection steps in a row,"
            f" or 2^{TOO_SMALL:g} times with as many overflows as the rule overflow needs, or (except for weights)"
            f" 2^{RISING:g} times while it rises by 2^{RISEN:g} in total. Or the range is at least 2^{TOO_LARGE:g}"
            f" times amax and underflows% at least {LOST:g} in {TOO_LARGE_STEPS} collection steps in a row"
        ),
        silent=(
            "the first step, which has no scale yet; the growth of gradients in the first steps of a healthy run, which"
            " the scale follows one step later; steps in which the tensor has inf or nan; scales that never change (see"
            " scale-never-updated)"
        ),
        severity="warning",
        source="arXiv 2605.26189 (a stale amax); the thresholds are this project's, calibrated on planted spikes",
        why="until a spike leaves the amax history, small elements round to 0",
        disproof="underflows% falls once the spike has left the history",
        remedy=(
            "If amax keeps rising, first lower the learning rate, or find another cause of the growth. Otherwise use"
            " amax_compute_algo='most_recent', a shorter amax_history_len, or Float8CurrentScaling"
        ),
        cost="current scaling reads each tensor once more to compute amax",
        recipes=("fp8_delayed_scaling",),
        check=StaleScale,
        essential=True,
        consequence_of=("diverging-loss", "growth"),
    ),
    Rule(
        id="scales-differ",
        title="the scale of delayed scaling differs between ranks",
        subject="tensor",
        needs="scale_inv_min and scale_inv_max of delayed scaling, reduced over ranks, with one micro-batch in a step",
        collect=(
            "LogFp8TensorStats with stats: [scale_inv_min, scale_inv_max], or the default config; and statistics that"
            " are reduced over ranks"
        ),
        condition=(
            f"the scales of a tensor differ between ranks in {APART_STEPS} collection steps in a row. A warning if by"
            f" 2^{APART:g} or more, else a note"
        ),
        silent=(
            "current and block scaling, where each rank has local scales; the first step, which has no scale yet;"
            " steps with several micro-batches, each of which updates the scales"
        ),
        severity="warning",
        source=(
            "NVIDIA/Megatron-LM#442: with a group that left out tensor parallelism, runs diverged after some 1,000"
            " steps; the threshold is this project's"
        ),
        why=(
            "ranks round the same weights differently, and FP8 tensors that tensor-parallel ranks gather need one"
            " common scale"
        ),
        disproof=(
            "the group is smaller on purpose, as with Megatron's tp_only_amax_red, or the ranks have different"
            " layers with the same name"
        ),
        remedy=(
            "Pass a group with all data-parallel and tensor-parallel ranks as te.autocast(amax_reduction_group=...), in"
            " Megatron get_amax_reduction_group(); keep reduce_amax=True"
        ),
        cost="one small all-reduce per layer in each forward and backward",
        recipes=("fp8_delayed_scaling",),
        check=ScalesDiffer,
    ),
)
