"""Selects groups of GEMMs to measure, and groups to keep in high precision within a budget.

:func:`sweep` measures groups in low precision, with all others in high precision: blocks, then the layers of blocks
with large effects, then the GEMMs of such layers. A group is split if it has more than a tenth of the sum of the
effects on its level, so at most ten groups of a level are. This bounds the passes, for each batch: 4 + blocks + layers
of 10 blocks + 30. :func:`choose` is greedy, by effect and cost.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.search.results import GradientEffect, MeasuredGroup, Point, SearchOptions
from te_precision_callbacks.search.units import BudgetError, Choice, LayerGroup, Switch
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import time_products

_LARGE = 0.1
"""Share of the effects of a level above which a group is split."""

_ENOUGH = 0.01
"""Share of all effects that may stay in low precision although the budget allows more."""


def sweep(
    atoms: Iterable[LayerGroup],
    measure: Callable[[str, Sequence[LayerGroup]], list[GradientEffect] | None],
    *,
    by_gemm: bool,
) -> tuple[list[MeasuredGroup], dict[LayerGroup, GradientEffect]]:
    """Measure groups, level by level; a level that cannot be completed in time is left out.

    Args:
        measure: returns the effects of the groups of a level, each in low precision alone; None if the time is up.
        by_gemm: whether layers with large effects are split.

    Returns:
        All measurements, and the smallest measured groups with their effects: together, they have each GEMM once.
    """
    blocks = group_by_key((_block_of(atom), atom) for atom in atoms)
    groups = [LayerGroup(name, Choice().union(*(part.switches for part in parts))) for name, parts in blocks.items()]
    measured: list[MeasuredGroup] = []
    leaves: dict[LayerGroup, GradientEffect] = {}
    large: list[LayerGroup] = []
    for level in ("block", "layer", "gemm"):
        effects = measure(level, groups)
        if effects is None:
            break
        for group in large:
            del leaves[group]
        level_effects = dict(zip(groups, effects, strict=True))
        leaves |= level_effects
        measured += [MeasuredGroup(group.name, level, effect) for group, effect in level_effects.items()]
        total = sum(effect.error for effect in effects)
        large = [group for group, effect in level_effects.items() if effect.error > _LARGE * total]
        if level == "block":
            groups = [part for block in large for part in blocks[block.name]]
        elif level == "layer" and by_gemm:
            groups = [gemm for layer in large for gemm in split_by_gemm(layer)]
        else:
            break
    return measured, leaves


def _block_of(group: LayerGroup) -> str:
    """Return the part of its layers' names up to the first number, such as ``layers.3``; else the group's name."""
    blocks = set()
    for name, _ in group.switches:
        match = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        blocks.add(group.name if match is None else match[0])
    return blocks.pop() if len(blocks) == 1 else group.name


def split_by_gemm(layer: LayerGroup) -> list[LayerGroup]:
    switches = group_by_key((switch[1], switch) for switch in layer.switches)
    return [LayerGroup(f"{layer.name} {gemm}", frozenset(switches[gemm])) for gemm in GEMMS]


@dataclass(frozen=True)
class Costs:
    """Costs of choices over all-low.

    Attributes:
        products: of the searched layers, one for each GEMM.
        recipe: the name of the recipe in low precision, as of ``te-precision check``.
        device: the device of the planned times.
    """

    products: Sequence[Product]
    recipe: str
    device: Device | None

    def low_share(self, choice: Choice) -> float:
        """Return the share of multiply-adds of the searched layers in low precision."""
        total = sum(product.macs for product in self.products)
        return 1 - sum(product.macs for product in self.products if (product.layer, product.gemm) in choice) / total

    def extra_ms(self, choice: Choice) -> float | None:
        """Return planned milliseconds of a step over all-low; None without a device."""
        if self.device is None:
            return None
        layers = {layer for layer, _ in choice}
        products = [product for product in self.products if product.layer in layers]
        return self._milliseconds(products, choice) - self._milliseconds(products, ())

    def _milliseconds(self, products: Iterable[Product], choice: Collection[Switch]) -> float:
        assert self.device is not None  # noqa: S101
        recipes = [("" if (product.layer, product.gemm) in choice else self.recipe) for product in products]
        return sum(time.low_ms for time in time_products(zip(products, recipes, strict=True), self.device))

    def describe(self, choice: Choice) -> str:
        extra = self.extra_ms(choice)
        text = f"{100 * self.low_share(choice):.1f} % of multiply-adds in low precision"
        return text if extra is None else f"{text} and {extra:.3g} ms over all-low"


def frontier(leaves: Mapping[LayerGroup, GradientEffect], all_low: GradientEffect, costs: Costs) -> dict[Choice, Point]:
    """Return the points of the greedy order, which has the largest effect for the least cost first."""

    def value(group: LayerGroup) -> tuple[bool, float]:
        extra = costs.extra_ms(group.switches)
        cost = 1 - costs.low_share(group.switches) if extra is None else extra
        return cost <= 0, leaves[group].error / max(cost, 1e-12)

    order = sorted(leaves, key=value, reverse=True)
    errors = [leaves[group].error for group in order]
    total = sum(errors) or 1.0
    choice: Choice = frozenset()
    points = {}
    for number, group in enumerate([LayerGroup("", choice), *order]):
        choice |= group.switches
        remaining_error = all_low.error * sum(errors[number:]) / total
        points[choice] = Point(group.name, costs.low_share(choice), costs.extra_ms(choice), remaining_error)
    return points


def choose(
    points: Mapping[Choice, Point], options: SearchOptions, costs: Costs, effect: Callable[[Choice], GradientEffect]
) -> Choice:
    """Return the cheapest choice for a cosine, or the best choice within the other limits.

    Args:
        effect: measures a choice.

    Raises:
        BudgetError: no choice of the greedy order holds the cosine within the other limits.
    """
    cosine = options.cosine
    if cosine is None:
        return _fill(points, options, costs)
    choices = list(points)
    # The last choice, everything in high precision, holds any cosine.
    index = bisect.bisect_left(choices, x=True, hi=len(choices) - 1, key=lambda made: effect(made).cosine >= cosine)
    if _allows(options, choices[index], costs):
        return choices[index]
    best = _fill(points, options, costs)
    raise BudgetError(
        f"The budget cannot be met: cosine={cosine} needs {costs.describe(choices[index])}. Within the other"
        f" limits, the best cosine found is {effect(best).cosine:.6f}, with {costs.describe(best)}."
    )


def _fill(points: Mapping[Choice, Point], options: SearchOptions, costs: Costs) -> Choice:
    """Add groups in the greedy order as long as the budget allows them and effects are left; skip what does not fit."""
    choice: Choice = frozenset()
    remaining_error = points[choice].expected_error
    enough = _ENOUGH * remaining_error
    for (smaller_choice, point), (larger_choice, larger) in itertools.pairwise(points.items()):
        if remaining_error <= enough:
            break
        if _allows(options, choice | (larger_choice - smaller_choice), costs):
            choice |= larger_choice - smaller_choice
            remaining_error -= point.expected_error - larger.expected_error
    return choice


def _allows(options: SearchOptions, choice: Choice, costs: Costs) -> bool:
    extra = costs.extra_ms(choice)
    if options.low_share is not None and costs.low_share(choice) < options.low_share:
        return False
    return options.extra_ms is None or extra is None or extra <= options.extra_ms
