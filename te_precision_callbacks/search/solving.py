"""Chooses the GEMMs to keep in high precision within a budget: greedily, by effect and cost."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.search.measuring import GradientEffect
from te_precision_callbacks.search.sweep import MeasuredGroup
from te_precision_callbacks.search.units import BudgetError, Choice, merged
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import time_products

_ENOUGH = 0.01
"""Share of all effects that may stay in low precision although the budget allows more."""


class Costs:
    """Costs of choices over all-low.

    Args:
        recipe: the name of the recipe in low precision, as of ``te-precision check``.
        device: the device of the planned times.
    """

    def __init__(self, products: Sequence[Product], recipe: str, device: Device | None) -> None:
        self._layers: dict[str, list[Product]] = defaultdict(list)
        self._macs: dict[tuple[str, str], int] = {}
        for product in products:
            self._layers[product.layer].append(product)
            self._macs[product.layer, product.gemm] = product.macs
        self._recipe = recipe
        self._device = device
        self._all_low: dict[str, float] = {}
        if device is not None:
            self._all_low = {layer: self._layer_ms(layer, frozenset()) for layer in self._layers}

    def low_share(self, choice: Choice) -> float:
        """Return the share of multiply-adds of the searched layers in low precision."""
        total = sum(self._macs.values())
        return 1 - sum(self._macs.get(switch, 0) for switch in choice) / total

    def extra_ms(self, choice: Choice) -> float | None:
        """Return planned milliseconds of a step over all-low; None without a device."""
        if self._device is None:
            return None
        layers = {layer for layer, _ in choice} & set(self._layers)
        return sum(self._layer_ms(layer, choice) - self._all_low[layer] for layer in layers)

    def of(self, choice: Choice) -> float:
        """Return milliseconds over all-low; without a device, the share of multiply-adds in high precision."""
        extra = self.extra_ms(choice)
        if extra is None:
            return 1 - self.low_share(choice)
        return extra

    def _layer_ms(self, layer: str, choice: Choice) -> float:
        assert self._device is not None  # noqa: S101
        recipes = []
        for product in self._layers[layer]:
            is_high = (layer, product.gemm) in choice
            recipes.append((product, "" if is_high else self._recipe))
        return sum(time.low_ms for time in time_products(recipes, self._device))


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a choice.

    Attributes:
        low_share: the least share of the searched layers' multiply-adds in low precision.
        extra_ms: the most planned milliseconds of a step over all-low.
        cosine: the least cosine of the gradient to the gradient in high precision.
    """

    low_share: float | None = None
    extra_ms: float | None = None
    cosine: float | None = None

    def __post_init__(self) -> None:
        for name in ("low_share", "cosine"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise OptionError(f"{name}={value} must be between 0 and 1.")
        if self.extra_ms is not None and not self.extra_ms >= 0:
            raise OptionError(f"extra_ms={self.extra_ms} must be 0 or more milliseconds.")
        if (self.low_share, self.extra_ms, self.cosine) == (None, None, None):
            raise OptionError("A search needs a budget: low_share=0.85, extra_ms=3 with a device, or cosine=0.999.")

    def allows(self, choice: Choice, costs: Costs) -> bool:
        extra = costs.extra_ms(choice)
        if self.low_share is not None and costs.low_share(choice) < self.low_share:
            return False
        return self.extra_ms is None or extra is None or extra <= self.extra_ms


class Prior(NamedTuple):
    """A published rule: the share of the layers, counted from the last, to keep in high precision."""

    text: str
    source: str
    share: float


PRIORS = {"nvfp4": Prior("the last 15 % of the layers", "https://arxiv.org/abs/2509.25149", 0.15)}
"""Recipe -> where a search starts. It decides nothing."""


@dataclass(frozen=True)
class MeasuredPrior:
    """The rule's cost and effect, beside the result."""

    text: str
    source: str
    low_share: float
    extra_ms: float | None
    effect: GradientEffect


@dataclass(frozen=True)
class Point:
    """A point of the frontier: the first groups of the greedy order are in high precision.

    Attributes:
        kept: the group that was added last; empty for all-low.
        expected_error: the error of all-low, times the share of the effects of the groups in low precision.
    """

    kept: str
    choice: Choice
    low_share: float
    extra_ms: float | None
    expected_error: float


def frontier(measured: Sequence[MeasuredGroup], all_low: GradientEffect, costs: Costs) -> list[Point]:
    """Return the points of the greedy order, which has the largest effect for the least cost first."""
    leaves = [entry for entry in measured if entry.level == "gemm" or not (entry.is_split or entry.level == "operand")]

    def value(entry: MeasuredGroup) -> tuple[bool, float]:
        cost = costs.of(entry.group.switches)
        return cost <= 0, entry.effect.error / max(cost, 1e-12)

    order = sorted(leaves, key=value, reverse=True)
    errors = [entry.effect.error for entry in order]
    total = sum(errors) or 1.0
    points = []
    for count in range(len(order) + 1):
        choice = merged("", (entry.group for entry in order[:count])).switches
        left = all_low.error * sum(errors[count:]) / total
        kept = order[count - 1].group.name if count else ""
        points.append(Point(kept, choice, costs.low_share(choice), costs.extra_ms(choice), left))
    return points


def choose(
    points: Sequence[Point], budget: SearchBudget, costs: Costs, effect: Callable[[Choice], GradientEffect]
) -> Choice:
    """Return the cheapest choice for a cosine, or the best choice within the other limits.

    Args:
        effect: measures a choice.

    Raises:
        BudgetError: no choice of the greedy order holds the cosine within the other limits.
    """
    if budget.cosine is None:
        return _fill(points, budget, costs)
    low = 0
    high = len(points) - 1  # holds: everything in high precision
    while low < high:
        middle = (low + high) // 2
        if effect(points[middle].choice).cosine >= budget.cosine:
            high = middle
        else:
            low = middle + 1
    chosen = points[high]
    if budget.allows(chosen.choice, costs):
        return chosen.choice
    best = _fill(points, budget, costs)
    raise BudgetError(
        f"The budget cannot be met: cosine={budget.cosine} needs {_cost(chosen.choice, costs)}. Within the other"
        f" limits, the best cosine found is {effect(best).cosine:.6f}, with {_cost(best, costs)}."
    )


def _fill(points: Sequence[Point], budget: SearchBudget, costs: Costs) -> Choice:
    """Add groups in the greedy order as long as the budget allows them and effects are left; skip what does not fit."""
    choice: Choice = frozenset()
    enough = _ENOUGH * points[0].expected_error
    left = points[0].expected_error
    for before, point in itertools.pairwise(points):
        if left <= enough:
            break
        larger = choice | (point.choice - before.choice)
        if budget.allows(larger, costs):
            choice = larger
            left -= before.expected_error - point.expected_error
    return choice


def _cost(choice: Choice, costs: Costs) -> str:
    extra = costs.extra_ms(choice)
    text = f"{100 * costs.low_share(choice):.1f} % of multiply-adds in low precision"
    return text if extra is None else f"{text} and {extra:.3g} ms over all-low"
