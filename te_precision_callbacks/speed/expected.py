"""Expected times of products, in BF16 and as they run, with a confidence interval of the speed-up.

The input, the weight and the gradient of a layer are cast once for its three GEMMs, in the directions that its GEMMs in
low precision read: the weight once per optimizer step, as with ``is_first_microbatch``, the others once per
micro-batch. The time of a cast is added to the first GEMM that reads it: fprop for the input and the weight, dgrad for
the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.numerics.gemm_shapes import layer_sizes
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.calibration import Calibration, cast_key, gemm_key, high_key
from te_precision_callbacks.speed.costs import (
    Shape,
    cast_ms,
    cast_users,
    gemm_ms,
    operand_sizes,
    shape_of,
)
from te_precision_callbacks.speed.devices import HIGH, Device

Source = Literal["model", "calibrated"]
"""Origin of a time: the cost model, or a table of times measured for the same shapes."""

Verdict = Literal["faster", "slower", "not resolved", "unknown"]

Interval: TypeAlias = tuple[float, float]

_NORMAL = 1.96

_UNKNOWN_INTERVAL = math.nan, math.nan

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Times:
    """Times of one or more products, in milliseconds per step.

    Attributes:
        high_ms: the time in BF16.
        low_ms: the time in the actual precision, BF16 for products in high precision; nan if unknown.
        cast_ms: the part of ``low_ms`` spent in casts and their launches.
        interval: the confidence interval of the speed-up; (nan, nan) if unknown.
        source: the origin of the times.
    """

    high_ms: float
    low_ms: float
    cast_ms: float
    interval: Interval
    source: Source

    @property
    def speedup(self) -> float:
        if self.low_ms:
            return self.high_ms / self.low_ms
        return math.nan

    @property
    def verdict(self) -> Verdict:
        """The result for low precision: ``not resolved`` if the interval includes 1."""
        low, high = self.interval
        if math.isnan(low):
            return "unknown"
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "not resolved"

    def figures(self) -> dict[str, object]:
        low, high = self.interval
        figures: dict[str, object] = {
            "high_ms": self.high_ms,
            "low_ms": self.low_ms,
            "cast_ms": self.cast_ms,
            "speedup": self.speedup,
            "speedup_low": low,
            "speedup_high": high,
            "source": self.source,
        }
        for name, value in figures.items():
            if value != value:  # nan
                figures[name] = None
        return figures


@dataclass(frozen=True)
class ProductTime(Times):
    """Expected time of a product in a step, over its calls.

    Attributes:
        product: the product.
        recipe: its recipe; empty for high precision, :data:`UNKNOWN` if unknown.
    """

    product: Product
    recipe: str

    @property
    def is_low(self) -> bool:
        """Return whether the product runs in low precision at a known cost."""
        return bool(self.recipe) and not math.isnan(self.low_ms)

    @property
    def layer(self) -> str:
        return self.product.layer

    @property
    def gemm(self) -> str:
        return self.product.gemm

    @property
    def shape(self) -> Shape:
        return shape_of(self.product)

    @property
    def sizes(self) -> str:
        """The sizes of the layer, tokens x in x out, which its three GEMMs share."""
        product = self.product
        return str(Shape(*layer_sizes(product.gemm, product.n, product.m, product.k), product.batch))

    def as_json(self) -> dict[str, object]:
        names = {"layer": self.layer, "gemm": self.gemm, "m": self.shape.m, "n": self.shape.n, "k": self.shape.k}
        figures = self.figures()
        if not self.is_low:
            figures |= {"low_ms": None, "cast_ms": None, "speedup": None}
        return {**names, "recipe": self.recipe or None, **figures}


@dataclass(frozen=True)
class Total(Times):
    """Time of several products. A product in high precision adds its time in BF16 to both sums.

    Attributes:
        unknown: the number of products in low precision of unknown cost, which are not included.
        known: the number of all other products.
        is_low: whether any known product runs in low precision.
    """

    unknown: int = 0
    known: int = 0
    is_low: bool = False


def recipe_of_product(product: Product, given: str) -> str:
    """Return the recipe of a product: one of :data:`RECIPES`; empty in high precision.

    It follows from the operands' formats, except for FP8 with one scale: then it is the layer's, ``given``, or
    :data:`UNKNOWN`.
    """
    if not product.is_low:
        return ""
    recipe_of_layer, *names = (text.rpartition("->")[2].strip() for text in (given, *product.operands.values()))
    if recipe_of_layer in RECIPES:
        return recipe_of_layer
    for recipe in ("mxfp8", "nvfp4", "fp8_block_scaling"):
        if all(name.startswith(RECIPES[recipe].format) for name in names):
            return recipe
    return UNKNOWN


def with_recipes(products: Iterable[Product], recipes: Mapping[str, str] | str) -> list[tuple[Product, str]]:
    """Return the products that take time, and the recipe of each.

    ``recipes``: layer -> its recipe, or one recipe for all layers; needed for FP8 with one scale.
    """
    timed = []
    for product in products:
        if product.macs and product.gemm != "lookup":
            recipe = recipes
            if not isinstance(recipe, str):
                recipe = recipe.get(product.layer, "")
            timed.append((product, recipe_of_product(product, recipe)))
    return timed


def time_products(
    products: Iterable[tuple[Product, str]], device: Device, *, table: Calibration | None = None
) -> list[ProductTime]:
    """Return the expected times of products, grouped by layer; raises SpeedError for a recipe that the device does not
    run.

    Times of ``table`` take precedence over the model's.
    """
    layers = group_by_key((product.layer, (product, recipe)) for product, recipe in products)
    cache: dict[object, list[ProductTime]] = {}  # many layers have equal products
    times: list[ProductTime] = []
    for layer in layers.values():
        kind = tuple(
            (p.gemm, p.family, p.n, p.m, p.k, p.batch, p.calls, p.macs, p.mask_share, recipe) for p, recipe in layer
        )
        if kind not in cache:
            casts = _casts_of_layer(layer, device, table)
            cache[kind] = [_time_of(p, recipe, *casts.get(p.gemm, (0.0, 0.0)), device, table) for p, recipe in layer]
        for time, (product, _) in zip(cache[kind], layer, strict=True):
            times.append(replace(time, product=product))
    return times


def layers_without_gain(times: Iterable[ProductTime]) -> set[str]:
    added: dict[str, float] = defaultdict(float)
    for time in times:
        if time.is_low:
            added[time.layer] += time.low_ms - time.high_ms
    return {layer for layer, ms in added.items() if ms >= 0}


def _time_of(
    product: Product,
    recipe: str,
    modeled_casts: float,
    measured_casts: float | None,
    device: Device,
    table: Calibration | None,
) -> ProductTime:
    shape = shape_of(product)
    count = _calls_of(product)
    measured = {}
    if table is not None:
        measured = table.times
    measured_high = measured.get(high_key(shape))
    measured_low = measured.get(gemm_key(shape, recipe))
    if product.family == "attention":
        # Fused kernels keep the scores on the chip, so only operations take time.
        model_ms = shape.operations / (device.bf16_tflops * 1e9 * device.fitted.kernel[HIGH])
        if product.mask_share is not None:
            model_ms *= product.mask_share
    else:
        model_ms = gemm_ms(shape, "", device)
    high = model_ms * count
    source: Source = "model"
    if measured_high is not None:
        high = measured_high.ms * count
        source = "calibrated"
    if not recipe:
        return ProductTime(high, high, 0.0, _UNKNOWN_INTERVAL, source, product, recipe)
    if recipe == UNKNOWN or product.gemm not in GEMMS:
        return ProductTime(high, math.nan, 0.0, _UNKNOWN_INTERVAL, "model", product, UNKNOWN)
    device.check_recipe(recipe)
    if measured_high is not None and measured_low is not None and measured_casts is not None:
        low = measured_low.ms * count + measured_casts
        interval = _interval_around(high / low, _NORMAL * math.hypot(measured_high.spread, measured_low.spread))
        return ProductTime(high, low, measured_casts, interval, "calibrated", product, recipe)
    kernels = gemm_ms(shape, recipe, device) * count
    high, low = model_ms * count, kernels + modeled_casts  # both sides from one source
    interval = speedup_interval(high, low, [(high, kernels, modeled_casts)], device)
    return ProductTime(high, low, modeled_casts, interval, "model", product, recipe)


def _calls_of(product: Product) -> float:
    """Return the calls in a step, in units of the largest call, since other calls may be smaller."""
    return product.macs / max(1, product.n * product.m * product.k * product.batch)


def _casts_of_layer(
    layer: Iterable[tuple[Product, str]], device: Device, table: Calibration | None
) -> dict[str, tuple[float, float | None]]:
    products: dict[str, Product] = {}
    recipes: dict[str, str] = {}
    for product, recipe in layer:
        if recipe in RECIPES and product.gemm in GEMMS:
            products[product.gemm] = product
            recipes[product.gemm] = recipe
    casts: dict[str, tuple[float, float | None]] = {}
    for operand, first, directions in cast_users(recipes):
        product = products[first]
        recipe = recipes[first]
        device.check_recipe(recipe)
        rows, columns = operand_sizes(operand, first, shape_of(product))
        calls = 1.0
        if operand != "weight":
            calls = _calls_of(product)
        elements = rows * columns * product.batch
        expected = cast_ms(recipe, operand, elements, device, rowwise=directions[0], columnwise=directions[1])
        time = None
        if table is not None:
            time = table.times.get(cast_key(recipe, operand, rows, columns, directions))
        modeled, measured = casts.get(first, (0.0, 0.0))
        if time is None or measured is None:
            measured = None
        else:
            measured += time.ms * calls
        casts[first] = modeled + expected * calls, measured
    return casts


def speedup_interval(
    high: float, low: float, parts: Iterable[Sequence[float]], device: Device, *, measured: float = 0.0
) -> Interval:
    """Return the confidence interval of a speed-up, from the scatter of published times around the model.

    Errors of kernels and casts are relative, and independent between parts; each run adds an error, and so do constants
    from another device. The interval is symmetric in the logarithm.

    Args:
        high, low: the time in BF16 and in the actual precision, in milliseconds.
        parts: for products with independent errors: time in BF16, of the kernel in low precision, and of the casts.
        measured: the variance of measured times that ``low`` includes, in square milliseconds.
    """
    scatter = device.fitted.scatter
    of_parts = 0.0
    for high_part, kernel, cast in parts:
        kernels = (scatter.kernel * high_part / high) ** 2 + (scatter.kernel * kernel / low) ** 2
        of_parts += kernels + (scatter.cast * cast / low) ** 2
    variance = measured / low**2 + of_parts + 2 * scatter.run**2
    if not device.is_measured:
        variance += scatter.transfer**2
    return _interval_around(high / low, scatter.quantile * math.sqrt(variance))


def _interval_around(speedup: float, width: float) -> Interval:
    return speedup * math.exp(-width), speedup * math.exp(width)


def total(times: Iterable[ProductTime], device: Device) -> Total:
    """Return the total time of several products, without products of unknown cost.

    Errors of the model are assumed equal for products of one shape and recipe, and otherwise independent.
    """
    high = 0.0
    low = 0.0
    casts = 0.0
    unknown = 0
    known = 0
    in_low = 0
    parts: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    measured = 0.0
    for time in times:
        if math.isnan(time.low_ms):
            unknown += 1
            continue
        known += 1
        high += time.high_ms
        low += time.low_ms
        casts += time.cast_ms
        if not time.is_low:
            continue
        in_low += 1
        if time.source == "calibrated":
            measured += (time.low_ms * math.log(time.interval[1] / time.interval[0]) / 2 / _NORMAL) ** 2
        else:
            part = parts[time.shape, time.recipe]
            part[:] = part[0] + time.high_ms, part[1] + time.low_ms - time.cast_ms, part[2] + time.cast_ms
    source: Source = "model"
    if parts:
        interval = speedup_interval(high, low, parts.values(), device, measured=measured)
    elif in_low:
        interval = _interval_around(high / low, _NORMAL * math.sqrt(measured) / low)
        source = "calibrated"
    elif known:
        interval = (1.0, 1.0)
    else:
        interval = _UNKNOWN_INTERVAL
    return Total(high, low, casts, interval, source, unknown, known, bool(in_low))
