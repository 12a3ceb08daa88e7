"""The expected speed of a step: its products, their total, and advice.

speed = estimate_step(step_of_run(open_run("logs")), device_named("h200"))
speed.times, speed.total, speed.advice, speed.notes
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.gemm_shapes import refusals
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES, GemmName
from te_precision_callbacks.coverage.coverage import Coverage, Product
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
from te_precision_callbacks.speed.advice import Advice, advise
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.costs import CallPlan, Shape
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import (
    ProductTime,
    Total,
    counted,
    recipes_of,
    timed,
    total,
)

_LARGEST_MEMORY = 2.0**40
"""Bytes that no GPU has, for a device whose memory is not known."""

_ON_MANY = ("fp8_current_scaling", "fp8_delayed_scaling")
"""The recipes of which times on two devices are published."""


@dataclass(frozen=True)
class Step:
    """A step of a training: what its time is estimated from.

    Attributes:
        coverage: its products.
        recipes: layer -> the recipe under which it ran; or one for all.
        notes: what the reader of its times has to know.
    """

    coverage: Coverage
    recipes: Mapping[str, str] | str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, coverage: Coverage, precision: Iterable[GemmPrecision]) -> Step:
        """The step of a session: its coverage, and the recipes of its ``precision``."""
        return cls(coverage, {one.layer: one.recipe for one in precision if one.recipe})


@dataclass(frozen=True)
class StepSpeed:
    """What is expected of a step.

    Attributes:
        device: the device.
        plan: how often operands are cast.
        times: the products, in their order.
        total: all of them together.
        advice: what to do, what saves most first.
        notes: what the reader has to know about the figures.
    """

    device: Device
    plan: CallPlan
    times: tuple[ProductTime, ...]
    total: Total
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As ``te-precision speed --json`` has it."""
        return {
            "device": self.device.title,
            "plan": self.plan,
            "products": [one.as_json() for one in self.times],
            "total": self.total.as_json(),
            "advice": [one.as_json() for one in self.advice],
            "notes": list(self.notes),
        }


def estimate_step(
    step: Step, device: Device, *, plan: CallPlan = "training", recipe: str = "", table: Calibration | None = None
) -> StepSpeed:
    """What is expected of a step.

    Args:
        step: the step.
        device: the device, which need not be here.
        plan: how often operands are cast.
        recipe: what layers in high precision could run in; the default is the recipe of most others.
        table: measured times, which come before those of the model.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    products = counted(step.coverage)
    recipes = recipes_of(products, step.recipes)
    alternative = recipe or _main_recipe(products, recipes)
    if alternative:
        device.check_recipe(alternative)

    def price(others: Sequence[Product], in_recipes: Sequence[str]) -> list[ProductTime]:
        return timed(others, in_recipes, device, plan=plan, table=table)

    times = price(products, recipes)
    return StepSpeed(
        device,
        plan,
        tuple(times),
        total(times, device),
        tuple(advise(products, recipes, times, device, alternative, price)),
        (*step.notes, *notes_of(times, device)),
    )


def _main_recipe(products: Sequence[Product], recipes: Sequence[str]) -> str:
    """The recipe with the most multiply-adds in low precision; empty if nothing runs in low precision."""
    macs: dict[str, int] = defaultdict(int)
    for product, recipe in zip(products, recipes, strict=True):
        if recipe in RECIPES:
            macs[recipe] += product.macs
    return max(macs, key=lambda name: macs[name], default="")


def notes_of_shapes(shapes: Iterable[Shape], recipe: str, device: Device, plan: CallPlan) -> list[str]:
    """What the reader has to know about shapes: those that Transformer Engine refuses, and those that fit on no device.

    Args:
        shapes: tokens x in_features x out_features.
        recipe: the recipe that they run in.
        device: the device.
        plan: ``benchmark`` for fprop alone; ``training`` for all GEMMs of a linear layer.
    """
    notes = []
    gemms: tuple[GemmName, ...] = GEMMS if plan == "training" else ("fprop",)
    memory = _LARGEST_MEMORY if device.memory_gb is None else device.memory_gb * 1e9
    for shape in shapes:
        sizes = {"tokens": shape.m, "in_features": shape.k, "out_features": shape.n}
        multiples = dict.fromkeys(sizes, 1)
        m, k, n, _ = shape
        for refusal in refusals(recipe, device.capability, tokens=m, in_features=k, out_features=n, gemms=gemms):
            multiples[refusal.dimension] = math.lcm(multiples[refusal.dimension], refusal.multiple)
        refused = {name: multiple for name, multiple in multiples.items() if multiple > 1}
        if refused:
            rules = ", ".join(f"{name} to be a multiple of {multiple}" for name, multiple in refused.items())
            good = Shape(*(-(-size // multiples[name]) * multiples[name] for name, size in sizes.items()))
            notes.append(
                f"Transformer Engine refuses {shape} in {recipe}: it needs {rules}. The next shape that works is"
                f" {good}. The time is an estimate of the padded shape."
            )
        if shape.high_bytes > memory:
            limit = "any GPU has" if device.memory_gb is None else f"the {device.memory_gb:g} GB of {device.title}"
            notes.append(
                f"{shape} does not fit: its operands and its result take {shape.high_bytes / 1e9:,.0f} GB in BF16,"
                f" more than {limit}."
            )
    return notes


def notes_of(times: Sequence[ProductTime], device: Device) -> list[str]:
    """What the reader of expected times has to know about their source."""
    notes = []
    measured_on = device.fitted.measured_on
    modelled = [one for one in times if one.cost is not None and one.source == "model"]
    recipes = sorted({one.recipe for one in modelled})
    if recipes and not device.is_measured:
        notes.append(
            f"The constants were measured on {measured_on}, not on {device.title}: intervals are wider for that."
            " --calibrate measures on the GPU itself."
        )
        alone = [recipe for recipe in recipes if recipe not in _ON_MANY]
        if alone:
            notes.append(
                f"{' and '.join(alone)}: published times are of {measured_on} alone. Whether they hold on other devices"
                " has not been tested."
            )
    if "fp8_block_scaling" in recipes and device.capability >= (10, 0):
        notes.append("fp8_block_scaling: emulated by MXFP8 on Blackwell, and priced as MXFP8; no time is published.")
    partly = sum(1 for one in times if one.source == "calibrated GEMM, modeled cast")
    if partly:
        notes.append(
            f"Of {many(partly, 'product')} only the GEMM was measured; the cast is the model's. Run --calibrate again"
            " to measure it."
        )
    unknown = sum(1 for one in times if one.recipe and one.cost is None)
    if unknown:
        notes.append(
            f"The cost of {many(unknown, 'product')} in low precision is unknown: attention and products without a"
            " weight, or FP8 of a recipe that is not known. They are in no total."
        )
    wide = sum(1 for one in times if not one.recipe and one.precision not in ("bf16", "fp16", ""))
    if wide:
        notes.append(f"{many(wide, 'product')} wider than 16 bits count as if in BF16: their own time is longer.")
    return notes
