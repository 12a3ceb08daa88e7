"""Rules on lost elements: inf and nan, overflow, underflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import RESULT
from te_precision_callbacks.diagnosis.facts import LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.patches import keep_high
from te_precision_callbacks.diagnosis.rule import InARow, Rule, RuleCheck, Sighting, Sightings, runs_low_precision
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
            yield self._begin(_first_nonfinite(numbers, rows, last_finite), in_backward)

    def event(self, event: Event) -> Sightings:
        problems = event.data.get("problems", ()) if event.kind == "parameters" else ()
        broken = [row for row in problems if row["what"] in ("nonfinite_gradient", "nonfinite")]
        self._lasts |= event.kind == "observation_failed" or bool(broken)
        in_backward = event.phase == "backward"
        if event.kind == "nonfinite":
            first_line = re.sub(r"^> \[\d+\] \S+: ", "", event.text.partition("\n")[0].rstrip(". "))
            yield self._begin(Sighting(first_line, tuple(filter(None, (event.layer,))), since=event.iteration))
        if event.kind == "first_nonfinite":
            if event.data["since"] < event.data["iteration"]:
                self.note_data(event.data["iteration"] - 1)  # which was watched, and finite
            yield self._begin(_origin(event), in_backward)
        first = self._first
        if earlier := [row for row in broken if first is None or row["since"] < (first.since or 0)]:
            if first is not None:  # all ranks share problems of parameters some steps later
                yield first._replace(withdraws=True)
            yield self._begin(_nonfinite_parameters(earlier[0]))
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

    def _begin(self, sighting: Sighting, in_backward: bool = False) -> Sighting:
        """Return the first sighting of the run, or a note on a step that a GradScaler skips."""
        if in_backward and is_scaled(self.run):
            return sighting._replace(severity="note", key="scaled", remedy=_SKIPPED)
        if self._first is None or (sighting.since or 0) < (self._first.since or 0):  # known late, from another rank
            self._first = sighting
        return self._first


def _origin(event: Event) -> Sighting:
    """Return the sighting of the first tensor with inf or nan, as the watch of every step reports it."""
    since = event.data["iteration"]
    sighting = Sighting(event.text.partition(": ")[2].rstrip("."), (event.layer,), event.tensor, since=since)
    if event.tensor != "weight":
        return sighting._replace(remedy=_remedy_between(event))
    sighting = sighting._replace(remedy=_REMEDY_OF_UPDATE if event.data["since"] < since else _REMEDY_OF_START)
    return sighting._replace(layers=(), tensor="") if event.data["weights"] > 1 else sighting


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
    return keep_high(*high, others=set(numbers.names) - set(high))


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
        check=partial(
            InARow,
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
        check=partial(
            InARow,
            statistic="underflows%",
            needed=UNDERFLOW_STEPS,
            find=_underflow,
            applies_to=runs_low_precision,
        ),
        essential=True,
        consequence_of=("stale-scale",),
    ),
)
