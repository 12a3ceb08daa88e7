"""Rules on scales of delayed scaling, which come from the amaxes of earlier steps, and on wrong kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2
from te_precision_callbacks.base.vocabulary import RESULT
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import (
    Find,
    InARow,
    Reported,
    Rule,
    RuleCheck,
    Sighting,
    Sightings,
    runs_low_precision,
)
from te_precision_callbacks.diagnosis.rules.lost_elements import can_overflow, overflow_threshold, starts_from_zero
from te_precision_callbacks.diagnosis.rules.settings import is_scaled
from te_precision_callbacks.sinks.step_records import Event

_LARGEST = {"FP8 E4M3": E4M3.max, "FP8 E5M2": E5M2.max}


def _largest(layer: LayerFacts, tensor: str) -> float:
    """The maximum of the operand's format; nan without delayed scaling."""
    is_delayed = layer.recipe == "fp8_delayed_scaling"
    return _LARGEST.get(layer.format_of(tensor), np.nan) if is_delayed else np.nan


@dataclass(kw_only=True)
class ScaleCheck(RuleCheck):
    """A rule that compares ``scale_inv_max`` of delayed scaling with the amax of the same step.

    Attributes:
        find: yields the sightings of a step, from the attributes for it.
        scales, amaxes: [rows]
        unmoved: [rows]: the collection steps without a change of a scale that should have followed amax.
        initial: [rows]: whether the scale still has its initial value 1.
        begins: [rows]: amax before its present rise; nan if it does not rise.
    """

    find: Find
    applies: bool | None = None
    begins = np.empty(0)
    _rows = np.empty((0, 5))  # scale, collection steps, least and largest amax, 1 if the scale has moved

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
        self.scales = scales
        self.amaxes = amaxes
        return self.find(self, numbers)


def _never_updated(check: ScaleCheck, numbers: StepNumbers) -> Sightings:
    def describe(row: int) -> str:
        value = "1, its initial value," if check.initial[row] else f"{check.scales[row]:.3g}"
        steps = check.unmoved[row]
        return f"its scale is {value} in all {steps:.0f} collection steps; amax is {check.amaxes[row]:.3g}"

    unmoved = check.unmoved >= UNMOVED_STEPS
    for sighting in check.in_a_row(numbers, "scale_inv_max", unmoved, describe, steps=1):
        remedy = ""
        if sighting.tensor == "gradient":
            remedy = _REMEDY_OF_SCALED if is_scaled(numbers.facts) else _REMEDY_OF_GRADIENT
        yield sighting._replace(statistic="scale_inv_max", since=check.steps[0], remedy=remedy)


_REMEDY_OF_SCALED = """
    A step that the GradScaler has skipped leaves amaxes of inf in the history: choose a smaller init_scale=, a
    shorter amax_history_len=, or Float8CurrentScaling. If no step was skipped, make sure that the first layer
    inside te.autocast has a backward
"""

_REMEDY_OF_GRADIENT = """
    Make sure that the first layer inside te.autocast has a backward, which updates the scales of all gradients. If
    a detach() after it is on purpose, run it in a separate te.autocast, or freeze it and all before it. Or use
    Float8CurrentScaling
"""


def _does_not_fit(check: ScaleCheck, numbers: StepNumbers) -> Sightings:
    amaxes = check.amaxes
    above = np.log2(numbers.by_row(_largest) * check.scales / amaxes)
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

    yield from check.in_a_row(numbers, "scale_inv_max", small, is_small, key="small")
    rising = rises & late
    yield from check.in_a_row(numbers, "scale_inv_max", rising, is_small, reported=risen & ~small, key="rising")
    yield from check.in_a_row(numbers, "scale_inv_max", large, is_large, key="large", steps=TOO_LARGE_STEPS)


def _differ(check: RuleCheck, numbers: StepNumbers) -> Sightings:
    """Find scales that differ between ranks, of tensors with one scale per rank."""
    apart = np.log2(numbers.values("scale_inv_max") / numbers.values("scale_inv_min"))
    apart[~np.isfinite(apart) | np.isnan(numbers.by_row(_largest))] = 0.0
    far = apart >= APART
    return check.by_severity(
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


def _lost_scales(check: Reported, event: Event) -> Sightings:
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


_GEMM: Mapping[str, str] = {tensor: gemm for gemm, tensor in RESULT.items()}

_ELEMENTS = {
    **{f"{recipe} {bits.name}": bits for recipe in ("FP8", "FP8 block", "MXFP8") for bits in (E4M3, E5M2)},
    "NVFP4": E2M1,
}


class _Limits(NamedTuple):
    """The largest error of an element relative to itself and to its factor, and the largest number of a format."""

    relative: float
    lowest: float
    largest: float


def _limits(layer: LayerFacts, tensor: str) -> _Limits:
    bits = _ELEMENTS.get(layer.format_of(tensor))
    if bits is None:
        return _Limits(np.nan, np.nan, np.nan)
    # NVFP4 rounds gradients stochastically: to either neighbor.
    steps = 1.0 if bits is E2M1 and tensor == "gradient" else 0.5
    return _Limits(steps * 2.0**-bits.mantissa_bits + UNROUNDED, steps * bits.min_subnormal, bits.max)


def _wrong_codes(check: RuleCheck, numbers: StepNumbers) -> Sightings:
    """Find a squared error above the largest that the format explains.

    An element is rounded by half of the distance of two values at most: by ``2^-(mantissa bits + 1)`` of itself, or by
    half of the smallest subnormal times its factor. An element above the range, under delayed scaling, is off by the
    distance to the range.
    """
    mse = numbers.finite("mse")
    square = mse * 10 ** (numbers.values("sqnr_db") / 10)
    limits = _Limits(*numbers.by_row(_limits).T)
    factor = numbers.values("scale_inv_max")
    amax = numbers.values("cur_amax")
    beyond = np.fmax(amax - limits.largest * numbers.values("scale_inv_min"), 0.0)
    share = numbers.values("overflows%") / 100
    clipped = np.fmin(share * beyond**2, (beyond / amax) ** 2 * square)
    clipped = np.where((share == 0) | ~numbers.by_row(can_overflow), 0.0, clipped)
    most = limits.relative**2 * square + (limits.lowest * factor) ** 2 + clipped
    return check.in_a_row(
        numbers,
        "mse",
        np.isfinite(most) & (factor > 0) & np.isfinite(mse) & (mse > most),
        lambda row: (
            f"the quantized values are {100 * np.sqrt(mse[row] / square[row]):.3g} % off, relative to the"
            f" norm; rounding explains {100 * np.sqrt(most[row] / square[row]):.3g} %"
        ),
    )


def _unmeasured(facts: Facts) -> str:
    why = facts.settings.unmeasured
    return why and f"LogGemmError has measured nothing: {why}"


def _wrong_gemms(check: RuleCheck, numbers: StepNumbers) -> Sightings:
    """Find results that differ from the product of their operands by more than rounding."""
    settings = numbers.facts.settings
    ratio = numbers.values("gemm_kernel_ratio")
    error = numbers.values("gemm_kernel_error")
    gain = numbers.values("gemm_gain")
    rank = numbers.values("gemm_wrong_rank")
    is_scaled = (np.abs(gain - 1) > GAIN) & (np.abs(error - np.abs(gain - 1)) < GAIN * error)
    is_alone = (settings.ranks > 1 and settings.alike) & (rank >= 0)

    def describe(row: int) -> str:
        gemm = f"the GEMM {_GEMM[str(numbers.tensors[row])]}"
        on_rank = f", only on rank {rank[row]:.0f}" if is_alone[row] else ""
        if is_scaled[row]:
            return f"{gemm} gives {gain[row]:.4g} times the product of its operands{on_rank}"
        return (
            f"{gemm} is {100 * error[row]:.3g} % off the product of its operands, and a row"
            f" {ratio[row]:.3g} times as much as rounding explains{on_rank}"
        )

    for key, holds, remedy in (("", ~is_alone, ""), ("rank", is_alone, _REMEDY_OF_RANK)):
        for sighting in check.in_a_row(numbers, "gemm_kernel_ratio", (ratio > 1) & holds, describe, key=key):
            yield sighting._replace(remedy=remedy)


_REMEDY_OF_RANK = "Remove this rank's GPU from the job, and test it (dcgmi diag -r 3)"

GAIN = 0.05
"""How far the gain of a scaled result is from 1 at least. A wrong scale is off by a factor of 2 or more."""

UNROUNDED = 2.0**-8
"""The rounding to bfloat16 of a tensor that a fused kernel quantizes before, relative to an element."""

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
        check=partial(ScaleCheck, needed=TOO_SMALL_STEPS, find=_does_not_fit),
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
        check=partial(ScaleCheck, needed=UNMOVED_STEPS, find=_never_updated),
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
    Rule(
        id="wrong-codes",
        title="a quantizer whose codes and scales do not fit its input",
        subject="tensor",
        needs="mse, sqnr_db, overflows%, scale_inv_min, scale_inv_max and cur_amax of quantized tensors",
        collect="""
            LogFp8TensorStats with stats: [mse, sqnr_db, overflows%, scale_inv_min, scale_inv_max] and LogTensorStats
            with stats: [cur_amax]. The default config lacks mse and sqnr_db
        """,
        condition="""
            mse is above r^2 * x^2 + (d * scale_inv_max)^2. x^2 is the mean square of the tensor, from sqnr_db; r is
            half of the last bit, 2^-(mantissa bits + 1), plus 2^-8 for the rounding to bfloat16; d is half of the
            smallest subnormal of the format. NVFP4 rounds gradients stochastically, with twice the r and d. Under
            delayed scaling, elements above the range may add the smaller of overflows% / 100 * b^2 and (b / cur_amax)^2
            * x^2, where b is cur_amax minus the largest number of the format times scale_inv_min
        """,
        silent="elements that round to 0, elements above the range, tensors with inf or nan",
        severity="error",
        source="""
            the formats: OCP Microscaling Formats (MX) 1.0, table 1, and arXiv 2209.05433 for E4M3 and E5M2.
            TransformerEngine pull request 3281: stochastic rounding of NVFP4 that gave zeros
        """,
        why="the GEMM multiplies wrong values, even if its kernel is correct",
        disproof="te_precision_callbacks.base.numerics gives the same values for the tensor",
        remedy="""
            Look for code that changes scales after quantizing, or that keeps codes of an earlier step with a new scale.
            Report a quantizer of Transformer Engine, and run these layers in high precision or with another recipe.
            With NVFP4, first try NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
        """,
        check=partial(
            InARow,
            statistic="mse",
            also=("sqnr_db", "scale_inv_min", "scale_inv_max", "cur_amax"),
            find=_wrong_codes,
            applies_to=runs_low_precision,
            is_strict=True,
        ),
        consequence_of=("stale-weights",),
    ),
    Rule(
        id="wrong-gemm",
        title="a GEMM whose result is not the product of its operands",
        subject="tensor",
        needs="gemm_kernel_ratio, gemm_kernel_error, gemm_gain and gemm_wrong_rank of GEMMs",
        collect="LogGemmError with gemms: [fprop, dgrad, wgrad]",
        condition="gemm_kernel_ratio is above 1: a row is off by more than 3 times the bound of its rounding",
        silent="rounding of the result and of the sums on this device: docs/gemm-error.md; rows with inf or nan",
        severity="error",
        source="""
            the bound is derived in docs/gemm-error.md. Such kernels: cudnn-frontend issue 981, Primus-Turbo issue 397,
            TransformerEngine issue 3342 (scaled by up to 2^-7). Silent data corruption on a single device: arXiv
            2102.11245
        """,
        why="the wrong values are finite and plausible, so no statistic of a tensor shows the error",
        disproof="the same operands, multiplied in float64, give the same result",
        remedy="""
            Report the kernel, and for a factor the layout of its scales. Run these layers in high precision until it is
            fixed. Another version of cuBLAS, Transformer Engine or the driver may be correct
        """,
        cost="the layer runs at the speed of BF16",
        check=partial(
            InARow,
            statistic="gemm_kernel_ratio",
            find=_wrong_gemms,
            applies_to=lambda facts: bool(_unmeasured(facts)),
            lacks_in=_unmeasured,
        ),
    ),
)
