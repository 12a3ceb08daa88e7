"""Rules on missing and zero gradients, and on growing amaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.coverage.gemm_precision import NO_BACKWARD
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting, Sightings
from te_precision_callbacks.diagnosis.rules.lost_elements import (
    OVERFLOW,
    can_overflow,
    keep_first,
    underflow_threshold,
)
from te_precision_callbacks.diagnosis.rules.settings import remedy_of_small_gradients
from te_precision_callbacks.diagnosis.shapes import COLLECT_EACH_STEP, NEEDS_EACH_STEP, AboveLimit, Changed
from te_precision_callbacks.flight.changes import HISTORY, LARGEST_CODES, LEAST_HISTORY, SPIKE, SPIKE_OF_GRADIENT
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Mask, holds_any

_FROM_LOSS = (
    "Look at the loss first: is it multiplied by 0, masked or clamped everywhere, or computed from detached values?"
    " Then at what follows the last layer"
)


class DeadGradient(RuleCheck):
    """Finds gradients of 0, unless a periodic schedule explains when the layer trains, as for alternating layers."""

    def __init__(self) -> None:
        super().__init__(needed=DEAD_STEPS)
        self._rhythms = np.empty((0, len(_PERIODS)), bool)  # [layers, periods and phases]: those that are possible
        self._have_trained = np.empty(0, bool)  # [layers]
        self._reported: dict[str, int] = {}  # layer -> steps in a row with a gradient since then

    def facts(self, facts: Facts) -> Sightings:
        never = [layer.never.get(gemm) for layer in facts.te_layers_that_ran for gemm in ("dgrad", "wgrad")]
        self.applies = not never or any(why in (None, NO_BACKWARD) for why in never)  # frozen otherwise
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        amaxes = numbers.finite("cur_amax")
        are_gradients = numbers.are_known("cur_amax", "gradient")
        are_activations = numbers.are_known("cur_amax", "activation")
        layers = numbers.facts.layers
        if not holds_any(are_gradients):
            names = numbers.names_of(are_activations)
            if any(name in layers and layers[name].lacks_backward for name in names):
                self.lacks = "no layer with statistics had a backward in a collection step"
            return
        self.note_data(numbers.iteration)
        has_trained = are_gradients & (amaxes != 0) & ~np.isnan(amaxes)
        zero = are_gradients & (amaxes == 0)
        if holds_any(zero):
            zero &= _in_layers(numbers, are_activations & (amaxes != 0)) | ~_in_layers(numbers, are_activations)
        rhythms = extend_rows(self._rhythms, len(numbers), True)
        self._have_trained = extend_rows(self._have_trained, len(numbers), False)
        is_due = numbers.iteration % _PERIODS == _PHASES
        rhythms[numbers.layers[has_trained]] &= is_due
        rhythms[numbers.layers[zero]] &= ~is_due
        self._rhythms = rhythms
        self._have_trained[numbers.layers[has_trained]] = True
        reported = ~(self._have_trained & holds_any(rhythms, axis=1))[numbers.layers]
        for sighting in self.streaks.sightings(
            numbers, "cur_amax", zero, lambda row: "all elements are 0", reported=reported
        ):
            self._reported.update(dict.fromkeys(sighting.layers, 0))
            if len(sighting.layers) == are_gradients.sum() > 1:
                seen = f"all gradients are 0, in all {len(sighting.layers)} layers: from the loss or the last layers on"
                sighting = sighting._replace(layers=(), seen=seen, remedy=_FROM_LOSS)
            yield sighting._replace(remedy=remedy_of_small_gradients(numbers.facts) or sighting.remedy)
        if self._reported:
            trained = set(numbers.names_of(has_trained))
            self._reported = {name: (steps + 1) * (name in trained) for name, steps in self._reported.items()}
            if min(self._reported.values()) >= TRAINED_STEPS:
                self._reported = {}
                seen = f"the gradient was 0 before, but is there in step {numbers.iteration}"
                yield Sighting(seen, tensor="gradient", severity="note", replaces=True)


def _in_layers(numbers: StepNumbers, rows: Mask) -> Mask:
    """[rows]: whether a layer has any of the rows."""
    counts = np.bincount(numbers.layers[rows], minlength=len(rows))
    in_layers: Mask = counts[numbers.layers] > 0
    return in_layers


def _spike(events: Sequence[Event]) -> Sightings:
    event = events[-1]
    slots = event.data["slots"]
    _, tensor = slots[0]
    layers = tuple(layer for layer, spiked in slots if spiked == tensor)
    spike = Sighting(event.text, layers, tensor, since=event.iteration)
    is_inf = event.data["now"] in LARGEST_CODES
    return [spike._replace(severity="warning", remedy=_OF_INF) if is_inf else spike]


_OF_INF = (
    "Look for the inf in the batch of that step, and in what runs before the layer (in the backward: the loss, and what"
    " runs after it): debug='activation_overflow' stops at the module and batch. Skip such batches"
)


class Growth(RuleCheck):
    def __init__(self) -> None:
        super().__init__(needed=1 + GROWTH_STEPS)
        self.streaks.steps = GROWTH_STEPS
        self._least = np.empty(0)  # [rows]: the logarithm of the least of the first amaxes; nan without any
        self._numbers_of_amaxes = np.empty(0, int)  # [rows]: the number of amaxes
        self._has_jumped = np.empty(0, bool)  # [rows]: after the first values

    def step(self, numbers: StepNumbers) -> Sightings:
        if not numbers.has("cur_amax"):
            return
        bits = numbers.bits("cur_amax")
        if holds_any(np.isfinite(bits)):
            self.note_data(numbers.iteration)
        least = extend_rows(self._least, len(bits), np.nan)
        count = extend_rows(self._numbers_of_amaxes, len(bits), 0)
        begins = count < BEGIN
        jumps = bits - np.log2(numbers.earlier(numbers.last, "cur_amax")) >= GROWTH
        self._has_jumped = extend_rows(self._has_jumped, len(bits), False) | (jumps & ~begins)
        self._least = np.where(begins, np.fmin(least, bits), least)
        self._numbers_of_amaxes = count + np.isfinite(bits)
        grown = bits - least
        holds = grown >= GROWTH
        is_far = holds
        hurts = holds
        if holds_any(holds):
            is_far = grown >= numbers.by_row(_far_growth)
            overflows = (numbers.values("overflows%") >= OVERFLOW) & numbers.by_row(can_overflow)
            underflows = numbers.values("underflows%") >= numbers.by_row(underflow_threshold) / 2
            # Gradients that begin near 0 in all blocks, as with LayerScale and LoRA, are healthy.
            gradients = numbers.are_known("cur_amax", "gradient")
            forms = numbers.by_row(_form)
            underflows &= is_far | ~_grow_together(forms, grown >= GROWTH / 2, gradients)
            hurts = holds & (overflows | underflows)
            is_far &= self._has_jumped | ~_grow_together(np.zeros(len(forms)), holds, gradients)
        for sighting in self.streaks.by_severity(
            numbers,
            "cur_amax",
            hurts | is_far,
            holds & ~hurts & ~is_far,
            lambda row: f"amax is {np.exp2(grown[row]):.3g} times its initial value",
        ):
            # High precision avoids the loss, but the tensor still grows.
            hurt = numbers.names_of(hurts & numbers.are(sighting.tensor))
            helps = sighting.severity == "warning" and sighting.layers[0] in hurt and sighting.tensor != "weight"
            yield sighting._replace(patch=keep_first(sighting.layers, numbers) if helps else "")


def _far_growth(facts: Facts, layer: str, tensor: str) -> float:
    return FAR_GROWN.get(tensor, FAR_GROWN_ELSE)


def _form(facts: Facts, layer: str, tensor: str) -> str:
    return form_of(layer)


def _grow_together(groups: npt.NDArray[Any], grows: Mask, counts: Mask) -> Mask:
    """[rows]: whether most counted rows of the same group grow."""
    are_growing = np.zeros(len(groups), bool)
    for name in np.unique(groups[grows & counts]):
        group = (groups == name) & counts
        are_growing |= group & (group.sum() >= LEAST_TOGETHER and grows[group].mean() > TOGETHER)
    return are_growing


DEAD_STEPS = 3
TRAINED_STEPS = 2
"""Due steps in a row in which a gradient is 0; and in which it is there again, for a note."""

RHYTHM = 5
_PERIODS = np.repeat(np.arange(2, RHYTHM + 1), np.arange(2, RHYTHM + 1))
_PHASES = np.concatenate([np.arange(period) for period in range(2, RHYTHM + 1)])
"""The most steps of a rhythm in which a layer may train: a generator every fifth step (WGAN, arXiv 1701.07875)."""

GROWTH = 6.0
GROWTH_STEPS = 2
BEGIN = 3
"""Powers of two above the least of the first collection steps, collection steps in a row, and the number of first
steps."""

FAR_GROWN: Mapping[str, float] = {"weight": 8.0, "gradient": 11.0}
"""The same for a warning although nothing is lost in quantization; of other tensors, which include the massive
activations of healthy models, :data:`FAR_GROWN_ELSE`."""

FAR_GROWN_ELSE = 12.0

LEAST_TOGETHER = 4
TOGETHER = 0.5
"""Layers, and the share of them, whose gradients grow together: then far growth alone is no warning; nor is underflow
with less growth, in layers of which most grow."""

RULES = (
    Rule(
        id="dead-gradient",
        title="a layer gets no gradient",
        subject="layer",
        needs="cur_amax of gradients",
        collect="LogTensorStats with tensors: [activation, gradient] and stats: [cur_amax], or the default config",
        condition=f"""
            in {DEAD_STEPS} collection steps in a row with an activation that is not 0, the gradient of a layer is 0. A
            note if it then is not in {TRAINED_STEPS} collection steps in a row. For layers without a backward, see
            missing-gradient
        """,
        silent=f"""
            layers that train periodically, at least every {RHYTHM} steps, such as a GAN's generator; the first steps of
            LoRA and of layers initialized to 0; experts without tokens; frozen layers; gradients with inf or nan
        """,
        source="arithmetic; the number of steps is this project's",
        why="the layer does not learn, although the loss may still fall",
        disproof="""
            the layer is frozen on purpose (then set requires_grad=False), or trains only outside of collection steps,
            like a GAN's generator (freq: 1 in the config shows it)
        """,
        essential=True,
        remedy="""
            Look for detach(), no_grad() or a multiplication by 0 around or after the layer. If the gradient is 0 only
            in low precision, keep the following layers in high precision
        """,
        check=DeadGradient,
    ),
    Rule(
        id="zeros-in-wgrad",
        title="many elements of a weight's gradient are 0",
        subject="tensor",
        needs="zeros% of wgrad",
        collect="LogTensorStats with tensors: [wgrad] and stats: [zeros%]",
        condition="zeros% of wgrad is at least {limit:g}, but below {below:g}, in {needed} collection steps in a row",
        silent="nothing: exact zeros of activation functions such as ReLU count too, so this is only a note",
        severity="note",
        source="arXiv 2604.12374, 2.2: 7 % of the parameters at the end of an NVFP4 run, 3 times as many as in BF16",
        why="""
            NVFP4 runs have about 3 times as many zeros as BF16 runs. FC1's zeros come from underflow in FC2's dgrad,
            FC2's mainly from underflow in FC1's fprop
        """,
        disproof="a BF16 run has as many zeros",
        remedy="""
            Compare with a BF16 run. If it has fewer zeros, keep the output projections in BF16, or with NVFP4 in MXFP8
        """,
        check=partial(
            AboveLimit,
            statistic="zeros%",
            tensor="wgrad",
            limit=7.0,
            below=100.0,
            needed=3,
            seen="{:.3g} % of the elements are 0",
            applies_to=lambda facts: True,
        ),
    ),
    Rule(
        id="growth",
        title="a tensor has grown far above its initial size",
        subject="tensor",
        needs="cur_amax of tensors in more than one collection step",
        collect="LogTensorStats with stats: [cur_amax], or the default config; and a longer run",
        condition=f"""
            amax is at least 2^{GROWTH:g} times its minimum over the first {BEGIN} collection steps, in {GROWTH_STEPS}
            collection steps in a row. A note. A warning if elements overflow, or half as many underflow as the rule
            underflow needs; or if the factor is at least 2^{FAR_GROWN["weight"]:g} for a weight,
            2^{FAR_GROWN["gradient"]:g} for a gradient and 2^{FAR_GROWN_ELSE:g} for other tensors. For gradients, the
            factor alone is a note if more than {100 * TOGETHER:g} % of at least {LEAST_TOGETHER} layers grow together,
            without a jump by 2^{GROWTH:g} after the first {BEGIN} steps. So is underflow with a smaller factor, if as
            many of the layers whose names differ only in numbers grow by 2^3
        """,
        silent="nothing: growth without quantization loss is a note, because healthy models have massive activations",
        source="arXiv 2409.12517 (SwiGLU), 2402.17762 (massive activations); the threshold is this project's",
        why="""
            outliers grow before an FP8 run diverges, and one large element makes the scale too coarse for all elements
            that share it
        """,
        disproof="""
            amax stops growing, and quantization loses no elements. Gradients of blocks that begin with a tiny scale, as
            in LayerScale and LoRA, grow with it
        """,
        remedy="""
            Find the cause of the growth: learning rate, weight decay, missing gradient clipping, or a factor in the
            forward or the loss. High precision in the layers that read the tensor (often fc2), or a block recipe, only
            avoids the loss in quantization
        """,
        cost="the layer runs at the speed of BF16",
        check=Growth,
        consequence_of=("diverging-loss",),
    ),
    Rule(
        id="growth",
        title="a tensor's largest magnitude is far above its last ones",
        subject="tensor",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition=f"""
            the largest magnitude of an activation is 2^{SPIKE["activation"]:g} times that of the {LEAST_HISTORY} to
            {HISTORY} steps before, or 2^{SPIKE_OF_GRADIENT:g} times for tensors of the backward
        """,
        silent="what grows over several steps; steps with inf or nan, and weights, which have rules of their own",
        severity="note",  # a warning where it shows an inf
        source="SPAM, arXiv 2501.06842 (gradients of 5,000 times); the factors are this project's",
        why="one batch can undo what was learned, and with delayed scaling its largest elements are clipped",
        disproof="the loss of the next steps goes on as before",
        remedy="Look at the batch of that step; clip the gradient norm if such steps come again",
        check=partial(Changed, change="spike", find=_spike),
    ),
)
