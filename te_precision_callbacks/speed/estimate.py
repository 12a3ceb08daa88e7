"""Expected speed of a step: its products, their total, and advice.

Advice is ordered by the milliseconds it saves. Savings are estimated separately and do not add up: a layer kept in BF16
gains nothing from another recipe.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES
from te_precision_callbacks.coverage.coverage import REMEDIES, Coverage, Product, Reason
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
from te_precision_callbacks.layers.folding import fold_for_sentence, form_of
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.costs import pad_shape, shape_of
from te_precision_callbacks.speed.devices import Device, SpeedError
from te_precision_callbacks.speed.expected import (
    Interval,
    ProductTime,
    Total,
    layers_without_gain,
    time_products,
    total,
    with_recipes,
)

_LEAST_SHARE = 0.002
"""Share of the products' time below which advice is dropped."""

_FP8 = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8")
"""Recipes suggested in place of one another."""


@dataclass(frozen=True)
class Step:
    """A training step to estimate.

    Attributes:
        coverage: its products.
        recipes: layer -> its recipe; or one recipe for all layers.
        notes: limits of the estimate.
    """

    coverage: Coverage
    recipes: Mapping[str, str] | str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, coverage: Coverage, precision: Iterable[GemmPrecision]) -> Step:
        """Return the step of a session, from its coverage and ``precision``."""
        return cls(coverage, {gemm.layer: gemm.recipe for gemm in precision if gemm.recipe})


@dataclass(frozen=True)
class Advice:
    """A change that saves time.

    Attributes:
        text: the change.
        saves_ms: milliseconds saved per step.
        interval: the confidence interval of ``saves_ms``.
        patch: config sections that make the change; empty if a config cannot.
        note: limits of the estimate.
    """

    text: str
    saves_ms: float
    interval: Interval
    patch: str = ""
    note: str = ""


@dataclass(frozen=True)
class StepSpeed:
    """Expected speed of a step.

    Attributes:
        device: the device.
        times: the time of each product, in the order of the products.
        total: the time of all products together.
        advice: changes that save time, the largest saving first.
        notes: limits of these times.
    """

    device: Device
    times: tuple[ProductTime, ...]
    total: Total
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
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
    times = time_products(products, device, table=table)
    return StepSpeed(
        device,
        tuple(times),
        total(times, device),
        tuple(advise(times, device, alternative, table=table)),
        (*step.notes, *_notes(times, device)),
    )


def advise(
    times: Sequence[ProductTime], device: Device, alternative: str, *, table: Calibration | None
) -> list[Advice]:
    advice = [*_keep_high(times, device), *_other_recipe(times, device, table)]
    if alternative:
        advice += _use_low_precision(times, device, alternative, table)
    least = _LEAST_SHARE * sum(time.low_ms for time in times if not math.isnan(time.low_ms))
    return sorted((change for change in advice if change.saves_ms > least), key=lambda change: -change.saves_ms)


def _keep_high(times: Sequence[ProductTime], device: Device) -> Iterator[Advice]:
    layers = layers_without_gain(times)
    of_layers = [time for time in times if time.layer in layers and time.is_low]
    if not of_layers:
        return
    whole = total(of_layers, device)
    names = _layers_of(of_layers)
    them = "them"
    if len(names) == 1:
        them = "it"
    yield Advice(
        f"Keep {fold_for_sentence(*names, most=3)} in BF16",
        whole.low_ms - whole.high_ms,
        (whole.low_ms * (1 - whole.interval[1]), whole.low_ms * (1 - whole.interval[0])),
        keep_high(*names, others=set(_layers_of(times)) - set(names)),
        # docs/high-precision.md
        f"Low precision makes {them} slower. Estimated for te.autocast(enabled=False)"
        " around the layers in the model. To try it, use the config below; the cost of its debug path is not included",
    )


def _other_recipe(times: Sequence[ProductTime], device: Device, table: Calibration | None) -> Iterator[Advice]:
    scatter = device.fitted.scatter
    for old, before in group_by_key((time.recipe, time) for time in times if time.is_low).items():
        for new in _FP8:
            if new == old or old == "nvfp4":
                continue
            try:
                after = time_products([(time.product, new) for time in before], device, table=table)
            except SpeedError:  # not supported by the device
                continue
            old_ms, old_cast_ms = _low_and_cast_ms(before)
            new_ms, new_cast_ms = _low_and_cast_ms(after)
            saved = old_ms - new_ms
            # Errors of kernels cancel if both recipes have the same kernels; errors of casts do not.
            width = scatter.quantile * scatter.cast * math.hypot(old_cast_ms, new_cast_ms)
            if new == "mxfp8" or old in ("mxfp8", "fp8_block_scaling"):
                width = math.hypot(width, scatter.quantile * scatter.kernel * old_ms)
            yield Advice(
                f"Use {new} instead of {old}",
                saved,
                (saved - width, saved + width),
                note="Changes the numerics: compare the losses",
            )


def _layers_of(times: Iterable[ProductTime]) -> list[str]:
    return list(dict.fromkeys(time.layer for time in times))


def _low_and_cast_ms(times: Sequence[ProductTime]) -> tuple[float, float]:
    low_ms = 0.0
    cast_ms = 0.0
    for time in times:
        low_ms += time.low_ms
        cast_ms += time.cast_ms
    return low_ms, cast_ms


def _use_low_precision(
    times: Sequence[ProductTime], device: Device, recipe: str, table: Calibration | None
) -> Iterator[Advice]:
    in_high: dict[Reason, list[tuple[Product, str]]] = defaultdict(list)
    for time in times:
        reason = time.product.reason
        if reason is not None and reason in REMEDIES and not time.recipe and time.gemm in GEMMS:
            in_high[reason].append((time.product, recipe))
    for reason, products in in_high.items():
        in_low = time_products(products, device, table=table)
        without_gain = layers_without_gain(in_low)
        better = [time for time in in_low if time.layer not in without_gain]
        if not better:
            continue
        whole = total(better, device)
        names = _layers_of(better)
        refs = dict.fromkeys(time.product.reason_ref for time in better if time.product.reason_ref)
        subject = fold_for_sentence(*names, most=3)
        if refs:
            subject += f" ({' and '.join(refs)})"
        low, high = whole.interval
        yield Advice(
            f"{subject}: {REMEDIES[reason]}{_padding(better, recipe, device)}",
            whole.high_ms - whole.low_ms,
            (whole.high_ms * (1 - 1 / low), whole.high_ms * (1 - 1 / high)),
            note=f"Estimated for {recipe}",
        )


def _padding(times: Iterable[ProductTime], recipe: str, device: Device) -> str:
    sizes: dict[str, None] = {}
    for time in times:
        shape = shape_of(time.product)
        filled = pad_shape(shape, recipe, device.capability)
        for size, padded in zip(shape[:3], filled[:3], strict=True):
            if size != padded:
                sizes[f"{size} to {padded}"] = None
    if sizes:
        return f", padded from {', '.join(sizes)}"
    return ""


@dataclass(frozen=True)
class LayerRow:
    """A table row for layers with the same shapes, recipes and reasons.

    Attributes:
        shapes: tokens x in x out of their products.
        recipes: their recipe, or the recipes of their GEMMs.
        times: of all layers together; the interval is for one layer.
        gains_nothing: whether low precision takes at least as long as BF16.
        why: reasons for high precision, and the treatment of attention masks.
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
    layers = group_by_key((time.layer, time) for time in speed.times)
    groups: dict[object, list[str]] = defaultdict(list)
    for name, times in layers.items():
        kind = []
        for t in times:
            p = t.product
            kind.append((t.gemm, p.backward, t.shape, p.calls, t.recipe, t.source, p.why, p.mask_share))
        groups[form_of(name), tuple(kind)].append(name)
    rows = []
    for names in groups.values():
        times = layers[names[0]]
        count = len(names)
        layer = total(times, speed.device)
        sums = {field: getattr(layer, field) * count for field in ("high_ms", "low_ms", "cast_ms", "unknown")}
        recipes = times[0].recipe or "none"
        if any(time.recipe != times[0].recipe for time in times):
            recipes = ", ".join(f"{time.gemm} {time.recipe or 'none'}" for time in times)
        measured_ms = None
        if measured is not None and measured.keys() >= set(names):
            measured_ms = sum(map(measured.__getitem__, names))
        rows.append(
            LayerRow(
                tuple(names),
                tuple(dict.fromkeys(time.sizes for time in times)),
                recipes,
                replace(layer, **sums),
                names[0] in without_gain,
                tuple(dict.fromkeys(chain(*map(_reasons, times)))),
                measured_ms,
            )
        )
    return sorted(rows, key=lambda row: -max(row.times.high_ms, row.times.low_ms))


def _reasons(time: ProductTime) -> Iterable[str]:
    if not time.recipe and time.product.why:
        yield time.product.why
    share = time.product.mask_share
    if time.product.family != "attention":
        return
    if share is None:
        yield "counted in full: mask unknown"
    elif share != 1:
        yield f"counted at {100 * share:.1f} %: causal mask"


def _notes(times: Sequence[ProductTime], device: Device) -> Iterable[str]:
    unknown = 0
    wide = 0
    has_modeled = False
    for time in times:
        unknown += math.isnan(time.low_ms)
        wide += not time.recipe and time.product.precision not in ("bf16", "fp16", "")
        has_modeled |= time.is_low and time.source == "model"
    if has_modeled and not device.is_measured:
        yield (
            f"The constants of the cost model were measured on {device.fitted.measured_on}, not on {device.title}, so"
            " the intervals are wider. Use --calibrate to measure on the GPU itself."
        )
    if unknown:
        yield (
            f"The cost of {many(unknown, 'product')} in low precision is unknown (attention, products without a"
            " weight, or an unknown FP8 recipe) and not in the totals."
        )
    if wide:
        yield f"{many(wide, 'product')} in FP32 or FP64: timed as BF16, but slower."
