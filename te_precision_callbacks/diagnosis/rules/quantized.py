"""Rules on quantized tensors and GEMMs: inf and nan, overflow, underflow, scales of delayed scaling, wrong kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import first_of, many
from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2
from te_precision_callbacks.base.vocabulary import RESULT
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.patches import keep_high
from te_precision_callbacks.diagnosis.rule import (
    COLLECT_EACH_STEP,
    NEEDS_EACH_STEP,
    Changed,
    Find,
    InARow,
    Reported,
    Rule,
    RuleCheck,
    Sighting,
    Sightings,
    runs_low_precision,
)
from te_precision_callbacks.diagnosis.rules.parameters import layers_of
from te_precision_callbacks.diagnosis.rules.settings import is_scaled
from te_precision_callbacks.diagnosis.rules.training import OF_SKIPPED_STEP
from te_precision_callbacks.flight.rows import BACKWARD, FINITE_AGAIN
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Mask, holds_any

_CAN_OVERFLOW = ("fp8_delayed_scaling", "")
"""The recipes whose scale need not fit the tensor. With the others an element can only be above by rounding."""

_UNKNOWN_NORM = "and their part of the tensor's norm (underflow_norm%) is not recorded"

_REMEDY_OF_WEIGHT = """
    Resume from an earlier checkpoint with DebugActivationOverflow(model, parameters=True) around the training.
    Unlike debug='activation_overflow', it also checks weights: a low-precision layer may cast an inf in its weight
    to a finite value
"""

_REMEDY_OF_GRADIENT = """
    Resume from an earlier checkpoint. If debug='activation_overflow' finds no inf or nan in the backward of this
    layer, look for code that writes .grad after it: hooks, collectives, unscaling, clipping
"""

_REMEDY_OF_UPDATE = """
    Resume from an earlier checkpoint, and look at what wrote the weights: the optimizer's step and state, the
    learning rate, and code that writes weights or .grad (hooks, collectives, unscaling, clipping)
"""

_REMEDY_OF_START = """
    Start again, and look at the initialization of the weights, or at the checkpoint that was loaded: the first step
    read them with inf or nan
"""

_REMEDY_BETWEEN = """
    Resume from an earlier checkpoint, and look at {}, such as {}a norm, a bias, an activation function, attention.
    debug='activation_overflow' stops at the module and batch
"""

_REMEDY_OF_ALL_GRADIENTS = """
    Resume from an earlier checkpoint. Check the loss of that step, and pass debug='activation_overflow', which
    stops at the module and batch with the first inf or nan
"""

_SKIPPED = """
    Nothing, as long as it ends: the GradScaler skips such a step, and halves its scale. With a smaller init_scale=
    it skips fewer steps
"""

_STEPPED = ". An optimizer stepped with the gradients of that step, which were finite, as where a cast clips an inf"

_FINITE_AGAIN = (
    f"all that GEMMs read in the {FINITE_AGAIN} optimizer steps after it is finite, and no gradient at an optimizer's"
    " step had inf or nan"
)


class Nonfinite(RuleCheck):
    """The first step with inf or nan, and the first layer in it.

    In a plain log, amax is then inf or nan. A session's amax ignores such elements, and nonfinite_num counts them.
    """

    _first: Sighting | None = None
    _in_backward = False  # whether the first one is of a backward
    _ends_step = False  # whether the first one is a gradient at the optimizer's step, after GEMMs of other ranks
    _lasts = False  # whether parameters had inf or nan, or may have had them

    def step(self, numbers: StepNumbers) -> Sightings:
        amaxes = numbers.are_known("cur_amax")
        if not holds_any(amaxes | numbers.are_known("nonfinite_num")):
            return
        last_finite = self.steps[-1] if self.steps else None
        self.note_data(numbers.iteration)
        are_broken = (amaxes & ~np.isfinite(numbers.values("cur_amax"))) | (numbers.values("nonfinite_num") > 0)
        if holds_any(are_broken):
            rows = np.flatnonzero(are_broken).tolist()
            in_backward = all(numbers.tensors[row] in BACKWARD for row in rows)
            yield from self._begin(_first_nonfinite(numbers, rows, last_finite), in_backward)

    def event(self, event: Event) -> Sightings:
        problems = event.data.get("problems", ()) if event.kind == "parameters" else ()
        broken = [row for row in problems if row["what"] in ("nonfinite_gradient", "nonfinite")]
        self._lasts |= event.kind == "observation_failed" or bool(broken)
        in_backward = event.phase == "backward"
        if event.kind == "nonfinite":
            first_line = re.sub(r"^> \[\d+\] \S+: ", "", event.text.partition("\n")[0].rstrip(". "))
            yield from self._begin(Sighting(first_line, tuple(filter(None, (event.layer,))), since=event.iteration))
        if event.kind == "first_nonfinite":
            if event.data["since"] < event.data["iteration"]:
                self.note_data(event.data["iteration"] - 1)  # which was watched, and finite
            yield from self._begin(_origin(event), in_backward)
        first = self._first
        # All ranks share problems of parameters some steps later.
        if earlier := [row for row in broken if first is None or row["since"] < (first.since or 0)]:
            yield from self._begin(_nonfinite_parameters(earlier[0]))
            self._ends_step = earlier[0]["since"] < event.iteration
        elif first is None:
            return
        elif event.kind == "last_nonfinite" and not (in_backward and is_scaled(self.run)):
            yield first
        elif event.kind == "finite_again" and not self._lasts:
            self._first = None
            if event.data.get("stepped"):
                yield first._replace(seen=first.seen + _STEPPED, severity="warning", replaces=True)
            else:
                seen = f"{first.seen}; {_FINITE_AGAIN}"
                yield first._replace(seen=seen, severity="note", remedy=OF_SKIPPED_STEP, replaces=True)

    def _begin(self, sighting: Sighting, in_backward: bool = False) -> Sightings:
        """Yield the first sighting of the run, or a note on a step that a GradScaler skips. In a step, the forwards of
        all ranks come before the backwards: they may be the stages of a pipeline.
        """
        if in_backward and is_scaled(self.run):
            yield sighting._replace(severity="note", key="scaled", remedy=_SKIPPED)
            return
        first = self._first  # another one may be known late, from another rank
        if first is not None:
            if (sighting.since or 0, in_backward) >= ((first.since or 0) + self._ends_step, self._in_backward):
                yield first
                return
            yield first._replace(withdraws=True)
        self._first = sighting
        self._in_backward = in_backward
        self._ends_step = False
        yield sighting


def _origin(event: Event) -> Sighting:
    """Return the sighting of the first tensor with inf or nan, as the watch of every step reports it."""
    since = event.data["iteration"]
    sighting = Sighting(event.text.partition(": ")[2].rstrip("."), (event.layer,), event.tensor, since=since)
    if event.tensor != "weight":
        return sighting._replace(remedy=_remedy_between(event))
    sighting = sighting._replace(remedy=_REMEDY_OF_UPDATE if event.data["since"] < since else _REMEDY_OF_START)
    if event.data["weights"] > 1:
        return sighting._replace(layers=(), tensor="")
    return sighting


def _remedy_between(event: Event) -> str:
    """The remedy for inf and nan after a finite tensor. Its GEMM may be wrong too."""
    if not event.data["before"]:
        return _REMEDY_BETWEEN.format(f"the batch, and what runs before {event.layer}", "")
    layer, tensor = event.data["before"]
    between = f"what runs between the {tensor} of {layer} and the {event.tensor} of {event.layer}"
    if event.phase == "backward" and tensor in ("activation", "output"):
        between = f"the loss, and what runs between it and {event.layer}"
    gemm = ""
    if event.tensor in RESULT.values():
        gemm = f"the GEMM of {event.layer} itself, "
    elif tensor in ("activation", "gradient"):
        gemm = f"the GEMM of {layer} itself, "
    return _REMEDY_BETWEEN.format(between, gemm)


def _nonfinite_parameters(row: Mapping[str, Any]) -> Sighting:
    """The sighting of parameters with inf or nan, or of their gradients at an optimizer's step, first of the layer
    where these may have arisen. In the backward, inf and nan spread from there to the layers before it.
    """
    names = row["names"]
    since = row["since"]
    if row["what"] == "nonfinite":
        count = f"{many(len(names), 'parameter')} {'has' if len(names) == 1 else 'have'} inf or nan"
        when = f"the update of step {since}" if row["number"] else "the last step"
        seen = f"{count} after {when}, first {names[0]}"
        return Sighting(seen, layers_of(names), since=since, remedy=_REMEDY_OF_UPDATE)
    if row["number"] >= NEARLY_ALL:
        seen = "the gradients of nearly all parameters have inf or nan at the optimizer's step"
        return Sighting(seen, (), "gradient", since=since, remedy=_REMEDY_OF_ALL_GRADIENTS)
    more = f" and {many(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
    seen = f"the gradient of {names[-1]}{more} has inf or nan at the optimizer's step"
    return Sighting(seen, layers_of(names), "gradient", since=since, remedy=_REMEDY_OF_GRADIENT)


def _first_nonfinite(numbers: StepNumbers, broken: Sequence[int], last_finite: int | None) -> Sighting:
    """The sighting of the first tensor with inf or nan in a step, of the rows with such a tensor."""
    iteration = numbers.iteration
    weights = sum(numbers.tensors[row] == "weight" for row in broken)
    if last_finite is not None and weights > 1:  # the optimizer has spread it, so the first layer is not the origin
        first = last_finite + 1
        steps = f"in step {iteration}" if first == iteration else f"in the steps {first} to {iteration}"
        seen = (
            f"the weights of {weights} layers have inf or nan, so the first layer is unknown. The values appeared"
            f" {steps}: rerun from step {first} to find the layer"
        )
        return Sighting(seen, statistic="nonfinite_num", since=iteration)
    row = numbers.in_order(broken)[0]
    tensor = str(numbers.tensors[row])
    count = numbers.values("nonfinite_num")[row]
    seen = "has inf or nan"
    if count > 0:
        seen = f"{many(round(count), 'element')} {'is' if count == 1 else 'are'} inf or nan"
    more = len({numbers.names[row] for row in broken}) - 1
    if more:
        seen += f"; {many(more, 'more layer')} {'has' if more == 1 else 'have'} inf or nan in the same step"
    remedy = ""
    if tensor == "weight":
        remedy = _REMEDY_OF_WEIGHT if iteration else _REMEDY_OF_START
    return Sighting(seen, (numbers.names[row],), tensor, "nonfinite_num", iteration, remedy=remedy)


def starts_from_zero(numbers: StepNumbers) -> Mask:
    """[rows]: in the first steps of a run, whether a tensor was 0 in the first collection step, as with LoRA.

    It doubles in each step and then grows by half, so a scale from the previous step is too small.
    """
    starts: Mask = numbers.earlier(numbers.first, "cur_amax") == 0
    return starts & (numbers.iteration < FROM_ZERO)


def _overflow(check: RuleCheck, numbers: StepNumbers) -> Sightings:
    values = np.fmax(numbers.finite("overflows%"), 0.0)
    values = np.where(numbers.by_row(can_overflow) & ~starts_from_zero(numbers), values, 0.0)
    last_share = np.fmax(numbers.earlier(numbers.last, "overflows%"), 0.0)
    return check.in_a_row(
        numbers,
        "overflows%",
        (values >= numbers.by_row(overflow_threshold)) & (values >= FALLING * last_share),
        lambda row: f"{values[row]:.3g} % of the elements are above the range of the format",
    )


def _underflow(check: RuleCheck, numbers: StepNumbers) -> Sightings:
    """Find elements that round to 0: a warning if much of the norm is lost with them, otherwise a note."""
    lost = numbers.values("underflow_norm%")
    values = numbers.finite("underflows%")
    heavy = ((lost >= LOST_NORM) & (values > 0)) | (values >= 100)
    heavy |= (values >= MOST_OF_ACTIVATION) & numbers.are("activation")
    are_many = ~heavy & (values >= numbers.by_row(underflow_threshold))

    def describe(row: int) -> str:
        norm = _UNKNOWN_NORM if np.isnan(lost[row]) else f"with {lost[row]:.2g} % of the tensor's norm"
        return f"{values[row]:.3g} % of the elements round to 0, {norm}"

    for sighting in check.by_severity(numbers, "underflows%", heavy, are_many, describe):
        patch = keep_first(sighting.layers, numbers) if sighting.severity == "warning" else ""
        yield sighting._replace(patch=patch)


def keep_first(layers: Sequence[str], numbers: StepNumbers) -> str:
    high = layers[:MOST_KEPT]
    return keep_high(*high, other_layers=set(numbers.names) - set(high))


def can_overflow(layer: LayerFacts, tensor: str) -> bool:
    return layer.recipe in _CAN_OVERFLOW


def overflow_threshold(layer: LayerFacts, tensor: str) -> float:
    """The threshold for elements above the range of the format, in percent."""
    return OVERFLOW if tensor == "activation" else OF_OTHERS


def underflow_threshold(layer: LayerFacts, tensor: str) -> float:
    """The threshold for elements that round to 0, in percent."""
    return UNDERFLOW.get(layer.format_of(tensor).partition(" ")[0], _OF_UNKNOWN)


FROM_ZERO = 20
"""The steps in which a tensor that begins at 0 may outgrow a scale that is a step late."""

MOST_KEPT = 4
"""The most layers that a finding proposes to keep in high precision."""

OVERFLOW = 0.5
OF_OTHERS = 2.0
OVERFLOW_STEPS = 3
"""Percent of the elements of activations, of other tensors, which may grow from 0, and collection steps in a row."""

FALLING = 0.75
"""A share that is below so much of the last one is going away."""

MOST_OF_ACTIVATION = 90.0
"""Percent of an activation's elements that round to 0: only outliers, which carry the norm, are left."""

UNDERFLOW = {"NVFP4": 40.0, "MXFP8": 20.0, "FP8": 20.0}
"""Percent of the elements, by the first word of the format."""

UNDERFLOW_STEPS = 2
LOST_NORM = 10.0
"""Collection steps in a row, and percent of a tensor's norm that a healthy run does not lose."""

_OF_UNKNOWN = max(UNDERFLOW.values())

NEARLY_ALL = 90.0
"""Percent of the parameters, whose gradients then have inf or nan from the loss or the last layers."""


_LARGEST = {"FP8 E4M3": E4M3.max, "FP8 E5M2": E5M2.max}


def _largest(layer: LayerFacts, tensor: str) -> float:
    """The maximum of the operand's format; nan without delayed scaling."""
    is_delayed = layer.recipe == "fp8_delayed_scaling"
    if is_delayed:
        return _LARGEST.get(layer.format_of(tensor), np.nan)
    return np.nan


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
        has_recipe = any(layer.has_run or layer.recipe for layer in facts)
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
        self._rows = np.array([first, count + used, least, most, moved]).T
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
            remedy = _REMEDY_OF_SCALED if is_scaled(numbers.facts) else _REMEDY_OF_UNSCALED
        yield sighting._replace(statistic="scale_inv_max", since=check.steps[0], remedy=remedy)


_REMEDY_OF_SCALED = """
    A step that the GradScaler has skipped leaves amaxes of inf in the history: choose a smaller init_scale=, a
    shorter amax_history_len=, or Float8CurrentScaling. If no step was skipped, make sure that the first layer
    inside te.autocast has a backward
"""

_REMEDY_OF_UNSCALED = """
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


def _lost_state(check: Reported, event: Event) -> Sightings:
    key = f"at {event.iteration}"
    yield Sighting("", key=key, withdraws=True)  # of a resume that was repeated
    if event.data.get("lost"):
        lost = " ".join(first_of(event.data["lost"], 2, "And {} more.")).rstrip(".")
        layers = tuple(event.data.get("layers", ()))
        seen = f"the resume has not restored the training state. {lost}"
        yield Sighting(seen, layers, since=event.iteration, key=key)


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
        id="nonfinite",
        title="inf or nan in a tensor",
        subject="tensor",
        needs="nonfinite_num or cur_amax of tensors",
        collect="LogTensorStats with stats: [nonfinite_num], or the default config",
        condition=f"""
            a tensor has an inf or nan element, or the gradient of a parameter has one when its optimizer steps; the
            first such tensor in execution order is reported. A note if the watch of every step found it, on a single
            rank, and all that GEMMs read in the {FINITE_AGAIN} optimizer steps after it is finite, as are all gradients
            and weights at optimizer steps: as where the script skips a batch. A warning if an optimizer stepped in that
            step, and it had no other micro-batch
        """,
        silent="nothing: in gradients that a GradScaler has scaled for float16, inf and nan are a note",
        severity="error",
        source="arithmetic",
        why="inf and nan spread to all weights in the next optimizer step, and training does not recover",
        disproof="the optimizer skipped the step, as with a GradScaler",
        remedy="""
            Resume from an earlier checkpoint and pass debug='activation_overflow' to the callback or session. It stops
            at the module and batch with the first inf or nan. To check weights too, use
            te_precision_callbacks.debug_utils.DebugActivationOverflow(model, parameters=True)
        """,
        check=Nonfinite,
        essential=True,
    ),
    Rule(
        id="overflow",
        title="elements above the range of the format",
        subject="tensor",
        needs="overflows% of quantized tensors",
        collect="LogFp8TensorStats with stats: [overflows%], or the default config",
        condition=f"""
            overflows% is at least {OVERFLOW:g} for activations or {OF_OTHERS:g} for other tensors in {OVERFLOW_STEPS}
            collection steps in a row, each at least {FALLING:g} times the one before
        """,
        silent="""
            single steps in which amax grows under delayed scaling, because the next scale fits again; the first steps
            of LoRA; few elements; steps in which the tensor has inf or nan
        """,
        source="arXiv 2605.26189: a stale amax saturates, invisible in the loss; the threshold is this project's",
        why="the largest elements, which matter most to the product, are clipped",
        disproof="a run with current scaling reaches the same loss",
        remedy="Use Float8CurrentScaling or a block recipe, whose scales fit each step; or set a margin",
        cost="current scaling reads each tensor once more to compute amax",
        recipes=("fp8_delayed_scaling",),
        check=lambda: InARow(
            statistic="overflows%",
            needed=OVERFLOW_STEPS,
            find=_overflow,
            applies_to=runs_low_precision,
        ),
        essential=True,
        consequence_of=("diverging-loss",),
    ),
    Rule(
        id="underflow",
        title="elements that round to 0 carry a relevant part of the tensor's norm",
        subject="tensor",
        needs="underflows% of quantized tensors",
        collect="LogFp8TensorStats with stats: [underflows%, underflow_norm%], or the default config",
        condition=f"""
            in {UNDERFLOW_STEPS} collection steps in a row, the elements that round to 0 carry {LOST_NORM:g} % of the
            tensor's norm or more, or {MOST_OF_ACTIVATION:g} % of an activation's elements round to 0. If they carry
            less, or if underflow_norm% is not recorded, but underflows% is at least {UNDERFLOW["NVFP4"]:g} for NVFP4,
            or {UNDERFLOW["FP8"]:g} for MXFP8 and FP8, the finding is a note
        """,
        silent="""
            the first step of delayed scaling, which has no scale yet; elements that are already 0; steps in which the
            tensor has inf or nan, which may distort its scale
        """,
        source="""
            no threshold is published; this project, calibrated on healthy runs. In the gradient of a tied head 96 % of
            the elements may round to 0, with only 3e-4 % of the norm
        """,
        why="elements that round to 0 do not contribute to the product",
        disproof="a run with these layers in BF16 reaches the same loss",
        remedy="""
            Keep these layers, or the first of them, in high precision. Or use a recipe that loses less: a block recipe
            instead of delayed or current scaling, MXFP8 instead of NVFP4
        """,
        cost="the layer runs at the speed of BF16",
        check=lambda: InARow(
            statistic="underflows%",
            needed=UNDERFLOW_STEPS,
            find=_underflow,
            applies_to=runs_low_precision,
        ),
        essential=True,
        consequence_of=("stale-scale", "resume"),
    ),
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
        check=lambda: ScaleCheck(needed=TOO_SMALL_STEPS, find=_does_not_fit),
        essential=True,
        consequence_of=("diverging-loss", "growth", "resume"),
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
        check=lambda: ScaleCheck(needed=UNMOVED_STEPS, find=_never_updated),
        essential=True,
        consequence_of=("missing-gradient", "nonfinite"),
    ),
    Rule(
        id="resume",
        title="a resume did not restore the training state",
        subject="model",
        needs="a resume",
        collect="the session's state in the checkpoint (session.state_dict()), after a step of the optimizer",
        condition="""
            before the optimizer's first step, scales and amax histories of delayed scaling, quantized weights, or
            samples of the optimizer's weights, of their master weights or of its state differ from those in the
            checkpoint's fingerprint, or are absent; or a number of its groups, such as the learning rate, differs by
            more than a factor of 2. Or, without a fingerprint, the optimizer has stepped before, and all layers run
            their first step in the session with scales of 1 and without an amax of an earlier step
        """,
        silent="""
            the optimizer's part on another number of ranks; optimizers that do not step in the first step; layers and
            parameters that are in only one of both; settings that a schedule has changed by a factor of 2 or less
        """,
        source="""
            NVIDIA-NeMo/Megatron-Bridge#1730, NVIDIA/TransformerEngine#982, NVIDIA/Megatron-LM#4705 and #5976,
            ultralytics/ultralytics#24085; the sample and the factor are this project's
        """,
        why="""
            the training does not go on where it was saved, even if its loss does not show it. With scales of 1,
            gradients round to 0, and large values are clipped
        """,
        disproof="the change is meant, as for a new learning rate, new weights or another recipe",
        remedy="""
            Load the whole state_dict() of the model (with the keys that end in _extra_state, without strict=False), of
            the optimizer (in the dtype in which it was saved), and of the schedule, before the first step; restore
            master weights from the checkpoint as well. docs/session.md explains how
        """,
        check=lambda: Reported(kinds=("resume_audited",), find=_lost_state),
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
        check=lambda: InARow(statistic="scale_inv_max", needed=2, find=_differ, applies_to=_may_differ, is_strict=True),
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
        check=lambda: InARow(
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
        check=lambda: InARow(
            statistic="gemm_kernel_ratio",
            find=_wrong_gemms,
            applies_to=lambda facts: bool(_unmeasured(facts)),
            lacks_in=_unmeasured,
        ),
    ),
    Rule(
        id="wrong-gemm",
        title="the gradient of an expert without tokens is not 0",
        subject="layer",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition="a step has no token for an expert of a te.GroupedLinear, and its wgrad is not 0",
        silent="wgrads that are added to a buffer of the script, such as main_grad: they are not read",
        severity="error",
        source="arithmetic: the sum over no tokens is 0",
        why="the optimizer adds what an earlier tensor has left in this memory to the weights of the expert",
        disproof="another loss than that of the tokens has a gradient in this GEMM",
        remedy="""
            Give each expert a token, such as one of zeros, until the version of Transformer Engine writes these
            gradients. Or set them to 0 before the optimizer's step, which this finding does not see
        """,
        check=lambda: Changed(kinds=("unwritten",)),
    ),
)
