"""Advice for speed, ordered by the milliseconds it saves.

Each saving is estimated alone, so savings do not add up: a layer kept in BF16 gains nothing from another recipe.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import REMEDIES, Product, Reason
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.costs import padded, shape_of
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import SpeedError
from te_precision_callbacks.speed.expected import Interval, ProductTime, layers_without_gain, timed, total

_LEAST_SHARE = 0.002
"""Share of the products' time below which advice is dropped."""

_FP8 = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8")
"""Recipes suggested in place of one another."""


@dataclass(frozen=True)
class Advice:
    """A change that saves time.

    Attributes:
        text: the change.
        saves_ms: milliseconds saved per step.
        interval: the confidence interval of ``saves_ms``.
        patch: config sections that make the change; empty where a config cannot.
        note: limits of the estimate.
    """

    text: str
    saves_ms: float
    interval: Interval
    patch: str = ""
    note: str = ""


def advise(
    times: Sequence[ProductTime], device: Device, alternative: str, *, table: Calibration | None = None
) -> list[Advice]:
    advice = [*_keep_high(times, device), *_other_recipe(times, device, table)]
    if alternative:
        advice += _low_instead(times, device, alternative, table)
    least = _LEAST_SHARE * sum(time.low_ms for time in times if not math.isnan(time.low_ms))
    return sorted((change for change in advice if change.saves_ms > least), key=lambda change: -change.saves_ms)


def _keep_high(times: Sequence[ProductTime], device: Device) -> Iterator[Advice]:
    layers = layers_without_gain(times)
    of_layers = [time for time in times if time.layer in layers and time.is_low]
    if not of_layers:
        return
    whole = total(of_layers, device)
    names = list(dict.fromkeys(time.layer for time in of_layers))
    yield Advice(
        f"keep {in_sentence(*names, most=3)} in BF16: low precision makes it slower",
        whole.low_ms - whole.high_ms,
        (whole.low_ms * (1 - whole.interval[1]), whole.low_ms * (1 - whole.interval[0])),
        keep_high(*names, others={time.layer for time in times} - set(names)),
        # docs/high-precision.md
        "estimated for te.autocast(enabled=False) around them in the model; this config, for a trial, puts their"
        " modules on Transformer Engine's debug path, whose cost on a GPU is not measured",
    )


def _other_recipe(times: Sequence[ProductTime], device: Device, table: Calibration | None) -> Iterator[Advice]:
    scatter = device.fitted.scatter
    of_recipe: dict[str, list[ProductTime]] = defaultdict(list)
    for time in times:
        if time.is_low:
            of_recipe[time.recipe].append(time)
    for old, before in of_recipe.items():
        for new in _FP8:
            if new == old or old == "nvfp4":
                continue
            try:
                after = timed([(time.product, new) for time in before], device, table=table)
            except SpeedError:  # not supported by the device
                continue
            saved = sum(time.low_ms for time in before) - sum(time.low_ms for time in after)
            # Errors of kernels cancel where both recipes have the same kernels; errors of casts do not.
            casts = math.hypot(sum(time.cast_ms for time in before), sum(time.cast_ms for time in after))
            width = scatter.quantile * scatter.cast * casts
            if new == "mxfp8" or old in ("mxfp8", "fp8_block_scaling"):
                width = math.hypot(width, scatter.quantile * scatter.kernel * sum(time.low_ms for time in before))
            note = "changes the numerics: compare the losses"
            yield Advice(f"{new} instead of {old}", saved, (saved - width, saved + width), note=note)


def _low_instead(
    times: Sequence[ProductTime], device: Device, recipe: str, table: Calibration | None
) -> Iterator[Advice]:
    of_reason: dict[Reason, list[Product]] = defaultdict(list)
    for time in times:
        reason = time.product.reason
        if not time.recipe and time.gemm in GEMMS and reason is not None and reason in REMEDIES:
            of_reason[reason].append(time.product)
    for reason, products in of_reason.items():
        in_low = timed([(product, recipe) for product in products], device, table=table)
        without_gain = layers_without_gain(in_low)
        better = [time for time in in_low if time.layer not in without_gain]
        if not better:
            continue
        whole = total(better, device)
        names = list(dict.fromkeys(time.layer for time in better))
        refs = dict.fromkeys(time.product.reason_ref for time in better if time.product.reason_ref)
        named = in_sentence(*names, most=3) + (f" ({' and '.join(refs)})" if refs else "")
        low, high = whole.interval
        yield Advice(
            f"{named}: {REMEDIES[reason]}{_padding(better, recipe, device)}",
            whole.high_ms - whole.low_ms,
            (whole.high_ms * (1 - 1 / low), whole.high_ms * (1 - 1 / high)),
            note=f"in {recipe}",
        )


def _padding(times: Iterable[ProductTime], recipe: str, device: Device) -> str:
    sizes: dict[str, None] = {}
    for time in times:
        shape = shape_of(time.product)
        filled = padded(shape, recipe, device.capability)
        sizes |= {f"{a} to {b}": None for a, b in zip(shape[:3], filled[:3], strict=True) if a != b}
    return f", padded from {', '.join(sizes)}" if sizes else ""
