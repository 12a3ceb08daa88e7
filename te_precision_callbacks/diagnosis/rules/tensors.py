"""Rules on tensors that differ from similar layers, or from their own earlier steps: gradients of 0, growing amaxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_BACKWARD
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import (
    COLLECT_EACH_STEP,
    NEEDS_EACH_STEP,
    AboveLimit,
    Changed,
    Reported,
    Rule,
    RuleCheck,
    Sighting,
    Sightings,
)
from te_precision_callbacks.diagnosis.rules.parameters import LARGE, ParameterRule
from te_precision_callbacks.diagnosis.rules.quantized import (
    LOST_NORM,
    OVERFLOW,
    can_overflow,
    keep_first,
    overflow_threshold,
    underflow_threshold,
)
from te_precision_callbacks.diagnosis.rules.settings import remedy_of_small_gradients
from te_precision_callbacks.diagnosis.rules.training import OF_LAST_STEPS
from te_precision_callbacks.flight.changes import HISTORY, LEAST_HISTORY, SPIKE, SPIKE_OF_GRADIENT, STAYS
from te_precision_callbacks.layers.folding import form_of, numbers_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any

_STATISTICS = ("std", "cur_amax", "scale_inv_max")

_GRADIENTS = frozenset({"gradient", "dgrad", "wgrad"})

_FLOWS = frozenset({"activation", "gradient", "dgrad", "output"})
"""The tensors that one layer hands to the next, so that a jump lasts through the layers that follow."""


class Sibling(RuleCheck):
    def step(self, numbers: StepNumbers) -> Sightings:
        """Yield sightings; a tensor has one finding, from any of its statistics."""
        for statistic in filter(numbers.has, _STATISTICS):
            yield from self._check(numbers, statistic)
        for statistic in filter(numbers.has, SHARES):
            yield from self._check_share(numbers, statistic)

    def _check_share(self, numbers: StepNumbers, statistic: str) -> Sightings:
        """Find layers that lose far more of a tensor's elements than similar layers, but less than the thresholds of
        the rules underflow and overflow.
        """
        shares = np.fmax(numbers.finite(statistic), 0.0)
        ordinary_share = np.zeros(len(shares))
        odd = np.zeros(len(shares), bool)
        for rows in self._similar_layers(numbers, statistic):
            if len(rows) < LEAST_OF_SHARES:
                continue
            self.note_data(numbers.iteration)
            if shares[rows].max() >= SHARES[statistic]:
                ordinary = np.sort(shares[rows])[: len(rows) - max(1, len(rows) // MOST_ODD)]
                ordinary_share[rows] = np.median(ordinary)
                odd[rows] = shares[rows] >= max(SHARES[statistic], TIMES * ordinary.max())
        if not (holds_any(odd) or self.streaks):
            return ()
        light = np.zeros(len(shares), bool)
        if statistic == "underflows%":
            what = "round to 0"
            light = numbers.values("underflow_norm%") < LOST_NORM
            odd &= shares < numbers.by_row(underflow_threshold)
        else:
            what = "are above the range of the format"
            odd &= numbers.by_row(can_overflow) & (shares < numbers.by_row(overflow_threshold))
        return self.by_severity(
            numbers,
            statistic,
            odd & ~light,
            odd & light,
            lambda row: f"{shares[row]:.3g} % of the elements {what}, {ordinary_share[row]:.2g} % in similar layers",
        )

    def _check(self, numbers: StepNumbers, statistic: str) -> Sightings:
        groups = self._similar_layers(numbers, statistic)
        if not (groups or self.streaks):
            return
        values = numbers.finite(statistic)
        bits = numbers.bits(statistic)
        lone_zeros: list[int] = []
        if statistic == "scale_inv_max":  # it is proportional to amax; other rules compare both
            bits[numbers.are_known("std") | numbers.are_known("cur_amax")] = np.nan
        jumps = np.zeros(len(numbers))
        has_many_siblings = np.zeros(len(numbers), bool)
        far_from = np.where(numbers.are("weight"), OF_WEIGHTS.get(statistic, FAR), FAR)
        for rows in groups:
            tensor = str(numbers.tensors[rows[0]])
            if statistic == "cur_amax" and tensor == "weight" and numbers.iteration:  # weights may begin at 0
                zeros = rows[values[rows] == 0].tolist()
                lone_zeros += zeros if len(zeros) <= np.isfinite(values[rows]).sum() / 2 else []
            measured = rows[np.isfinite(bits[rows])]
            if len(measured) < LEAST_ALIKE:
                continue
            self.note_data(numbers.iteration)
            least = min(NEAR, far_from[measured[0]])
            if np.ptp(bits[measured]) < least:
                continue
            has_many_siblings[measured] = len(measured) > FEW
            if len(measured) == LEAST_ALIKE:  # of two layers, the one farther from the median of all layers deviates
                middle = np.median(bits[np.isfinite(bits) & numbers.are(tensor)])
                near, farther = sorted(measured, key=lambda row: abs(bits[row] - middle))
                jumps[farther] = bits[farther] - bits[near]
                far_from[measured] = OF_TWO_WEIGHTS if tensor == "weight" else FAR
                continue
            compare = deviations if len(measured) > FEW else few_deviations
            jumps[measured] = compare(bits[measured], flows=tensor in _FLOWS, least=least)
            blocks = [numbers_of(numbers.names[row])[:1] for row in measured.tolist()]
            if tensor in _GRADIENTS and len(set(blocks)) == len(blocks):
                far_from[measured] = OF_GRADIENTS
        if lone_zeros:
            layers = tuple(numbers.names[row] for row in lone_zeros)
            seen = "all elements are 0, and not in similar layers"
            label = numbers.column(statistic).label(lone_zeros[0])
            yield Sighting(seen, layers, "weight", label, numbers.iteration)
        shows_only_amax = numbers.are("activation") & (statistic == "cur_amax")
        means = numbers.values("mean")
        is_offset = shows_only_amax & (np.abs(means) >= OFFSET * values)
        far_from[is_offset] = NEAR
        some = np.abs(jumps) >= NEAR
        lossy = some & has_many_siblings
        lossy = lossy & _lose_elements(numbers) if holds_any(lossy) else lossy

        def describe(row: int) -> str:
            name = statistic.removeprefix("cur_")
            direction = "smaller" if jumps[row] < 0 else "larger"
            times = np.exp2(np.abs(jumps[row]))
            offset = f"; nearly all elements are close to {means[row]:.3g}" if is_offset[row] else ""
            return f"{name} is {values[row]:.3g}, {times:.3g} times {direction} than in similar layers{offset}"

        notes = some & ~lossy & shows_only_amax & ~is_offset
        warnings = (np.abs(jumps) >= far_from) & ~lossy & ~notes
        yield from self.in_a_row(numbers, statistic, lossy, describe, steps=NEAR_STEPS)
        yield from self.in_a_row(numbers, statistic, notes, describe, severity="note")
        yield from self.in_a_row(numbers, statistic, warnings, describe)

    def _similar_layers(self, numbers: StepNumbers, statistic: str) -> list[Ints]:
        """The rows of each tensor of similar layers, in order of execution."""
        self.lacks = "the model has no similar layers"
        rows = numbers.column(statistic).rows
        return numbers.derive(("similar layers", rows.tobytes()), lambda: _group_similar(numbers, rows))


def _group_similar(numbers: StepNumbers, rows: Ints) -> list[Ints]:
    facts = numbers.facts
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in rows.tolist():
        name = numbers.names[row]
        tensor = str(numbers.tensors[row])
        groups.setdefault((tensor, facts.kind_of(name), facts.layer(name).format_of(tensor)), []).append(row)

    return [np.array(numbers.in_order(group)) for group in groups.values() if len(group) >= LEAST_ALIKE]


def _lose_elements(numbers: StepNumbers) -> Mask:
    """[rows]: whether many elements are lost, and four times as many as of most of these tensors."""
    lossy = np.zeros(len(numbers), bool)
    for statistic, least in (("underflows%", LOST), ("overflows%", OVERFLOW)):
        lost = numbers.values(statistic)
        for tensor in numbers.column(statistic).tensors:
            rows = numbers.are_known(statistic, tensor)
            lossy |= rows & (lost >= max(least, 4 * np.median(lost[rows])))
    return lossy


def deviations(bits: Floats, *, flows: bool, least: float) -> Floats:
    """Return the deviation of each layer from similar layers, in powers of two; 0 for ordinary layers.

    The median difference between neighboring layers is the trend with depth. Differences far from it are jumps, which
    divide the layers into stretches. Stretches at the level of most layers are ordinary. If the tensor flows from layer
    to layer, a single jump, upwards, makes the layers before it ordinary instead, and the first layer after a large
    jump up is compared with the stretch before it.

    Args:
        bits: [layers], the logarithms to base 2, in execution order.
        least: minimum of a jump.
    """
    steps = np.diff(bits)
    trend = np.median(steps)
    away = steps - trend
    spread = 1.4826 * np.median(np.abs(away))
    cuts = np.flatnonzero(np.abs(away) >= max(least, SPREADS * spread)) + 1
    result = np.zeros(len(bits))
    if not len(cuts):
        return result
    flat = bits - trend * np.arange(len(bits))
    stretches = np.split(np.arange(len(bits)), cuts)
    levels = [float(np.median(flat[stretch])) for stretch in stretches]
    near = np.abs(np.subtract.outer(levels, levels)) < least
    ordinary = int(np.argmax(near @ list(map(len, stretches))))
    if flows and len(stretches) == 2 and levels[1] > levels[0] and len(stretches[0]) > 1:
        ordinary = 0
    for number, stretch in enumerate(stretches):
        if near[ordinary, number]:
            continue
        result[stretch] = flat[stretch] - levels[ordinary]
        if flows and number and levels[number] - levels[number - 1] >= max(FAR, np.abs(result[stretch]).max()):
            result[stretch[0]] = flat[stretch[0]] - levels[number - 1]
    return result


def few_deviations(bits: Floats, *, flows: bool, least: float) -> Floats:
    """Return deviations like :func:`deviations`, for too few layers to estimate a trend with depth.

    A layer deviates if it is far from all others, and these are close together. If the tensor flows from layer to
    layer, a lasting jump is a deviation of the first layer after it.
    """
    result = np.zeros(len(bits))
    for layer in range(len(bits)):
        rest = np.delete(bits, layer)
        away = bits[layer] - np.median(rest)
        if np.abs(away) >= FEW_SPREADS * np.ptp(rest):
            result[layer] = away
    for cut in range(2, len(bits) - 1) if flows and not result.any() else ():
        head = bits[:cut]
        tail = bits[cut:]
        jump = np.median(tail) - np.median(head)
        if np.abs(jump) >= FEW_SPREADS * max(np.ptp(head), np.ptp(tail)):
            result[cut] = bits[cut] - np.median(head)
    return result


LEAST_ALIKE = 2
LEAST_OF_SHARES = 3
FEW = 7
"""Alike layers that can be compared, the same of shares of their elements, and the most that count as few, which need
stronger evidence."""

FAR = 12.0
FAR_STEPS = 3
"""Powers of two that need no consequence, and collection steps in a row."""

OF_GRADIENTS = 7.0
"""The same of gradients, in at least three similar layers with at most one in a block: experts get gradients of any
size, with their share of the tokens. In 50 healthy trainings of 16 families, no gradient deviated by more than 2^1.2,
see benchmarks/proof/factors.py."""

OF_WEIGHTS: Mapping[str, float] = {"std": 3.0, "cur_amax": 4.0}
OF_TWO_WEIGHTS = 8.0
"""The same of weights, which differed by less than 2^0.7 in these trainings; and of the weights of only two layers."""

OFFSET = 0.9
"""The least mean of an activation in its amax, where it is the elements of a constant that are large, not a few, as are
massive activations."""

NEAR = 5.0
NEAR_STEPS = 2
LOST = 1.0
"""Powers of two with a consequence, collection steps in a row, and percent of the elements that round to 0."""

SPREADS = 6.0
FEW_SPREADS = 3.0
"""The least jump in median absolute deviations of all steps between neighbours; with few similar layers, in distances
between the farthest of the others."""

SHARES = {"underflows%": 5.0, "overflows%": OVERFLOW}
TIMES = 8.0
MOST_ODD = 4
"""Percent of the elements of a layer that are lost, how many times those of the others, and one in how many alike
layers may be so."""


_FROM_LOSS = """
    Look at the loss first: is it multiplied by 0, masked or clamped everywhere, or computed from detached values?
    Then at what follows the last layer
"""


class DeadGradient(RuleCheck):
    """Finds gradients of 0, unless a periodic schedule explains when the layer trains, as for alternating layers."""

    def __init__(self) -> None:
        super().__init__(needed=DEAD_STEPS)
        self._rhythms = np.empty((0, len(_PERIODS)), bool)  # [rows, periods and phases]: those that are possible
        self._have_trained = np.empty(0, bool)  # [rows]
        self._reported: dict[str, int] = {}  # layer -> steps in a row with a gradient since then

    def facts(self, facts: Facts) -> Sightings:
        never = [layer.never.get(gemm) for layer in facts.te_layers_that_ran for gemm in ("dgrad", "wgrad")]
        self.applies = not never or any(why in (None, NO_BACKWARD) for why in never)  # frozen otherwise
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        amaxes = numbers.finite("cur_amax")
        are_gradients = numbers.are_known("cur_amax", "gradient")
        are_activations = numbers.are_known("cur_amax", "activation")
        if not holds_any(are_gradients):
            names = numbers.names_of(are_activations)
            if any(layer.never.get("wgrad") == NO_BACKWARD for layer in map(numbers.facts.layer, names)):
                self.lacks = "no layer with statistics had a backward in a collection step"
            return
        self.note_data(numbers.iteration)
        has_trained = are_gradients & (amaxes > 0)
        zero = are_gradients & (amaxes == 0)
        if holds_any(zero):
            idle = numbers.names_of(are_activations & (amaxes == 0))
            zero &= ~np.isin(numbers.names, idle)
            if holds_any(has_trained):
                zero &= ~numbers.by_row(_is_frozen)
        rhythms = extend_rows(self._rhythms, len(numbers), True)
        self._have_trained = extend_rows(self._have_trained, len(numbers), False) | has_trained
        is_due = numbers.iteration % _PERIODS == _PHASES
        rhythms[has_trained] &= is_due
        rhythms[zero] &= ~is_due
        self._rhythms = rhythms
        reported = ~(self._have_trained & holds_any(rhythms, axis=1))
        seen = "all elements are 0"
        for sighting in self.in_a_row(numbers, "cur_amax", zero, lambda row: seen, reported=reported):
            layers = sighting.layers
            self._reported.update(dict.fromkeys(layers, 0))
            if len(layers) == are_gradients.sum() > 1:
                all_zero = f"all gradients are 0, in all {len(layers)} layers: from the loss or the last layers on"
                sighting = sighting._replace(layers=(), seen=all_zero, remedy=_FROM_LOSS)
            yield sighting._replace(remedy=remedy_of_small_gradients(numbers.facts) or sighting.remedy)
        if self._reported:
            trained = set(numbers.names_of(has_trained))
            self._reported = {name: (steps + 1) * (name in trained) for name, steps in self._reported.items()}
            if min(self._reported.values()) >= TRAINED_STEPS:
                self._reported = {}
                seen = f"the gradient was 0 before, but is there in step {numbers.iteration}"
                yield Sighting(seen, tensor="gradient", severity="note", replaces=True)


def _is_frozen(layer: LayerFacts, tensor: str) -> bool:
    return layer.never.get("wgrad") == FROZEN


def _spike(check: Reported, event: Event) -> Sightings:
    slots = event.data["slots"]
    first, tensor = slots[0]
    layers = tuple(layer for layer, spiked in slots if spiked == tensor)
    spike = Sighting(event.text, layers, tensor, since=event.iteration)
    if event.data["until"] is not None:
        return [spike._replace(severity="warning", remedy=_OF_FORWARD.format(first))]
    if event.data["now"] in _LARGEST_CODES and check.run.layer(first).recipe == "fp8_current_scaling":
        spike = spike._replace(seen=event.text + _IS_INF, severity="warning", remedy=_OF_INF)
    return [spike]


_LARGEST_CODES = (448.0, 57344.0)
"""Magnitudes of an inf in FP8 current scaling: Transformer Engine then sets the scale to 1, and the cast saturates."""

_IS_INF = ". That is the largest number of FP8 at scale 1, to which the cast turns an inf"


_OF_FORWARD = """
    Look for what changed in that step before {}: a factor or an input in the forward, a restored state, weights that
    were overwritten, or an update that was too large. Resume from an earlier checkpoint
"""

_OF_INF = """
    Look for the inf in the batch of that step, and in what runs before the layer (in the backward: the loss, and
    what runs after it): debug='activation_overflow' stops at the module and batch. Skip such batches
"""


class Growth(RuleCheck):
    # The logarithm of the least of the first amaxes, the number of amaxes, and whether they have jumped later.
    _rows = np.empty((0, 3))

    def step(self, numbers: StepNumbers) -> Sightings:
        if not numbers.has("cur_amax"):
            return
        bits = numbers.bits("cur_amax")
        if holds_any(np.isfinite(bits)):
            self.note_data(numbers.iteration)
        least, count, has_jumped = extend_rows(self._rows, len(bits), [np.nan, 0.0, 0.0]).T
        begins = count < BEGIN
        jumps = bits - np.log2(numbers.earlier(numbers.last, "cur_amax")) >= GROWTH
        has_jumped = np.maximum(has_jumped, jumps & ~begins)
        least = np.where(begins, np.fmin(least, bits), least)
        self._rows = np.array([least, count + np.isfinite(bits), has_jumped]).T
        grown = bits - least
        holds = grown >= GROWTH
        is_far = holds
        hurts = holds
        if holds_any(holds):
            far_growth = [FAR_GROWN.get(tensor, FAR_GROWN_ELSE) for tensor in numbers.tensors.tolist()]
            is_far = grown >= np.array(far_growth)
            overflows = (numbers.values("overflows%") >= OVERFLOW) & numbers.by_row(can_overflow)
            underflows = numbers.values("underflows%") >= numbers.by_row(underflow_threshold) / 2
            # Gradients that begin near 0 in all blocks, as with LayerScale and LoRA, are healthy.
            gradients = numbers.are_known("cur_amax", "gradient")
            forms = np.array(list(map(form_of, numbers.names)))
            underflows &= is_far | ~_grow_together(forms, grown >= GROWTH / 2, gradients)
            hurts = holds & (overflows | underflows)
            is_far &= (has_jumped > 0) | ~_grow_together(np.zeros(len(forms)), holds, gradients)
            # So are those that grow to the size of others, such as of queries, until attention has learned to choose.
            is_far &= ~gradients | (bits > np.fmax.reduce(bits, where=gradients & ~holds, initial=-np.inf))
        for sighting in self.by_severity(
            numbers,
            "cur_amax",
            hurts | is_far,
            holds & ~hurts & ~is_far,
            lambda row: f"amax is {np.exp2(grown[row]):.3g} times its initial value",
            GROWTH_STEPS,
        ):
            # High precision avoids the loss, but the tensor still grows.
            hurt = numbers.names_of(hurts & numbers.are(sighting.tensor))
            helps = sighting.severity == "warning" and sighting.layers[0] in hurt and sighting.tensor != "weight"
            yield sighting._replace(patch=keep_first(sighting.layers, numbers) if helps else "")


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
        id="sibling",
        title="a tensor differs from the same tensor of similar layers",
        subject="group of similar layers",
        needs=f"""
            std or cur_amax of a tensor in at least {LEAST_ALIKE} similar layers, or scale_inv_max, underflows% or
            overflows%
        """,
        collect="LogTensorStats with stats: [std, cur_amax], or the default config",
        condition=f"""
            a layer's tensor differs from similar layers (same class, shape and format; names that differ only in
            numbers) in one of three ways. (1) From one layer to the next, std or amax jumps by 2^{FAR:g} (gradients:
            2^{OF_GRADIENTS:g}, except of experts and of only two layers; weights: 2^{OF_WEIGHTS["std"]:g}, their amax
            2^{OF_WEIGHTS["cur_amax"]:g}, of only two layers 2^{OF_TWO_WEIGHTS:g}) in {FAR_STEPS} collection steps in a
            row; or a weight is 0 after step 0. (2) It jumps by 2^{NEAR:g} in {NEAR_STEPS} steps in a row, and at least
            {LOST:g} % of the elements round to 0 or {OVERFLOW:g} % overflow, four times more than in most similar
            layers. (3) In {FAR_STEPS} steps in a row, at least {SHARES["underflows%"]:g} % of the elements round to 0
            (if their part of the norm is unknown) or {SHARES["overflows%"]:g} % overflow, {TIMES:g} times as many as in
            three quarters of the similar layers. A jump must be at least {SPREADS:g} median absolute deviations of all
            differences between neighbors. With {LEAST_ALIKE} to {FEW} similar layers, (2) does not apply, and a jump
            must be at least {FEW_SPREADS:g} times the range of the others. Of two layers, the one farther from all
            other layers is reported
        """,
        silent=f"""
            trends with depth; fewer similar layers. Deviations only in the amax of activations are a note, unless the
            mean is {OFFSET:g} times the amax or more: then jumps of 2^{NEAR:g} suffice
        """,
        source="this project, calibrated on healthy and planted runs; massive activations: arXiv 2402.17762",
        why="""
            the blocks of a model are similar: a block that differs by orders of magnitude has a bug or no longer learns
        """,
        disproof="the model scales this layer on purpose, or a BF16 run shows the same and trains well",
        remedy="""
            Check how this layer, or the first of these layers, differs from similar layers: initialization, scaling
            factors, masks. Compare with a BF16 run: te-precision compare BF16_RUN THIS_RUN
        """,
        check=lambda: Sibling(needed=FAR_STEPS),
    ),
    Rule(
        id="sibling",
        title="a weight is far larger than weights are",
        subject="layer",
        needs="a step of a torch optimizer",
        collect="at least 6 steps of the optimizer",
        condition=f"the root mean square of a sample of a weight matrix is {LARGE:g} or more in the first step",
        silent="weights that exist only quantized, and of one dimension",
        source="arithmetic: codes of FP8 reach 448, and a scale makes 0.1 of them; the threshold is this project's",
        why="what the layer computes is as much too large, and a norm after it hides that",
        disproof="the weights are stored in another unit on purpose",
        remedy="""
            Look at where the weight comes from: codes that were loaded without their scale, or an initialization in
            another unit
        """,
        check=lambda: ParameterRule(rule="sibling"),
    ),
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
        consequence_of=("stale-scale of gradient",),
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
        check=lambda: AboveLimit(
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
            without a jump by 2^{GROWTH:g} after the first {BEGIN} steps, or if another gradient is as large and has not
            grown. So is underflow with a smaller factor, if as many of the layers whose names differ only in numbers
            grow by 2^3
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
        check=lambda: Growth(needed=1 + GROWTH_STEPS),
        consequence_of=("diverging-loss",),
    ),
    Rule(
        id="growth",
        title=OF_LAST_STEPS,
        subject="tensor",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition=f"""
            the largest magnitude of an activation is 2^{SPIKE["activation"]:g} times that of the {LEAST_HISTORY} to
            {HISTORY} steps before, or 2^{SPIKE_OF_GRADIENT:g} times for tensors of the backward. A note. A warning if
            an activation stays 2^{SPIKE["activation"] / 2:g} times above them in the {STAYS} steps after it
        """,
        silent="what grows over several steps; steps with inf or nan, and weights, which have rules of their own",
        severity="note",  # a warning where it shows an inf, or stays
        source="SPAM, arXiv 2501.06842 (gradients of 5,000 times); the factors are this project's",
        why="one batch can undo what was learned, and with delayed scaling its largest elements are clipped",
        disproof="the loss of the next steps goes on as before",
        remedy="Look at the batch of that step; clip the gradient norm if such steps come again",
        check=lambda: Changed(kinds=("spike",), find=_spike),
        consequence_of=("weight-jump", "learning-rate", "kept-gradient", "growth of weight"),
    ),
)
