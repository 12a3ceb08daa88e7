"""Expected times of GEMMs, in BF16 and as they run, with a confidence interval of the speed-up.

The input, the weight and the gradient of a layer are cast once for its three GEMMs, in the directions that its GEMMs in
low precision read: the weight once per optimizer step, as with ``is_first_microbatch``, the others once per
micro-batch. The time of a cast is added to the first GEMM that reads it: fprop for the input and the weight, dgrad for
the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import (
    COLUMNWISE,
    GEMMS,
    ONE_SCALE,
    OPERANDS,
    RECIPES,
    ROWWISE,
    OperandName,
)
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.costs import CastTime, Shape, cast_time, gemm_ms
from te_precision_callbacks.speed.devices import Device

Interval: TypeAlias = tuple[float, float]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Times:
    """Expected times of one or more GEMMs, in milliseconds per step.

    Attributes:
        high_ms: in BF16.
        gemm_ms: in their actual precision, without casts; nan if unknown.
        cast_ms: the casts of their operands, with launches.
        launch_ms: the launches of these casts.
        interval: the 95 % confidence interval of the speed-up; (nan, nan) without a GEMM in low precision.
    """

    high_ms: float
    gemm_ms: float
    cast_ms: float
    launch_ms: float
    interval: Interval

    @property
    def low_ms(self) -> float:
        return self.gemm_ms + self.cast_ms

    @property
    def speedup(self) -> float:
        return self.high_ms / self.low_ms if self.low_ms else math.nan

    @property
    def is_low(self) -> bool:
        return not math.isnan(self.interval[0])

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower``; ``not resolved`` if the interval includes 1; empty in high precision."""
        low, high = self.interval
        if not self.is_low:
            return ""
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "not resolved"

    @property
    def why_no_gain(self) -> str:
        """The reason for no gain from low precision; empty with a gain, and in high precision."""
        saved = self.high_ms - self.gemm_ms
        if not self.is_low or self.cast_ms < saved:
            return ""
        if saved <= 0:
            return "too small: the GEMMs take as long as in BF16"
        if self.launch_ms >= saved:
            return "launch-bound: the launches of the casts take longer than the GEMMs save"
        return "too small: the casts take longer than the GEMMs save"

    def figures(self) -> dict[str, float | None]:
        low, high = self.interval
        figures = {
            "high_ms": self.high_ms,
            "low_ms": self.low_ms,
            "cast_ms": self.cast_ms,
            "speedup": self.speedup,
            "speedup_low": low,
            "speedup_high": high,
        }
        return {name: None if math.isnan(value) else value for name, value in figures.items()}


@dataclass(frozen=True)
class ProductTime(Times):
    """Expected time of a GEMM in a step, over its calls.

    Attributes:
        product: the GEMM.
        recipe: its recipe; empty for high precision, :data:`UNKNOWN` if unknown.
    """

    product: Product
    recipe: str

    @property
    def layer(self) -> str:
        return self.product.layer

    @property
    def shape(self) -> Shape:
        return shape_of(self.product)


def shape_of(product: Product) -> Shape:
    """Return the shape of a product; m are the rows of the result, which ``Product`` calls n."""
    return Shape(product.n, product.k, product.m, product.batch)


def with_recipes(products: Iterable[Product], recipe_of_layers: str) -> list[tuple[Product, str]]:
    """Return the GEMMs that take time, and the recipe of each: empty in high precision, or :data:`UNKNOWN`.

    The recipe follows from the operands' formats, except for FP8 with one scale: then it is ``recipe_of_layers``.
    """
    timed = []
    for product in products:
        if not product.macs or product.gemm not in GEMMS:
            continue
        recipe = ""
        if product.is_low:
            recipe = recipe_of_layers if recipe_of_layers in RECIPES else UNKNOWN
            for name in ("mxfp8", "nvfp4", "fp8_block_scaling"):
                formats = (text.rpartition("->")[2].strip() for text in product.operands.values())
                if all(text.startswith(RECIPES[name].format) for text in formats):
                    recipe = name
        timed.append((product, recipe))
    return timed


def time_products(products: Iterable[tuple[Product, str]], device: Device) -> list[ProductTime]:
    """Return the expected times of GEMMs with their recipes, grouped by layer.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    times = []
    for gemms in group_by_key((product.layer, (product, recipe)) for product, recipe in products).values():
        casts = _casts_of_layer(gemms, device)
        for product, recipe in gemms:
            shape = shape_of(product)
            calls = _calls_of(product)
            high = gemm_ms(shape, "", device) * calls
            low = high
            cast = casts.get(product.gemm, CastTime(0.0, 0.0))
            interval = math.nan, math.nan
            if recipe == UNKNOWN:
                low = math.nan
            elif recipe:
                low = gemm_ms(shape, recipe, device) * calls
                interval = speedup_interval(high, low + cast.ms, [(high, low, cast.ms)], device)
            times.append(ProductTime(high, low, *cast, interval, product, recipe))
    return times


def _calls_of(product: Product) -> float:
    """Return the calls in a step, in units of the largest call, since other calls may be smaller."""
    return product.macs / (product.n * product.m * product.k * product.batch)


def _casts_of_layer(gemms: Iterable[tuple[Product, str]], device: Device) -> dict[str, CastTime]:
    """Return the time of the casts that each GEMM pays for.

    Transformer Engine always casts a gradient, and an operand with one scale, rowwise.
    """
    low = {product.gemm: (product, recipe) for product, recipe in gemms if recipe in RECIPES}
    casts: dict[str, CastTime] = {}
    operand: OperandName
    for operand in get_args(OperandName):
        readers = [gemm for gemm in (ROWWISE[operand], COLUMNWISE[operand]) if gemm in low]
        if not readers:
            continue
        first = readers[0]
        product, recipe = low[first]
        shape = shape_of(product)
        elements = shape.m * shape.k if operand == OPERANDS[first][0] else shape.k * shape.n
        cast = cast_time(
            recipe,
            operand,
            elements * shape.batch,
            device,
            rowwise=ROWWISE[operand] in low or operand == "gradient" or recipe in ONE_SCALE,
            columnwise=COLUMNWISE[operand] in low,
        )
        calls = 1.0 if operand == "weight" else _calls_of(product)
        ms, launch_ms = casts.get(first, (0.0, 0.0))
        casts[first] = CastTime(ms + cast.ms * calls, launch_ms + cast.launch_ms * calls)
    return casts


def speedup_interval(high: float, low: float, parts: Iterable[Sequence[float]], device: Device) -> Interval:
    """Return the confidence interval of a speed-up, from the scatter of published times around the model.

    Errors of kernels and casts are relative, and independent between parts; each run adds an error, and so do constants
    from another device. The interval is symmetric in the logarithm.

    Args:
        high, low: the time in BF16 and in the actual precision, in milliseconds.
        parts: for GEMMs with independent errors: time in BF16, of the kernel in low precision, and of the casts.
    """
    scatter = device.constants.scatter
    variance = 2 * scatter.run**2
    for high_part, kernel, cast in parts:
        variance += (scatter.kernel * high_part / high) ** 2 + (scatter.kernel * kernel / low) ** 2
        variance += (scatter.cast * cast / low) ** 2
    if not device.is_measured:
        variance += scatter.transfer**2
    width = scatter.quantile * math.sqrt(variance)
    return high / low * math.exp(-width), high / low * math.exp(width)


def total(times: Iterable[ProductTime], device: Device) -> Times:
    """Return the total time of several GEMMs.

    A GEMM in high precision adds its time in BF16 to both sums. Errors of the model are assumed equal for GEMMs of one
    shape and recipe, and otherwise independent.
    """
    high = low = casts = launches = 0.0
    parts: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for time in times:
        high += time.high_ms
        low += time.gemm_ms
        casts += time.cast_ms
        launches += time.launch_ms
        if time.is_low:
            part = parts[time.shape, time.recipe]
            part[:] = part[0] + time.high_ms, part[1] + time.gemm_ms, part[2] + time.cast_ms
    interval = math.nan, math.nan
    if parts:
        interval = speedup_interval(high, low + casts, parts.values(), device)
    return Times(high, low, casts, launches, interval)
