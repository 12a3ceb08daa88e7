"""Expected speed of a step: its products, their total, and advice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.speed.advice import Advice, advise
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import (
    ProductTime,
    Total,
    layers_without_gain,
    timed,
    total,
    with_recipes,
)


@dataclass(frozen=True)
class Step:
    """A training step to estimate.

    Attributes:
        coverage: its products.
        recipes: layer -> its recipe; or one for all.
        notes: limits of its times.
    """

    coverage: Coverage
    recipes: Mapping[str, str] | str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, coverage: Coverage, precision: Iterable[GemmPrecision]) -> Step:
        """Return the step of a session, from its coverage and ``precision``."""
        return cls(coverage, {gemm.layer: gemm.recipe for gemm in precision if gemm.recipe})


@dataclass(frozen=True)
class StepSpeed:
    """Expected speed of a step.

    Attributes:
        device: the device.
        times: times of the products, in their order.
        total: all products together.
        advice: changes that save time, the largest saving first.
        notes: limits of these times.
    """

    device: Device
    times: tuple[ProductTime, ...]
    total: Total
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of ``te-precision speed``."""
        return {
            "device": self.device.title,
            "products": [time.as_json() for time in self.times],
            "total": {**self.total.figures(), "unknown": self.total.unknown},
            "advice": self.advice,
            "notes": self.notes,
        }


def estimate_step(step: Step, device: Device, *, recipe: str = "", table: Calibration | None = None) -> StepSpeed:
    """Estimate the speed of a step.

    Args:
        step: the step.
        device: the device, which need not be on this machine.
        recipe: a recipe for layers in high precision; the default is the most common recipe of the step.
        table: measured times, which take precedence over the model's.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    products = with_recipes(step.coverage, step.recipes)
    macs: dict[str, int] = defaultdict(int)
    for product, own in products:
        if own in RECIPES:
            macs[own] += product.macs
    alternative = recipe or max(macs, key=lambda name: macs[name], default="")
    if alternative:
        device.check_recipe(alternative)
    times = timed(products, device, table=table)
    return StepSpeed(
        device,
        tuple(times),
        total(times, device),
        tuple(advise(times, device, alternative, table=table)),
        (*step.notes, *_notes(times, device)),
    )


@dataclass(frozen=True)
class LayerRow:
    """A table row for layers that are alike.

    Attributes:
        shapes: tokens x in x out of their products.
        recipes: their recipe, or the recipes of their GEMMs.
        times: of all layers together; the interval is for one layer.
        gains_nothing: whether low precision takes at least as long as BF16.
        why: reasons for high precision, and how the mask of attention counts.
        measured_ms: measured time of their GEMMs and casts; None if unknown.
    """

    layers: tuple[str, ...]
    shapes: tuple[str, ...]
    recipes: str
    times: Total
    gains_nothing: bool
    why: tuple[str, ...]
    measured_ms: float | None


def layer_rows(speed: StepSpeed, measured: Mapping[str, float] | None = None) -> list[LayerRow]:
    """Return a row for each kind of layer, longest first; ``measured``: layer -> ms of its GEMMs and casts."""
    without_gain = layers_without_gain(speed.times)
    layers: dict[str, list[ProductTime]] = defaultdict(list)
    for time in speed.times:
        layers[time.layer].append(time)
    groups: dict[object, list[str]] = defaultdict(list)
    for name, times in layers.items():
        products = ((time, time.product) for time in times)
        kind = tuple(
            (t.gemm, p.backward, t.shape, p.calls, t.recipe, t.source, p.why, p.mask_share) for t, p in products
        )
        groups[form_of(name), kind].append(name)
    rows = []
    for names in groups.values():
        times, count = layers[names[0]], len(names)
        layer = total(times, speed.device)
        sums = {field: getattr(layer, field) * count for field in ("high_ms", "low_ms", "cast_ms", "unknown")}
        recipes = {time.recipe or "none" for time in times}
        of_trace = [(measured or {}).get(name) for name in names]
        rows.append(
            LayerRow(
                tuple(names),
                tuple(dict.fromkeys(time.sizes for time in times)),
                recipes.pop() if len(recipes) == 1 else ", ".join(f"{t.gemm} {t.recipe or 'none'}" for t in times),
                replace(layer, **sums),
                names[0] in without_gain,
                tuple(dict.fromkeys(why for time in times for why in _reasons(time))),
                None if None in of_trace else sum(filter(None, of_trace)),
            )
        )
    return sorted(rows, key=lambda row: -max(row.times.high_ms, row.times.low_ms))


def _reasons(time: ProductTime) -> Iterable[str]:
    if not time.recipe and time.product.why:
        yield time.product.why
    share = time.product.mask_share
    if time.product.family == "attention" and share != 1:
        yield "counted in full: mask unknown" if share is None else f"counted at {100 * share:.1f} %: causal mask"


def _notes(times: Sequence[ProductTime], device: Device) -> Iterable[str]:
    if not device.is_measured and any(time.is_low and time.source == "model" for time in times):
        yield (
            f"The constants were measured on {device.fitted.measured_on}, not on {device.title}, which widens the"
            " intervals. --calibrate measures on the GPU itself."
        )
    unknown = sum(math.isnan(time.low_ms) for time in times)
    if unknown:
        yield (
            f"The cost of {many(unknown, 'product')} in low precision is unknown: attention, products without a weight,"
            " or FP8 in an unknown recipe. No total includes them."
        )
    wide = sum(not time.recipe and time.product.precision not in ("bf16", "fp16", "") for time in times)
    if wide:
        yield f"{many(wide, 'product')} wider than 16 bits count as if in BF16; they take longer."
