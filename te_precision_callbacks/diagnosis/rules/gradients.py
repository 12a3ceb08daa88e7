"""Rules on missing and zero gradients, and on growing amaxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import ColumnStreaks, Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules.lost_elements import (
    OVERFLOW,
    can_overflow,
    keep_first,
    loses_too_much,
    underflow_threshold,
)
from te_precision_callbacks.diagnosis.rules.settings import NEEDS_SCALER, needs_scaler
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest

DEAD_STEPS = 3
TRAINED_STEPS = 2
"""Due steps in a row in which a gradient is 0; and in which it is there again, for a note."""

RHYTHM = 5
"""The most steps of a rhythm in which a layer may train: a generator every fifth step (WGAN, arXiv 1701.07875)."""

ZEROS = 7.0
ZEROS_STEPS = 3
"""Percent of the elements of a weight's gradient that are 0, and collection steps in a row."""

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

_FROM_LOSS = (
    "Look at the loss first: is it multiplied by 0, masked or clamped everywhere, or computed from detached values?"
    " Then at what follows the last layer"
)


class DeadGradient(RuleCheck):
    needed = DEAD_STEPS

    def __init__(self) -> None:
        super().__init__()
        self._rhythms = Rhythms()
        self._lacks_backward = False
        self._all_trained = math.inf  # the iteration by which all parameters had a gradient
        self._reported: dict[str, dict[str, int]] = {}  # key -> layer -> steps in a row with a gradient since then

    @property
    def why_not(self) -> str:
        lacks = "no layer with statistics had a backward in a collection step" if self._lacks_backward else ""
        return super().why_not or lacks

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        ran = facts.te_layers_that_ran
        self.applies = not ran or not all(layer.has_no_gradient for layer in ran)
        yield from ()

    def event(self, event: Event) -> Iterator[Sighting]:
        checked = event.data.get("checked", ()) if event.kind == "parameters" else ()
        if "missing-gradient" in checked and not event.data["problems"]:
            self._all_trained = min(self._all_trained, event.iteration)
        yield from ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        gradient = numbers.column_of("cur_amax", "gradient")
        activation = numbers.column_of("cur_amax", "activation")
        size = int(largest(numbers.layers, initial=-1)) + 1
        if gradient is None:
            names = () if activation is None else numbers.names_of(activation)
            self._lacks_backward = any(name in facts.layers and facts.layers[name].lacks_backward for name in names)
            return
        self.note_data(numbers.iteration)
        gradient = numbers.mask_nonfinite(gradient)
        zero = gradient.values == 0
        layers = numbers.layers[gradient.rows]
        trained = layers[~zero & ~np.isnan(gradient.values)]
        self._rhythms.note_training(trained, numbers.iteration)
        if activation is not None:
            activation = numbers.mask_nonfinite(activation)
            with_activation = numbers.layers[activation.rows]
            if holds_any(zero):
                active = with_activation[activation.values != 0]
                zero &= _are_among(active, layers, size) | ~_are_among(with_activation, layers, size)
            absent = ~_are_among(layers, with_activation, size) & (activation.values != 0)
            for place in absent.nonzero()[0].tolist():
                layer = facts.layers.get(numbers.names[activation.rows[place]])
                absent[place] = layer is not None and layer.forward is not None and not layer.is_frozen
            for sighting in self._dead(numbers, facts, activation, absent, "the layer has no backward", "absent"):
                yield sighting._replace(tensor="gradient")
        for sighting in self._dead(numbers, facts, gradient, zero, "all elements are 0", "zero"):
            remedy = NEEDS_SCALER if needs_scaler(facts) else ""
            if len(sighting.layers) == len(layers) > 1:
                seen = f"all gradients are 0, in all {len(sighting.layers)} layers: from the loss or the last layers on"
                sighting = sighting._replace(layers=(), seen=seen, remedy=remedy or _FROM_LOSS)
            yield sighting._replace(remedy=remedy or sighting.remedy)
        yield from self._note_trained(
            numbers, {numbers.names[row] for row in gradient.rows[_are_among(trained, layers, size)]}
        )

    def _note_trained(self, numbers: StepNumbers, trained: set[str]) -> Iterator[Sighting]:
        for key, steps in list(self._reported.items()):
            for layer in steps:
                steps[layer] = steps[layer] + 1 if layer in trained else 0
            if min(steps.values()) >= TRAINED_STEPS:
                del self._reported[key]
                seen = f"the gradient was 0 or missing before, but is there in step {numbers.iteration}"
                yield Sighting((), "gradient", "", seen, None, "note", key=key, replaces=True)

    def _dead(
        self, numbers: StepNumbers, facts: Facts, column: Column, holds: Mask, seen: str, key: str
    ) -> Iterator[Sighting]:
        layers = numbers.layers[column.rows]
        self._rhythms.note_idle(layers[holds], numbers.iteration)
        reported = ~self._rhythms.explain(layers) if holds_any(holds) else holds
        if key == "absent" and (numbers.iteration < RHYTHM or self._all_trained < numbers.iteration):
            reported &= self._rhythms.has_trained(layers)  # others may train only in other steps
        for sighting in self.streaks.sightings(numbers, facts, column, holds, seen, reported=reported, key=key):
            self._reported.setdefault(key, {}).update(dict.fromkeys(sighting.layers, 0))
            yield sighting


def _are_among(layers: Ints, sought: Ints, size: int) -> Mask:
    """[sought]: whether each is among ``layers``; all are below ``size``."""
    among = np.zeros(size, bool)
    among[layers] = True
    return among[sought]


class Rhythms:
    """Finds periodic schedules that explain when a layer trained, as for alternating layers."""

    def __init__(self) -> None:
        periods = np.arange(2, RHYTHM + 1)
        self._periods = np.repeat(periods, periods)
        self._places = np.concatenate(list(map(np.arange, periods)))
        self._possible = np.empty((0, len(self._periods)), bool)
        self._has_trained = np.empty(0, bool)

    def note_training(self, layers: Ints, iteration: int) -> None:
        self._grow(layers)
        self._has_trained[layers] = True
        self._possible[layers] &= iteration % self._periods == self._places

    def note_idle(self, layers: Ints, iteration: int) -> None:
        self._grow(layers)
        self._possible[layers] &= iteration % self._periods != self._places

    def explain(self, layers: Ints) -> Mask:
        """[layers]: whether the layer has trained, and a periodic schedule explains when."""
        self._grow(layers)
        return self._has_trained[layers] & self._possible[layers].any(axis=1)

    def has_trained(self, layers: Ints) -> Mask:
        self._grow(layers)
        return self._has_trained[layers]

    def _grow(self, layers: Ints) -> None:
        if largest(layers, initial=-1) >= len(self._has_trained):
            self._possible = extend_rows(self._possible, layers, True)
            self._has_trained = extend_rows(self._has_trained, layers, False)


class ZerosInWgrad(RuleCheck):
    reads = ("zeros%",)
    needed = ZEROS_STEPS

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        column = numbers.column_of("zeros%", "wgrad")
        if column is None:
            return
        self.note_data(numbers.iteration)
        values = numbers.mask_nonfinite(column).values
        holds = (values >= ZEROS) & (values < 100)
        yield from self.streaks.sightings(numbers, facts, column, holds, "{:.3g} % of the elements are 0", values)


class Growth(RuleCheck):
    needed = 1 + GROWTH_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.streaks = ColumnStreaks(GROWTH_STEPS)
        self._begin = FirstValues()
        self._last: Column | None = None  # the bits of the last collection step
        self._jumped: set[int] = set()  # rows that have jumped after the first values

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        for column in numbers.columns("cur_amax"):
            now = numbers.mask_nonfinite(column).bits
            grown = now - self._begin.of(column.rows)
            if holds_any(np.isfinite(now)):
                self.note_data(numbers.iteration)
            holds = grown >= GROWTH
            is_far = holds
            hurts = holds
            self._note_jumps(column, now)
            self._begin.add(column.rows, now)
            if not (holds_any(holds) or self.streaks.held):
                continue
            if holds_any(holds):
                is_far = grown >= [FAR_GROWN.get(tensor, FAR_GROWN_ELSE) for tensor in numbers.tensors_of(column)]
                overflows = loses_too_much(numbers, facts, column, overflows=lambda lost: OVERFLOW)
                overflows &= can_overflow(numbers, facts, column)
                underflows = loses_too_much(
                    numbers,
                    facts,
                    column,
                    underflows=lambda lost: underflow_threshold(numbers, facts, lost) / 2,
                    overflows=lambda lost: np.inf,
                )
                # Gradients that begin near 0 in all blocks, as with LayerScale and LoRA, are healthy.
                gradients = numbers.are("gradient", column)
                forms = [form_of(name) for name in numbers.names_of(column)]
                underflows &= is_far | ~_grow_together(forms, grown >= GROWTH / 2, gradients)
                hurts = holds & (overflows | underflows)
                in_all = _grow_together([""] * len(forms), holds, gradients)
                is_far &= np.isin(column.rows, list(self._jumped)) | ~in_all
            for sighting in self.streaks.sightings_by_severity(
                numbers,
                facts,
                column,
                hurts | is_far,
                holds & ~hurts & ~is_far,
                "amax is {:.3g} times its initial value",
                np.exp2(grown),
            ):
                # High precision avoids the loss, but the tensor still grows.
                hurt = itertools.compress(numbers.names_of(column), hurts & numbers.are(sighting.tensor, column))
                helps = sighting.severity == "warning" and sighting.layers[0] in hurt and sighting.tensor != "weight"
                patch = keep_first(sighting.layers, numbers) if helps else ""
                # A subject has one finding, of its worst severity.
                yield sighting._replace(patch=patch, key="")

    def _note_jumps(self, column: Column, now: Floats) -> None:
        if self._last is not None:
            jumps = now - self._last.at(column.rows, np.nan) >= GROWTH
            if holds_any(jumps):
                self._jumped.update(column.rows[jumps & self._begin.are_known(column.rows)].tolist())
        self._last = column.with_values(now)


def _grow_together(groups: Sequence[str], grows: Mask, counts: Mask) -> Mask:
    """[rows]: whether most counted rows of the same group grow."""
    names = np.array(groups)
    together = np.zeros(len(groups), bool)
    for name in np.unique(names[grows & counts]):
        group = (names == name) & counts
        together |= group & (group.sum() >= LEAST_TOGETHER and grows[group].mean() > TOGETHER)
    return together


class FirstValues:
    def __init__(self) -> None:
        self._known = np.empty((0, BEGIN))

    def of(self, rows: Ints) -> Floats:
        """[rows]: the minimum of the first values; nan without any."""
        self._known = extend_rows(self._known, rows, np.nan)
        least: Floats = np.fmin.reduce(self._known[rows], axis=1)
        return least

    def are_known(self, rows: Ints) -> Mask:
        self._known = extend_rows(self._known, rows, np.nan)
        are: Mask = np.logical_and.reduce(np.isfinite(self._known[rows]), axis=1)
        return are

    def add(self, rows: Ints, values: Floats) -> None:
        self._known = extend_rows(self._known, rows, np.nan)
        missing = np.isnan(self._known[rows])
        if not holds_any(missing, axis=None):
            return
        new = holds_any(missing, axis=1) & np.isfinite(values)
        self._known[rows[new], missing.argmax(axis=1)[new]] = values[new]


RULES = (
    Rule(
        id="dead-gradient",
        title="a layer gets no gradient",
        subject="layer",
        needs="cur_amax of gradients",
        collect="LogTensorStats with tensors: [activation, gradient] and stats: [cur_amax], or the default config",
        condition=(
            f"in {DEAD_STEPS} collection steps in a row with an activation that is not 0, the gradient of a layer is"
            " 0, or a layer with a trainable weight has no backward. For a layer that never had a backward, only"
            f" from step {RHYTHM} on. A note if they then have gradients in {TRAINED_STEPS} collection steps in a row"
        ),
        silent=(
            f"layers that train periodically, at least every {RHYTHM} steps, such as a GAN's generator; layers that"
            " train only outside of collection steps; the first steps of LoRA and of layers initialized to 0;"
            " experts without tokens; frozen layers; gradients with inf or nan"
        ),
        severity="warning",
        source="arithmetic; the number of steps is this project's",
        why="the layer does not learn, although the loss may still fall",
        disproof=(
            "the layer is frozen on purpose (then set requires_grad=False), or trains only outside of collection"
            " steps, like a GAN's generator (freq: 1 in the config shows it)"
        ),
        essential=True,
        remedy=(
            "Look for detach(), no_grad() or a multiplication by 0 around or after the layer. If the gradient is 0 only"
            " in low precision, keep the following layers in high precision"
        ),
        check=DeadGradient,
    ),
    Rule(
        id="zeros-in-wgrad",
        title="many elements of a weight's gradient are 0",
        subject="tensor",
        needs="zeros% of wgrad",
        collect="LogTensorStats with tensors: [wgrad] and stats: [zeros%]",
        condition=f"zeros% of wgrad is at least {ZEROS:g}, but below 100, in {ZEROS_STEPS} collection steps in a row",
        silent="nothing: exact zeros of activation functions such as ReLU count too, so this is only a note",
        severity="note",
        source="arXiv 2604.12374, 2.2: 7 % of the parameters at the end of an NVFP4 run, 3 times as many as in BF16",
        why=(
            "NVFP4 runs have about 3 times as many zeros as BF16 runs. FC1's zeros come from underflow in FC2's"
            " dgrad, FC2's mainly from underflow in FC1's fprop"
        ),
        disproof="a BF16 run has as many zeros",
        remedy=(
            "Compare with a BF16 run. If it has fewer zeros, keep the output projections in BF16, or with NVFP4 in"
            " MXFP8"
        ),
        check=ZerosInWgrad,
    ),
    Rule(
        id="growth",
        title="a tensor has grown far above its initial size",
        subject="tensor",
        needs="cur_amax of tensors in more than one collection step",
        collect="LogTensorStats with stats: [cur_amax], or the default config; and a longer run",
        condition=(
            f"amax is at least 2^{GROWTH:g} times its minimum over the first {BEGIN} collection steps, in"
            f" {GROWTH_STEPS} collection steps in a row. A note. A warning if elements overflow, or half as many"
            f" underflow as the rule underflow needs; or if the factor is at least 2^{FAR_GROWN['weight']:g} for a"
            f" weight, 2^{FAR_GROWN['gradient']:g} for a gradient and 2^{FAR_GROWN_ELSE:g} for other tensors. For"
            f" gradients, the factor alone is a note if more than {100 * TOGETHER:g} % of at least {LEAST_TOGETHER}"
            f" layers grow together, without a jump by 2^{GROWTH:g} after the first {BEGIN} steps. So is underflow with"
            " a smaller factor, if as many of the layers whose names differ only in numbers grow by 2^3"
        ),
        silent="nothing: growth without quantization loss is a note, because healthy models have massive activations",
        severity="warning",
        source="arXiv 2409.12517 (SwiGLU), 2402.17762 (massive activations); the threshold is this project's",
        why=(
            "outliers grow before an FP8 run diverges, and one large element makes the scale too coarse for all"
            " elements that share it"
        ),
        disproof=(
            "amax stops growing, and quantization loses no elements. Gradients of blocks that begin with a tiny scale,"
            " as in LayerScale and LoRA, grow with it"
        ),
        remedy=(
            "Find the cause of the growth: learning rate, weight decay, missing gradient clipping, or a factor in the"
            " forward or the loss. High precision in the layers that read the tensor (often fc2), or a block recipe,"
            " only avoids the loss in quantization"
        ),
        cost="the layer runs at the speed of BF16",
        check=Growth,
        consequence_of=("diverging-loss",),
    ),
)
