"""A step with the expected times of its products: the input of the advice.

priced = PricedStep.of(step, device)
priced.products, priced.recipes, priced.times       # one for each product that has a time
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import CallPlan, Measured, ProductTime, counted, recipes_of, timed
from te_precision_callbacks.speed.recorded import Step


@dataclass(frozen=True)
class PricedStep:
    """A step on a device.

    Attributes:
        step: the step.
        device: the device.
        plan: how often operands are cast.
        table: measured times, which come before those of the model; None without them.
        recipe: what layers in high precision could run in; empty if nothing is known of that.
        products: the products that have a time.
        recipes: the recipe of each.
        times: the expected time of each.
    """

    step: Step
    device: Device
    plan: CallPlan
    table: Measured | None
    recipe: str
    products: Sequence[Product]
    recipes: Sequence[str]
    times: Sequence[ProductTime]

    @classmethod
    def of(
        cls,
        step: Step,
        device: Device,
        *,
        plan: CallPlan = "training",
        recipe: str = "",
        table: Measured | None = None,
    ) -> PricedStep:
        """Price a step.

        Args:
            step, device, plan, table: see the attributes.
            recipe: see the attributes; the default is the recipe of most multiply-adds in low precision.

        Raises:
            SpeedError: the device does not run a recipe.
        """
        products = counted(step.coverage)
        recipes = recipes_of(products, step.recipes)
        could = recipe or _main_recipe(products, recipes)
        if could:
            device.check_recipe(could)
        times = timed(products, recipes, device, plan=plan, table=table)
        return cls(step, device, plan, table, could, products, recipes, times)

    def timed(self, products: Sequence[Product], recipes: Sequence[str]) -> list[ProductTime]:
        """The times of other products, or in other recipes, on the same device."""
        return timed(products, recipes, self.device, plan=self.plan, table=self.table)


def _main_recipe(products: Sequence[Product], recipes: Sequence[str]) -> str:
    """The recipe with the most multiply-adds in low precision; empty if nothing runs in low precision."""
    macs: dict[str, int] = defaultdict(int)
    for product, recipe in zip(products, recipes, strict=True):
        if recipe in RECIPES:
            macs[recipe] += product.macs
    return max(macs, key=lambda name: macs[name], default="")
