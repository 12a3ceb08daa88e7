"""Rules on the scales of delayed scaling, which come from the amaxes of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.bits import E4M3, E5M2
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting, Sightings, Streaks
from te_precision_callbacks.diagnosis.rules.lost_elements import overflow_threshold, starts_from_zero
from te_precision_callbacks.diagnosis.rules.settings import is_scaled
from te_precision_callbacks.diagnosis.shapes import InARow, Reported
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats

_LARGEST = {"FP8 E4M3": E4M3.max, "FP8 E5M2": E5M2.max}


def _largest(facts: Facts, layer: str, tensor: str) -> float:
    """The maximum of the operand's format; nan without delayed scaling."""
    is_delayed = facts.layer(layer).recipe == "fp8_delayed_scaling"
    return _LARGEST.get(facts.format_of(layer, tensor), np.nan) if is_delayed else np.nan


class ScaleCheck(RuleCheck):
    """A rule that compares ``scale_inv_max`` of delayed scaling with the amax of the same step.

    Attributes:
        unmoved: [rows]: the collection steps without a change of a scale that should have followed amax.
        initial: [rows]: whether the scale still has its initial value 1.
        begins: [rows]: amax before its present rise; nan if it does not rise.
    """

    def __init__(self, needed: int, find: Find) -> None:
        super().__init__(needed=needed, applies=None)
        self._find = find
        self._rows = np.empty((0, 5))  # scale, collection steps, least and largest amax, 1 if the scale has moved
        self.begins = np.empty(0)

    def facts(self, facts: Facts) -> Sightings:
        has_recipe = any(layer.has_run or layer.recipe for layer in facts.layers.values())
        if has_recipe or (facts.layers and facts.settings.are_known):  # a plain log may show none
            self.applies = facts.has_delayed_scaling
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        if not (self.applies and numbers.has("cur_amax") and numbers.has("scale_inv_max")):
            return ()
        scales = np.where(np.isnan(numbers.by_row(_largest)), np.nan, numbers.values("scale_inv_max"))
        amaxes = numbers.finite("cur_amax")  # nan if the tensor has inf or nan, which its scale may follow
        if np.isnan(scales).all():
            return ()
        self.note_data(numbers.iteration)
        # Find scales that have not changed since the first collection step. A weight with the scale 1 counts only if
        # its amax varies, since an FP8 weight may be frozen.
        rows = extend_rows(self._rows, len(numbers), [np.nan, 0.0, np.inf, 0.0, 0.0])
        first, count, least, most, moved = rows.T
        first = np.where(np.isnan(first), scales, first)
        used = np.isfinite(amaxes) & (amaxes > 0) & ~np.isnan(scales)
        moved = np.maximum(moved, used & (scales != first))
        # An amax history of any length would have raised the scale.
        was_above = most >= 2**TOO_SMALL * numbers.by_row(_largest) * first
        measured = np.where(used, amaxes, np.nan)
        least = np.fmin(least, measured)
        most = np.fmax(most, measured)
        self._rows = np.stack([first, count + used, least, most, moved], axis=1)
        unmoved = (moved == 0) & ~np.isnan(scales)
        varies = least < most
        self.initial = unmoved & (first == 1)
        stays = (self.initial & (varies | ~numbers.are("weight"))) | (unmoved & was_above & varies)
        self.unmoved = (count + used) * stays
        return self._find(self, numbers, scales, amaxes)


Find = Callable[[ScaleCheck, StepNumbers, Floats, Floats], Sightings]
"""Yields the sightings of a step, from its scales and amaxes."""


def _never_updated(check: ScaleCheck, numbers: StepNumbers, scales: Floats, amaxes: Floats) -> Sightings:
    def describe(row: int) -> str:
        value = "1, its initial value," if check.initial[row] else f"{scales[row]:.3g}"
        steps = check.unmoved[row]
        return f"its scale is {value} in all {steps:.0f} collection steps; amax is {amaxes[row]:.3g}"

    unmoved = check.unmoved >= UNMOVED_STEPS
    for sighting in check.streaks.sightings(numbers, "scale_inv_max", unmoved, describe, steps=1):
        remedy = ""
        if sighting.tensor == "gradient":
            remedy = _REMEDY_OF_SCALED if is_scaled(numbers.facts) else _REMEDY_OF_GRADIENT
        yield sighting._replace(statistic="scale_inv_max", since=check.steps[0], remedy=remedy)


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


def _does_not_fit(check: ScaleCheck, numbers: StepNumbers, scales: Floats, amaxes: Floats) -> Sightings:
    above = np.log2(numbers.by_row(_largest) * scales / amaxes)
    above[~np.isfinite(above)] = np.nan
    follows = ~check.initial & (check.unmoved < UNMOVED_STEPS)  # otherwise it is never updated
    late = follows & ~starts_from_zero(numbers)
    overflows = numbers.values("overflows%") >= numbers.by_row(overflow_threshold)
    small = ((above <= -FAR) | ((above <= -TOO_SMALL) & overflows)) & late
    last_amaxes = numbers.earlier(numbers.last, "cur_amax")
    rises = (amaxes > last_amaxes) & (above <= -RISING) & ~numbers.are("weight")
    begins = extend_rows(check.begins, len(numbers), np.nan)
    begins = np.where(begins > 0, begins, last_amaxes)
    begins = np.where(begins == 0, amaxes, begins)
    check.begins = np.where(rises, begins, np.nan)
    risen = amaxes >= 2**RISEN * begins
    lost = numbers.values("underflows%")
    large = (above >= TOO_LARGE) & (lost >= LOST) & follows

    def is_small(row: int) -> str:
        return f"amax {'' if small[row] else 'rises and '}is {2 ** -above[row]:.3g} times the range of its scale"

    def is_large(row: int) -> str:
        return (
            f"the range of its scale is {2 ** above[row]:.3g} times its amax, and {lost[row]:.3g} % of the elements"
            " round to 0"
        )

    for key, holds, reported, describe, steps in (
        ("small", small, small, is_small, TOO_SMALL_STEPS),
        ("rising", rises & late, risen & ~small, is_small, TOO_SMALL_STEPS),
        ("large", large, large, is_large, TOO_LARGE_STEPS),
    ):
        for sighting in check.streaks.sightings(
            numbers, "scale_inv_max", holds, describe, reported=reported, key=key, steps=steps
        ):
            yield sighting._replace(key=key)


def _differ(numbers: StepNumbers, streaks: Streaks) -> Sightings:
    """Find scales that differ between ranks, of tensors with one scale per rank."""
    apart = np.log2(numbers.values("scale_inv_max") / numbers.values("scale_inv_min"))
    apart[~np.isfinite(apart) | np.isnan(numbers.by_row(_largest))] = 0.0
    far = apart >= APART
    return streaks.by_severity(
        numbers,
        "scale_inv_max",
        far,
        (apart > 0) & ~far,
        lambda row: f"the largest scale of one rank is {2 ** apart[row]:.4g} times the smallest scale of another",
    )


def _may_differ(facts: Facts) -> bool | None:
    if not (facts.settings.are_known and facts.layers):
        return None
    # With several micro-batches a rank has several scales in a step: scales of activations change after each.
    return facts.has_delayed_scaling and facts.settings.ranks > 1 and facts.micro_batches == 1


def _lost_scales(event: Event) -> Sightings:
    layers = tuple(event.data.get("without_scales", ()))
    if layers:
        seen = f"the resume has lost the scales and amax histories of {many(len(layers), 'layer')}"
        yield Sighting(seen, layers, since=event.iteration)


_COLLECT = (
    "LogFp8TensorStats with stats: [scale_inv_max, underflows%] and LogTensorStats with stats: [cur_amax], or the"
    " default config"
)

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
"""Powers of two between the scales of ranks that are a warning."""

UNMOVED_STEPS = 3
"""Collection steps in which a scale has not moved although amax has."""

RULES = (
    Rule(
        id="stale-scale",
        title="the scale of delayed scaling does not fit the tensor",
        subject="tensor",
        needs="scale_inv_max and cur_amax of the tensors of layers with delayed scaling",
        collect=_COLLECT,
        condition=f"""
            amax is at least 2^{FAR:g} times the range of the scale in {TOO_SMALL_STEPS} collection steps in a row, or
            2^{TOO_SMALL:g} times with as many overflows as the rule overflow needs, or (except for weights)
            2^{RISING:g} times while it rises by 2^{RISEN:g} in total. Or the range is at least 2^{TOO_LARGE:g} times
            amax and underflows% at least {LOST:g} in {TOO_LARGE_STEPS} collection steps in a row
        """,
        silent="""
            the first step, which has no scale yet; the growth of gradients in the first steps of a healthy run, which
            the scale follows one step later; steps in which the tensor has inf or nan; scales that never change
        """,
        source="arXiv 2605.26189 (a stale amax); the thresholds are this project's, calibrated on planted spikes",
        why="until a spike leaves the amax history, small elements round to 0",
        disproof="underflows% falls once the spike has left the history",
        remedy="""
            If amax keeps rising, first lower the learning rate, or find another cause of the growth. Otherwise use
            amax_compute_algo='most_recent', a shorter amax_history_len, or Float8CurrentScaling
        """,
        cost="current scaling reads each tensor once more to compute amax",
        recipes=("fp8_delayed_scaling",),
        check=partial(ScaleCheck, TOO_SMALL_STEPS, _does_not_fit),
        essential=True,
        consequence_of=("diverging-loss", "growth"),
    ),
    Rule(
        id="stale-scale",
        title="the scale of delayed scaling is never updated",
        subject="tensor",
        needs="scale_inv_max and cur_amax of the tensors of layers with delayed scaling",
        collect=_COLLECT,
        condition=f"""
            in all collection steps (at least {UNMOVED_STEPS}) the scale is 1, its initial value; or the scale never
            changes although amax was 2^{TOO_SMALL:g} times its range
        """,
        silent="""
            the first step, which has no scale yet; a scale held by the largest amax in the history; weights with a
            constant amax, such as frozen ones; tensors that are 0, such as those of experts without tokens
        """,
        source="NVIDIA/TransformerEngine#3456 (gradients) and #3284 (te.autocast inside of te.checkpoint)",
        why=("with a scale of 1 the format covers one fixed range, in which small gradients and weights round to 0"),
        disproof="amax always equals the format's maximum, so a scale of 1 is correct",
        remedy="""
            Enter te.autocast around te.checkpoint, not inside the checkpointed function (a reentrant checkpoint runs it
            without gradients), and not inside te.autocast(enabled=False). Or use Float8CurrentScaling
        """,
        cost="current scaling reads each tensor once more to compute amax",
        recipes=("fp8_delayed_scaling",),
        check=partial(ScaleCheck, UNMOVED_STEPS, _never_updated),
        essential=True,
        consequence_of=("dead-gradient", "missing-gradient", "nonfinite"),
    ),
    Rule(
        id="stale-scale",
        title="a resume lost the scales and amax histories of delayed scaling",
        subject="layer",
        needs="a resume",
        collect="the session's state in the checkpoint (session.state_dict()), and delayed scaling",
        condition="""
            scales and amax histories of the checkpoint's fingerprint are missing, or 1, in the restored model. Or,
            without a fingerprint, the optimizer has stepped before, and all layers run their first step in the session
            with scales of 1 and without an amax of an earlier step
        """,
        silent="optimizers without a count of steps, such as SGD; recipes without history",
        source="NVIDIA-NeMo/Megatron-Bridge#1730, NVIDIA/TransformerEngine#982",
        why="the first steps run with scales of 1: gradients round to 0, and large values are clipped",
        disproof="the earlier steps ran in high precision, or with another recipe",
        remedy="""
            Save and load the whole state_dict(), with the keys that end in _extra_state, and without strict=False.
            docs/session.md explains how to save and load a checkpoint of FP8 training
        """,
        recipes=("fp8_delayed_scaling",),
        check=partial(Reported, kinds=("resume_audited",), find=_lost_scales),
    ),
    Rule(
        id="stale-scale",
        title="the scale of delayed scaling differs between ranks",
        subject="tensor",
        needs="scale_inv_min and scale_inv_max of delayed scaling, reduced over ranks, with one micro-batch in a step",
        collect="""
            LogFp8TensorStats with stats: [scale_inv_min, scale_inv_max], or the default config; and statistics that are
            reduced over ranks
        """,
        condition=f"""
            the scales of a tensor differ between ranks in {{needed}} collection steps in a row. A warning if by
            2^{APART:g} or more, else a note
        """,
        silent="""
            current and block scaling, where each rank has local scales; the first step, which has no scale yet; steps
            with several micro-batches, each of which updates the scales
        """,
        source="""
            NVIDIA/Megatron-LM#442: with a group that left out tensor parallelism, runs diverged after some 1,000 steps;
            the threshold is this project's
        """,
        why="""
            ranks round the same weights differently, and FP8 tensors that tensor-parallel ranks gather need one common
            scale
        """,
        disproof="""
            the group is smaller on purpose, as with Megatron's tp_only_amax_red, or the ranks have different layers
            with the same name
        """,
        remedy="""
            Pass a group with all data-parallel and tensor-parallel ranks as te.autocast(amax_reduction_group=...), in
            Megatron get_amax_reduction_group(); keep reduce_amax=True
        """,
        cost="one small all-reduce per layer in each forward and backward",
        recipes=("fp8_delayed_scaling",),
        check=partial(
            InARow, statistic="scale_inv_max", needed=2, find=_differ, applies_to=_may_differ, is_strict=True
        ),
    ),
)
