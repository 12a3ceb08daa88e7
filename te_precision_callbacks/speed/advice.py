"""Advice for speed, in the order of the milliseconds that it saves.

    for advice in estimate_step(step, device).advice:
        advice.text, advice.saves_ms, advice.interval, advice.patch

Each advice is priced by the same model as the step, with only what it changes changed. Two of them may not add up: a
layer that is kept in BF16 gains nothing from another recipe. Advice that costs time, or that changes numerics to a
narrower format, is not given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.costs import padded, shape_of
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import SpeedError
from te_precision_callbacks.speed.expected import Interval, ProductTime, layers_without_gain, timed, total

_LEAST_SHARE = 0.002
"""What saves less than this share of the products' time is not worth a line."""

_FP8 = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8")
"""Recipes that are advised instead of one another: of FP8, and with kernels of their own on the device."""

_REMEDY: Mapping[Reason, str] = {
    Reason.NOT_TE: "make {layers} Transformer Engine layers, such as te.Linear",
    Reason.NOT_CONVERTED: "let the trainer's conversion take {layers}",
    Reason.NO_AUTOCAST: "run {layers} inside of te.autocast",
    Reason.RECOMPUTED: "recompute {layers} inside of te.autocast: use te.checkpoint",
    Reason.SECTION: "let {layers} run in low precision again: kept in high precision by {by}",
    Reason.BACKWARD_OVERRIDE: "leave out backward_override, which keeps the backward of {layers} in high precision",
    Reason.ENVIRONMENT: "unset the environment variable that keeps {layers} in high precision",
}
"""The reasons of high precision that somebody can change -> what to do."""


@dataclass(frozen=True)
class Advice:
    """Something to do.

    Attributes:
        text: what.
        saves_ms: the milliseconds of a step that it saves.
        interval: the interval of 95 % of that.
        patch: the sections of a config that do it; empty where no config can.
        note: what limits the figure.
    """

    text: str
    saves_ms: float
    interval: Interval
    patch: str = ""
    note: str = ""


def advise(
    times: Sequence[ProductTime], device: Device, alternative: str, *, table: Calibration | None = None
) -> list[Advice]:
    """Return what to do, the largest saving first.

    Args:
        times: those of the step.
        device: the device.
        alternative: the recipe that layers in high precision could run in; empty for none.
        table: measured times.
    """
    found = [*_keep_high(times, device), *_other_recipe(times, device, table), *_one_micro_batch(times, device, table)]
    if alternative:
        found += _low_instead(times, device, alternative, table)
    worthwhile = [one for one in found if one.saves_ms > _LEAST_SHARE * _sum(times)]
    return sorted(worthwhile, key=lambda one: -one.saves_ms)


def _keep_high(times: Sequence[ProductTime], device: Device) -> Iterator[Advice]:
    """Advise for layers that low precision makes slower."""
    layers = layers_without_gain(times)
    of_layers = [one for one in times if one.layer in layers and one.cost is not None]
    if not of_layers:
        return
    whole = total(of_layers, device)
    names = list(dict.fromkeys(one.layer for one in of_layers))
    yield Advice(
        f"keep {in_sentence(*names, most=3)} in BF16: low precision makes it slower",
        whole.low_ms - whole.high_ms,
        (whole.low_ms * (1 - whole.interval[1]), whole.low_ms * (1 - whole.interval[0])),
        keep_high(*names, others={one.layer for one in times} - set(names)),
        # docs/high-precision.md
        "the figure is for te.autocast(enabled=False) around them in the model; this config, for a trial, takes their"
        " modules to Transformer Engine's debug path, whose time on a GPU is not measured",
    )


def _other_recipe(times: Sequence[ProductTime], device: Device, table: Calibration | None) -> Iterator[Advice]:
    """Advise another recipe of FP8."""
    scatter = device.fitted.scatter
    of_recipe: dict[str, list[ProductTime]] = defaultdict(list)
    for one in times:
        if one.cost is not None:
            of_recipe[one.recipe].append(one)
    for old, before in of_recipe.items():
        for new in _FP8:
            if new == old or old == "nvfp4":
                continue
            try:
                after = timed([(one.product, new) for one in before], device, table=table)
            except SpeedError:  # the device does not run it
                continue
            saved = sum(one.low_ms for one in before) - sum(one.low_ms for one in after)
            # The kernels' errors are common to both where both have the same kernels; those of casts are not.
            casts = math.hypot(sum(one.cast_ms for one in before), sum(one.cast_ms for one in after))
            width = scatter.quantile * scatter.cast * casts
            if new == "mxfp8" or old in ("mxfp8", "fp8_block_scaling"):
                width = math.hypot(width, scatter.quantile * scatter.kernel * sum(one.low_ms for one in before))
            note = "changes the numerics: compare the losses"
            yield Advice(f"{new} instead of {old}", saved, (saved - width, saved + width), note=note)


def _one_micro_batch(times: Sequence[ProductTime], device: Device, table: Calibration | None) -> Iterator[Advice]:
    """Advise all micro-batches of a step in one."""
    products = [one.product for one in times]
    calls = {p.calls for p in products if p.family in ("te", "te_ops") and p.gemm == "fprop"}
    count = min(calls, default=1)
    if count < 2:
        return
    merged = []
    for product in products:
        if product.gemm == "wgrad":
            product = replace(product, k=product.k * count, calls=product.calls // count)
        elif product.gemm in GEMMS:
            product = replace(product, n=product.n * count, calls=product.calls // count)
        merged.append(product)
    recipes = [one.recipe for one in times]
    saved = _sum(times) - _sum(timed(zip(merged, recipes, strict=True), device, table=table))
    launches = sum(one.cost.launch_ms for one in times if one.cost is not None)
    width = device.fitted.scatter.quantile * device.fitted.scatter.cast * launches
    note = "needs the memory of all their activations; what kernels gain from larger shapes is not counted"
    yield Advice(f"{count} micro-batches in one", saved, (saved - width, saved + width), note=note)


def _low_instead(
    times: Sequence[ProductTime], device: Device, recipe: str, table: Calibration | None
) -> Iterator[Advice]:
    """Advise for layers in high precision for a reason that can be changed."""
    of_reason: dict[Reason, list[Product]] = defaultdict(list)
    for one in times:
        reason = one.product.reason
        if not one.recipe and one.gemm in GEMMS and reason is not None and reason in _REMEDY:
            of_reason[reason].append(one.product)
    for reason, products in of_reason.items():
        in_low = timed([(product, recipe) for product in products], device, table=table)
        gains: dict[str, float] = defaultdict(float)
        for one in in_low:
            gains[one.layer] += one.high_ms - one.low_ms
        better = [one for one in in_low if gains[one.layer] > 0]
        if not better:
            continue
        whole = total(better, device)
        names = list(dict.fromkeys(one.layer for one in better))
        refs = dict.fromkeys(one.product.reason_ref for one in better if one.product.reason_ref)
        by = " and ".join(refs) or "a section of the config"
        low, high = whole.interval
        yield Advice(
            _REMEDY[reason].format(layers=in_sentence(*names, most=3), by=by) + _padding(better, recipe, device),
            whole.high_ms - whole.low_ms,
            (whole.high_ms * (1 - 1 / low), whole.high_ms * (1 - 1 / high)),
            note=f"in {recipe}",
        )


def _padding(times: Iterable[ProductTime], recipe: str, device: Device) -> str:
    """Return the dimensions that have to be padded for a recipe."""
    found: dict[str, None] = {}
    for one in times:
        shape = shape_of(one.product)
        filled = padded(shape, recipe, device.capability)
        found |= {f"{a} to {b}": None for a, b in zip(shape[:3], filled[:3], strict=True) if a != b}
    return f", padded from {', '.join(found)}" if found else ""


def _sum(times: Iterable[ProductTime]) -> float:
    return sum(one.low_ms for one in times if not math.isnan(one.low_ms))
