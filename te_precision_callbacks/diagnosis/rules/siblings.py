"""The rule on tensors that differ from similar layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.diagnosis.rule import ColumnStreaks, Rule, RuleCheck, Sighting, by_tensor
from te_precision_callbacks.diagnosis.rules.lost_elements import (
    LOST_NORM,
    OVERFLOW,
    can_overflow,
    loses_too_much,
    lost_norm,
    overflow_threshold,
    underflow_threshold,
)
from te_precision_callbacks.layers.folding import numbers_of
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask, holds_any, largest, total

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

_STATISTICS = ("std", "cur_amax", "scale_inv_max")

_GRADIENTS = frozenset({"gradient", "dgrad", "wgrad"})

_FLOWS = frozenset({"activation", "gradient", "dgrad", "output"})
"""The tensors that one layer hands to the next, so that a jump lasts through the layers that follow."""


class Sibling(RuleCheck):
    needed = FAR_STEPS

    def __init__(self) -> None:
        super().__init__()
        self._near = ColumnStreaks(NEAR_STEPS)
        self._most_similar = 0

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        compared: list[Column] = []
        for statistic in _STATISTICS:
            for column in numbers.columns(statistic, facts):
                if statistic == "scale_inv_max":  # it is proportional to amax; other rules compare both
                    column = column.select("apart", facts, functools.partial(_are_apart, column, compared))
                else:
                    compared.append(column)
                for sighting in self._check(numbers, facts, column, statistic):
                    yield sighting._replace(key="")  # a tensor has one finding, from any of its statistics
        for statistic in SHARES:
            for column in numbers.columns(statistic, facts):
                for sighting in self._check_share(numbers, facts, column, statistic):
                    yield sighting._replace(key="")

    @property
    def why_not(self) -> str:
        has_none = self._most_similar and not self.steps
        if has_none:
            return "the model has no similar layers"
        return super().why_not

    def _check_share(self, numbers: StepNumbers, facts: Facts, column: Column, statistic: str) -> Iterator[Sighting]:
        """Find layers that lose far more of a tensor's elements than similar layers, but less than the thresholds of
        the rules underflow and overflow.
        """
        shares = np.fmax(numbers.mask_nonfinite(column).values, 0.0)
        groups = [places for places in self._similar_layers(numbers, facts, column) if len(places) >= LEAST_OF_SHARES]
        if groups:
            self.note_data(numbers.iteration)
        is_some = largest(shares) >= SHARES[statistic]
        if not is_some and not self.streaks.held:
            return
        others = np.zeros(len(shares))
        odd = np.zeros(len(shares), bool)
        for places in groups if is_some else ():
            if shares[places].max() < SHARES[statistic]:
                continue
            ordinary = np.sort(shares[places])[: len(places) - max(1, len(places) // MOST_ODD)]
            others[places] = np.median(ordinary)
            odd[places] = shares[places] >= max(SHARES[statistic], TIMES * ordinary.max())
        light = np.zeros(len(shares), bool)
        if statistic == "underflows%":
            what = "round to 0"
            if holds_any(odd):
                light = lost_norm(numbers, facts, column) < LOST_NORM
                odd &= shares < underflow_threshold(numbers, facts, column)
        else:
            what = "are above the range of the format"
            odd &= can_overflow(numbers, facts, column) & (shares < overflow_threshold(numbers, column))
        seen = f"{{:.3g}} % of the elements {what}, {{:.2g}} % in similar layers"
        yield from self.streaks.sightings_by_severity(
            numbers, facts, column, odd & ~light, odd & light, seen, shares, others, key="share, "
        )

    def _check_zero(self, numbers: StepNumbers, facts: Facts, column: Column) -> Iterator[Sighting]:
        """Find weights of 0 in layers with similar layers that have other weights; weights may be initialized to 0."""
        if not numbers.iteration:
            return
        values = numbers.mask_nonfinite(column).values
        is_zero = (values == 0) & numbers.are("weight", column)
        if not holds_any(is_zero):
            return
        lone: list[int] = []
        for places in self._similar_layers(numbers, facts, column):
            zeros = places[is_zero[places]].tolist()
            if len(zeros) <= total(np.isfinite(values[places])) / 2:
                lone += zeros
        if lone:
            names = numbers.names_of(column)
            layers = tuple(facts.sort_by_execution((names[place] for place in lone), "weight"))
            seen = "all elements are 0, and not in similar layers"
            yield Sighting(layers, "weight", column.statistic, seen, numbers.iteration)

    def _check(self, numbers: StepNumbers, facts: Facts, column: Column, statistic: str) -> list[Sighting]:
        zeros = list(self._check_zero(numbers, facts, column)) if statistic == "cur_amax" else []
        bits = numbers.mask_nonfinite(column).bits
        groups = self._similar_layers(numbers, facts, column)
        spread = self._spread(numbers, facts, column, bits)
        wide = (spread >= min(NEAR, OF_WEIGHTS.get(statistic, NEAR))).nonzero()[0].tolist()
        if not (wide or self._near.held or self.streaks.held):
            return zeros
        jumps = np.zeros(len(bits))
        of_many = np.zeros(len(bits), bool)
        far_from = np.where(numbers.are("weight", column), OF_WEIGHTS.get(statistic, FAR), FAR)
        for number in wide:
            known = groups[number][np.isfinite(bits[groups[number]])]
            of_many[known] = len(known) > FEW
            tensor = str(numbers.tensors[column.rows[known[0]]])
            least = min(NEAR, far_from[known[0]])
            if spread[number] < least:
                continue
            if len(known) == LEAST_ALIKE:  # of two layers, the one farther from the median of all layers deviates
                middle = np.median(bits[np.isfinite(bits) & numbers.are(tensor, column)])
                near, farther = sorted(known, key=lambda place: abs(bits[place] - middle))
                jumps[farther] = bits[farther] - bits[near]
                far_from[known] = OF_TWO_WEIGHTS if tensor == "weight" else FAR
                continue
            compare = deviations if len(known) > FEW else few_deviations
            jumps[known] = compare(bits[known], flows=tensor in _FLOWS, least=least)
            if tensor in _GRADIENTS and self._one_in_a_block(numbers, column, known):
                far_from[known] = OF_GRADIENTS
        far = np.abs(jumps) >= far_from
        some = np.abs(jumps) >= NEAR
        lossy = some & of_many
        lossy = lossy & _loses(numbers, facts, column) if holds_any(lossy) else lossy
        seen = f"{statistic.removeprefix('cur_')} is {{:.3g}}, {{:.3g}} times {{}} than in similar layers"
        values = column.values, np.exp2(np.abs(jumps)), np.where(jumps < 0, "smaller", "larger")
        of_amax_alone = numbers.are("activation", column) & (statistic == "cur_amax")
        notes = some & ~lossy & of_amax_alone
        warnings = far & ~lossy & ~of_amax_alone
        return by_tensor(
            numbers,
            column,
            self._near.sightings(numbers, facts, column, lossy, seen, *values, key="lossy"),
            self.streaks.sightings(numbers, facts, column, notes, seen, *values, severity="note", key="amax"),
            self.streaks.sightings(numbers, facts, column, warnings, seen, *values),
            zeros,
        )

    @staticmethod
    def _one_in_a_block(numbers: StepNumbers, column: Column, places: Ints) -> bool:
        blocks = [numbers_of(numbers.names[row])[:1] for row in column.rows[places].tolist()]
        return len(set(blocks)) == len(blocks)

    def _similar_layers(self, numbers: StepNumbers, facts: Facts, column: Column) -> list[Ints]:
        return column.cached("alike", facts, lambda: self._groups(numbers, facts, column))

    def _spread(self, numbers: StepNumbers, facts: Facts, column: Column, bits: Floats) -> Floats:
        """[groups of similar layers]: largest minus smallest known value; nan without one."""

        def make() -> tuple[Ints, Ints]:
            groups = self._similar_layers(numbers, facts, column)
            begins = np.cumsum([0, *map(len, groups)])[:-1]
            return np.concatenate([np.empty(0, np.int64), *groups]), begins

        order, begins = column.cached("order of alike", facts, make)
        if not len(begins):
            return np.empty(0)
        in_order = bits[order]
        if largest(np.add.reduceat(np.isfinite(in_order), begins, dtype=int)) >= LEAST_ALIKE:
            self.note_data(numbers.iteration)
        spread: Floats = np.fmax.reduceat(in_order, begins) - np.fmin.reduceat(in_order, begins)
        return spread

    def _groups(self, numbers: StepNumbers, facts: Facts, column: Column) -> list[Ints]:
        names = numbers.names_of(column)
        tensors = numbers.tensors_of(column)
        alike: dict[tuple[str, str, str], list[int]] = {}
        for place, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            alike.setdefault((tensor, facts.kind_of(name), facts.format_of(name, tensor)), []).append(place)
        self._most_similar = max(self._most_similar, *map(len, alike.values()), 0)

        def order(place: int) -> tuple[int, int]:
            return facts.order_key(names[place], tensors[place])

        return [np.array(sorted(group, key=order)) for group in alike.values() if len(group) >= LEAST_ALIKE]


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
    for place in range(len(bits)):
        others = np.delete(bits, place)
        away = bits[place] - np.median(others)
        if np.abs(away) >= FEW_SPREADS * np.ptp(others):
            result[place] = away
    for cut in range(2, len(bits) - 1) if flows and not result.any() else ():
        before = bits[:cut]
        behind = bits[cut:]
        jump = np.median(behind) - np.median(before)
        if np.abs(jump) >= FEW_SPREADS * max(np.ptp(before), np.ptp(behind)):
            result[cut] = bits[cut] - np.median(before)
    return result


def _are_apart(column: Column, others: Iterable[Column]) -> Mask:
    """[rows of the column]: whether no other column has the tensor."""
    return ~np.isin(column.rows, [row for other in others for row in other.rows.tolist()])


def _loses(numbers: StepNumbers, facts: Facts, column: Column) -> Mask:
    def most(least: float, lost: Column) -> Floats:
        tensors = numbers.tensors[lost.rows]
        result = np.full(len(tensors), least)
        for tensor in set(tensors.tolist()):
            of_tensor = tensors == tensor
            result[of_tensor] = np.maximum(least, 4 * np.median(lost.values[of_tensor]))
        return result

    return loses_too_much(
        numbers,
        facts,
        column,
        underflows=lambda lost: most(LOST, lost),
        overflows=lambda lost: most(OVERFLOW, lost),
    )


RULES = (
    Rule(
        id="sibling",
        title="a tensor differs from the same tensor of similar layers",
        subject="group of similar layers",
        needs=(
            f"std or cur_amax of a tensor in at least {LEAST_ALIKE} similar layers, or scale_inv_max, underflows% or"
            " overflows%"
        ),
        collect="LogTensorStats with stats: [std, cur_amax], or the default config",
        condition=(
            "a layer's tensor differs from similar layers (same class, shape and format; names that differ only in"
            f" numbers) in one of three ways. (1) From one layer to the next, std or amax jumps by 2^{FAR:g}"
            f" (gradients: 2^{OF_GRADIENTS:g}, except of experts and of only two layers; weights:"
            f" 2^{OF_WEIGHTS['std']:g}, their amax 2^{OF_WEIGHTS['cur_amax']:g}, of only two layers"
            f" 2^{OF_TWO_WEIGHTS:g}) in {FAR_STEPS} collection steps in a row; or a weight is 0 after step 0. (2) It"
            f" jumps by 2^{NEAR:g} in {NEAR_STEPS} steps in a row, and at least {LOST:g} % of the elements round to 0"
            f" or {OVERFLOW:g} % overflow, four"
            f" times more than in most similar layers. (3) In {FAR_STEPS} steps in a row, at least"
            f" {SHARES['underflows%']:g} % of the elements round to 0 (if their part of the norm is unknown) or"
            f" {SHARES['overflows%']:g} % overflow, {TIMES:g} times as many as in three quarters of the similar layers."
            f" A jump must be at least {SPREADS:g} median absolute deviations of all differences between neighbors."
            f" With {LEAST_ALIKE} to {FEW} similar layers, (2) does not apply, and a jump must be at least"
            f" {FEW_SPREADS:g} times the range of the others. Of two layers, the one farther from all other layers is"
            " reported"
        ),
        silent="trends with depth; fewer similar layers. Deviations only in the amax of activations are a note",
        severity="warning",
        source="this project, calibrated on healthy and planted runs; massive activations: arXiv 2402.17762",
        why="the blocks of a model are similar: a block that differs by orders of magnitude has a bug or no longer"
        " learns",
        disproof="the model scales this layer on purpose, or a BF16 run shows the same and trains well",
        remedy=(
            "Check how this layer, or the first of these layers, differs from similar layers: initialization, scaling"
            " factors, masks. Compare with a BF16 run: te-precision compare BF16_RUN THIS_RUN"
        ),
        check=Sibling,
    ),
)
