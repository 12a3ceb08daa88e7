"""Rules on missing and zero gradients, and on growing amaxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting, Streaks
from te_precision_callbacks.diagnosis.rules.lost_elements import (
    OVERFLOW,
    can_overflow,
    keep_first,
    underflow_threshold,
)
from te_precision_callbacks.diagnosis.rules.settings import remedy_of_small_gradients
from te_precision_callbacks.diagnosis.shapes import AboveLimit
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest

_FROM_LOSS = (
    "Look at the loss first: is it multiplied by 0, masked or clamped everywhere, or computed from detached values?"
    " Then at what follows the last layer"
)


class DeadGradient(RuleCheck):
    def __init__(self) -> None:
        super().__init__(DEAD_STEPS)
        self._rhythms = Rhythms()
        self._lacks_backward = False
        self._all_trained = math.inf  # the iteration by which all parameters had a gradient
        self._reported: dict[str, dict[str, int]] = {}  # key -> layer -> steps in a row with a gradient since then

    @property
    def why_not(self) -> str:
        lacks = "no layer with statistics had a backward in a collection step" if self._lacks_backward else ""
        return super().why_not or lacks

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        ran = facts.te_layers_that_ran
        self.applies = not ran or not all(layer.has_no_gradient for layer in ran)
        return ()

    def event(self, event: Event) -> Iterable[Sighting]:
        checked = event.data.get("checked", ()) if event.kind == "parameters" else ()
        if "missing-gradient" in checked and not event.data["problems"]:
            self._all_trained = min(self._all_trained, event.iteration)
        return ()

    def step(self, numbers: StepNumbers) -> Iterator[Sighting]:
        amaxes = numbers.finite("cur_amax")
        are_gradients = numbers.are_known("cur_amax", "gradient")
        are_activations = numbers.are_known("cur_amax", "activation")
        layers = numbers.facts.layers
        if not holds_any(are_gradients):
            names = numbers.names_of(are_activations)
            self._lacks_backward = any(name in layers and layers[name].lacks_backward for name in names)
            return
        self.note_data(numbers.iteration)
        has_trained = are_gradients & (amaxes != 0) & ~np.isnan(amaxes)
        self._rhythms.note_training(numbers.layers[has_trained], numbers.iteration)
        is_active = are_activations & (amaxes != 0)
        zero = are_gradients & (amaxes == 0)
        if holds_any(zero):
            zero &= _in_layers(numbers, is_active) | ~_in_layers(numbers, are_activations)
        absent = is_active & ~_in_layers(numbers, are_gradients)
        for row in np.flatnonzero(absent).tolist():
            layer = layers.get(numbers.names[row])
            absent[row] = layer is not None and layer.forward is not None and not layer.is_frozen
        for sighting in self._dead(numbers, absent, "the layer has no backward", "absent"):
            yield sighting._replace(tensor="gradient")
        for sighting in self._dead(numbers, zero, "all elements are 0", "zero"):
            if len(sighting.layers) == are_gradients.sum() > 1:
                seen = f"all gradients are 0, in all {len(sighting.layers)} layers: from the loss or the last layers on"
                sighting = sighting._replace(layers=(), seen=seen, remedy=_FROM_LOSS)
            yield sighting._replace(remedy=remedy_of_small_gradients(numbers.facts) or sighting.remedy)
        if self._reported:
            yield from self._note_trained(numbers, set(numbers.names_of(has_trained)))

    def _note_trained(self, numbers: StepNumbers, trained: set[str]) -> Iterator[Sighting]:
        for key, steps in list(self._reported.items()):
            for layer in steps:
                steps[layer] = steps[layer] + 1 if layer in trained else 0
            if min(steps.values()) >= TRAINED_STEPS:
                del self._reported[key]
                seen = f"the gradient was 0 or missing before, but is there in step {numbers.iteration}"
                yield Sighting(seen, tensor="gradient", severity="note", key=key, replaces=True)

    def _dead(self, numbers: StepNumbers, holds: Mask, seen: str, key: str) -> Iterator[Sighting]:
        rhythms = self._rhythms
        rhythms.note_idle(numbers.layers[holds], numbers.iteration)
        reported = ~rhythms.explain(numbers.layers) if holds_any(holds) else holds
        if key == "absent" and (numbers.iteration < RHYTHM or self._all_trained < numbers.iteration):
            reported &= rhythms.have_trained(numbers.layers)  # others may train only in other steps
        for sighting in self.streaks.sightings(
            numbers, "cur_amax", holds, lambda row: seen, reported=reported, key=key
        ):
            self._reported.setdefault(key, {}).update(dict.fromkeys(sighting.layers, 0))
            yield sighting


def _in_layers(numbers: StepNumbers, rows: Mask) -> Mask:
    """[rows]: whether a layer has any of the rows."""
    counts = np.bincount(numbers.layers[rows], minlength=len(rows))
    in_layers: Mask = counts[numbers.layers] > 0
    return in_layers


class Rhythms:
    """Finds periodic schedules that explain when a layer trained, as for alternating layers."""

    def __init__(self) -> None:
        periods = np.arange(2, RHYTHM + 1)
        self._periods = np.repeat(periods, periods)
        self._phases = np.concatenate(list(map(np.arange, periods)))
        self._possible = np.empty((0, len(self._periods)), bool)
        self._have_trained = np.empty(0, bool)

    def note_training(self, layers: Ints, iteration: int) -> None:
        self._grow(layers)
        self._have_trained[layers] = True
        self._possible[layers] &= iteration % self._periods == self._phases

    def note_idle(self, layers: Ints, iteration: int) -> None:
        self._grow(layers)
        self._possible[layers] &= iteration % self._periods != self._phases

    def explain(self, layers: Ints) -> Mask:
        """[layers]: whether the layer has trained, and a periodic schedule explains when."""
        return self.have_trained(layers) & self._possible[layers].any(axis=1)

    def have_trained(self, layers: Ints) -> Mask:
        self._grow(layers)
        return self._have_trained[layers]

    def _grow(self, layers: Ints) -> None:
        count = int(largest(layers, initial=-1)) + 1
        self._possible = extend_rows(self._possible, count, True)
        self._have_trained = extend_rows(self._have_trained, count, False)


class Growth(RuleCheck):
    def __init__(self) -> None:
        super().__init__(1 + GROWTH_STEPS)
        self.streaks = Streaks(GROWTH_STEPS)
        self._first = np.empty((0, BEGIN))  # [rows]: the logarithms of the first amaxes; nan if unknown
        self._last = np.empty(0)  # [rows]
        self._has_jumped = np.empty(0, bool)  # [rows]: after the first values

    def step(self, numbers: StepNumbers) -> Iterator[Sighting]:
        if not numbers.has("cur_amax"):
            return
        now = numbers.bits("cur_amax")
        if holds_any(np.isfinite(now)):
            self.note_data(numbers.iteration)
        grown = now - self._compare(now)
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
            patch = keep_first(sighting.layers, numbers) if helps else ""
            # A subject has one finding, of its worst severity.
            yield sighting._replace(patch=patch, key="")

    def _compare(self, now: Floats) -> Floats:
        """Note the amaxes of a step; [rows]: the least of the first ones before it, nan without any."""
        first = extend_rows(self._first, len(now), np.nan)
        least: Floats = np.fmin.reduce(first, axis=1)
        missing = np.isnan(first)
        jumps = (now - extend_rows(self._last, len(now), np.nan) >= GROWTH) & ~holds_any(missing, axis=1)
        self._has_jumped = extend_rows(self._has_jumped, len(now), False) | jumps
        self._last = now
        new = holds_any(missing, axis=1) & np.isfinite(now)
        first[new, missing.argmax(axis=1)[new]] = now[new]
        self._first = first
        return least


def _far_growth(facts: Facts, layer: str, tensor: str) -> float:
    return FAR_GROWN.get(tensor, FAR_GROWN_ELSE)


def _form(facts: Facts, layer: str, tensor: str) -> str:
    return form_of(layer)


def _grow_together(groups: npt.NDArray[Any], grows: Mask, counts: Mask) -> Mask:
    """[rows]: whether most counted rows of the same group grow."""
    together = np.zeros(len(groups), bool)
    for name in np.unique(groups[grows & counts]):
        group = (groups == name) & counts
        together |= group & (group.sum() >= LEAST_TOGETHER and grows[group].mean() > TOGETHER)
    return together


DEAD_STEPS = 3
TRAINED_STEPS = 2
"""Due steps in a row in which a gradient is 0; and in which it is there again, for a note."""

RHYTHM = 5
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
            in {DEAD_STEPS} collection steps in a row with an activation that is not 0, the gradient of a layer is 0, or
            a layer with a trainable weight has no backward. For a layer that never had a backward, only from step
            {RHYTHM} on. A note if they then have gradients in {TRAINED_STEPS} collection steps in a row
        """,
        silent=f"""
            layers that train periodically, at least every {RHYTHM} steps, such as a GAN's generator; layers that train
            only outside of collection steps; the first steps of LoRA and of layers initialized to 0; experts without
            tokens; frozen layers; gradients with inf or nan
        """,
        severity="warning",
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
        severity="warning",
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
)
