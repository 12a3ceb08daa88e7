"""The rule on tensors that differ from similar layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting, Sightings
from te_precision_callbacks.diagnosis.rules.lost_elements import (
    LOST_NORM,
    OVERFLOW,
    can_overflow,
    overflow_threshold,
    underflow_threshold,
)
from te_precision_callbacks.layers.folding import numbers_of
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest

_STATISTICS = ("std", "cur_amax", "scale_inv_max")

_GRADIENTS = frozenset({"gradient", "dgrad", "wgrad"})

_FLOWS = frozenset({"activation", "gradient", "dgrad", "output"})
"""The tensors that one layer hands to the next, so that a jump lasts through the layers that follow."""


class Sibling(RuleCheck):
    def __init__(self) -> None:
        super().__init__(needed=FAR_STEPS)

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
        groups = [rows for rows in self._similar_layers(numbers, statistic) if len(rows) >= LEAST_OF_SHARES]
        if groups:
            self.note_data(numbers.iteration)
        if largest(shares) < SHARES[statistic] and not self.streaks.held:
            return ()
        ordinary_share = np.zeros(len(shares))
        odd = np.zeros(len(shares), bool)
        for rows in groups:
            if shares[rows].max() < SHARES[statistic]:
                continue
            ordinary = np.sort(shares[rows])[: len(rows) - max(1, len(rows) // MOST_ODD)]
            ordinary_share[rows] = np.median(ordinary)
            odd[rows] = shares[rows] >= max(SHARES[statistic], TIMES * ordinary.max())
        light = np.zeros(len(shares), bool)
        if statistic == "underflows%":
            what = "round to 0"
            light = numbers.values("underflow_norm%") < LOST_NORM
            odd &= shares < numbers.by_row(underflow_threshold)
        else:
            what = "are above the range of the format"
            odd &= numbers.by_row(can_overflow) & (shares < numbers.by_row(overflow_threshold))
        return self.streaks.by_severity(
            numbers,
            statistic,
            odd & ~light,
            odd & light,
            lambda row: f"{shares[row]:.3g} % of the elements {what}, {ordinary_share[row]:.2g} % in similar layers",
            key="share, ",
        )

    def _find_zeros(self, numbers: StepNumbers) -> Sightings:
        """Find weights of 0 in layers with similar layers that have other weights; weights may be initialized to 0."""
        values = numbers.finite("cur_amax")
        is_zero = (values == 0) & numbers.are("weight")
        if not numbers.iteration or not holds_any(is_zero):
            return
        lone: list[int] = []
        for rows in self._similar_layers(numbers, "cur_amax"):
            zeros = rows[is_zero[rows]].tolist()
            if len(zeros) <= np.isfinite(values[rows]).sum() / 2:
                lone += zeros
        if lone:
            layers = tuple(numbers.names[row] for row in lone)
            seen = "all elements are 0, and not in similar layers"
            yield Sighting(seen, layers, "weight", numbers.column("cur_amax").label(lone[0]), numbers.iteration)

    def _check(self, numbers: StepNumbers, statistic: str) -> Sightings:
        if statistic == "cur_amax":
            yield from self._find_zeros(numbers)
        bits = numbers.bits(statistic)
        if statistic == "scale_inv_max":  # it is proportional to amax; other rules compare both
            bits[numbers.are_known("std") | numbers.are_known("cur_amax")] = np.nan
        wide = self._wide_groups(numbers, statistic, bits)
        if not (wide or self.streaks.held):
            return
        jumps = np.zeros(len(numbers))
        has_many_siblings = np.zeros(len(numbers), bool)
        far_from = np.where(numbers.are("weight"), OF_WEIGHTS.get(statistic, FAR), FAR)
        for rows in wide:
            measured = rows[np.isfinite(bits[rows])]
            tensor = str(numbers.tensors[measured[0]])
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
            if tensor in _GRADIENTS and _is_one_in_a_block(numbers, measured):
                far_from[measured] = OF_GRADIENTS
        far = np.abs(jumps) >= far_from
        some = np.abs(jumps) >= NEAR
        lossy = some & has_many_siblings
        lossy = lossy & _lose_elements(numbers) if holds_any(lossy) else lossy
        shows_only_amax = numbers.are("activation") & (statistic == "cur_amax")
        values = numbers.values(statistic)

        def describe(row: int) -> str:
            name = statistic.removeprefix("cur_")
            direction = "smaller" if jumps[row] < 0 else "larger"
            times = np.exp2(np.abs(jumps[row]))
            return f"{name} is {values[row]:.3g}, {times:.3g} times {direction} than in similar layers"

        notes = some & ~lossy & shows_only_amax
        warnings = far & ~lossy & ~shows_only_amax
        yield from self.streaks.sightings(numbers, statistic, lossy, describe, key="lossy", steps=NEAR_STEPS)
        yield from self.streaks.sightings(numbers, statistic, notes, describe, severity="note", key="amax")
        yield from self.streaks.sightings(numbers, statistic, warnings, describe)

    def _wide_groups(self, numbers: StepNumbers, statistic: str, bits: Floats) -> list[Ints]:
        """The groups of similar layers with a spread that may be too large."""
        groups = self._similar_layers(numbers, statistic)
        if not groups:
            return []
        order = numbers.derive(("order of similar layers", statistic), lambda: np.concatenate(groups))
        begins = numbers.derive(("begins", statistic), lambda: np.cumsum([0, *map(len, groups)])[:-1])
        in_order = bits[order]
        if largest(np.add.reduceat(np.isfinite(in_order), begins, dtype=int)) >= LEAST_ALIKE:
            self.note_data(numbers.iteration)
        spread = np.fmax.reduceat(in_order, begins) - np.fmin.reduceat(in_order, begins)
        least = min(NEAR, OF_WEIGHTS.get(statistic, NEAR))
        return [groups[number] for number in np.flatnonzero(spread >= least)]

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
        groups.setdefault((tensor, facts.kind_of(name), facts.format_of(name, tensor)), []).append(row)

    return [np.array(numbers.in_order(group)) for group in groups.values() if len(group) >= LEAST_ALIKE]


def _is_one_in_a_block(numbers: StepNumbers, rows: Ints) -> bool:
    blocks = [numbers_of(numbers.names[row])[:1] for row in rows.tolist()]
    return len(set(blocks)) == len(blocks)


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
        silent="trends with depth; fewer similar layers. Deviations only in the amax of activations are a note",
        source="this project, calibrated on healthy and planted runs; massive activations: arXiv 2402.17762",
        why="""
            the blocks of a model are similar: a block that differs by orders of magnitude has a bug or no longer learns
        """,
        disproof="the model scales this layer on purpose, or a BF16 run shows the same and trains well",
        remedy="""
            Check how this layer, or the first of these layers, differs from similar layers: initialization, scaling
            factors, masks. Compare with a BF16 run: te-precision compare BF16_RUN THIS_RUN
        """,
        check=Sibling,
    ),
)
