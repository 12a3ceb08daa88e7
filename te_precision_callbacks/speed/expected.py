"""Expected times of products: in BF16, and as they run, with an interval for the speed-up.

    times = expected(products, recipes, device)            # of a plan or a run
    for one in times:
        one.layer, one.gemm, one.high_ms, one.low_ms, one.speedup, one.interval, one.verdict
    total(times, device).speedup

The input, the weight and the gradient of a layer are cast once for its three GEMMs, each in the directions that its
GEMMs in low precision read; the weight once an optimizer step, as with ``is_first_microbatch``, and the others in each
micro-batch. A cast counts with the first GEMM that reads it: the input and the weight with fprop, the gradient with
dgrad.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from te_precision_callbacks.base.numerics.gemm_shapes import layer_sizes
from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, RECIPES, GemmName
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.speed.calibration import Calibration, cast_key, gemm_key, high_key
from te_precision_callbacks.speed.costs import (
    Cost,
    Shape,
    cast_cost,
    cast_users,
    gemm_cost,
    high_ms,
    operand_sizes,
    shape_of,
)
from te_precision_callbacks.speed.devices import HIGH, Device

Source = Literal["model", "calibrated"]
"""Origin of a time: the cost model, or a table of times measured for the same shapes."""

Verdict = Literal["faster", "slower", "not resolved", "unknown", ""]

Interval: TypeAlias = tuple[float, float]
"""A 95 % confidence interval."""

_NORMAL = 1.96
"""The quantile of a normal distribution for an interval of 95 %."""

_UNKNOWN_INTERVAL = math.nan, math.nan

UNKNOWN = "unknown"
"""The recipe of a product in low precision whose recipe is not known."""


@dataclass(frozen=True)
class Times:
    """Times of one product or of several, in milliseconds of a step.

    Attributes:
        high_ms: in BF16.
        low_ms: as they run: in BF16 for products in high precision; nan if it is not known.
        cast_ms: of it casts with their launches.
        interval: the 95 % confidence interval of the speed-up; (nan, nan) if it is not known.
        source: the origin of the times.
    """

    high_ms: float
    low_ms: float
    cast_ms: float
    interval: Interval
    source: Source

    @property
    def speedup(self) -> float:
        """How many times as fast as in BF16."""
        return self.high_ms / self.low_ms if self.low_ms else math.nan

    @property
    def verdict(self) -> Verdict:
        """Whether low precision makes it faster: ``not resolved`` if the interval includes 1."""
        low, high = self.interval
        return "unknown" if math.isnan(low) else "faster" if low > 1 else "slower" if high < 1 else "not resolved"

    def figures(self) -> dict[str, object]:
        """Return the times for JSON, with None for an unknown one."""
        low, high = self.interval
        figures = {"high_ms": self.high_ms, "low_ms": self.low_ms, "cast_ms": self.cast_ms, "speedup": self.speedup}
        figures |= {"speedup_low": low, "speedup_high": high}
        return {
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "source": self.source,
        }


@dataclass(frozen=True)
class ProductTime(Times):
    """The expected time of a product in a step, over its calls.

    Attributes:
        product: the product.
        recipe: the recipe that it runs in; empty for high precision, :data:`UNKNOWN` if that is not known.
        cost: as it runs in low precision; None where it does not, or where the cost is not known.
    """

    product: Product
    recipe: str
    cost: Cost | None = None

    @property
    def layer(self) -> str:
        """The layer of the product."""
        return self.product.layer

    @property
    def gemm(self) -> str:
        """The GEMM of the product."""
        return self.product.gemm

    @property
    def shape(self) -> Shape:
        """The shape of one call."""
        return shape_of(self.product)

    @property
    def sizes(self) -> str:
        """The sizes of the layer, tokens x in x out, which its three GEMMs share."""
        product = self.product
        return str(Shape(*layer_sizes(product.gemm, product.n, product.m, product.k), product.batch))

    def as_json(self) -> dict[str, object]:
        """Return a row of ``te-precision speed --json``; m, n and k as :class:`Shape` has them."""
        names = {"layer": self.layer, "gemm": self.gemm, "m": self.shape.m, "n": self.shape.n, "k": self.shape.k}
        figures = self.figures()
        if self.cost is None:
            figures |= {"low_ms": None, "cast_ms": None, "speedup": None}
        return {**names, "recipe": self.recipe or None, **figures}


@dataclass(frozen=True)
class Total(Times):
    """The time of several products. A product in high precision counts with its time in BF16 on both sides.

    Attributes:
        unknown: products in low precision whose cost is not known; they are in no figure.
        known: the others.
        is_low: whether any of those runs in low precision.
    """

    unknown: int = 0
    known: int = 0
    is_low: bool = False


def recipe_of_product(product: Product, given: str = "") -> str:
    """Return the recipe of a product: as its operands' formats say, or as it is given.

    Args:
        product: the product.
        given: the recipe under which its layer ran, as ``GemmPrecision.recipe`` has it; empty if it is not known.

    Returns:
        One of :data:`RECIPES`; empty in high precision; :data:`UNKNOWN` where FP8 of one scale is of no known recipe.
    """
    if not product.is_low:
        return ""
    return _recipe_of_formats(tuple(product.operands.values()), given.rpartition("->")[2].strip())


@functools.cache
def _recipe_of_formats(formats: tuple[str, ...], given: str) -> str:
    if given in RECIPES:
        return given
    found = {text.rpartition("->")[2].strip() for text in formats}
    for name in ("mxfp8", "nvfp4", "fp8_block_scaling"):
        if all(text.startswith(RECIPES[name].format) for text in found):
            return name
    return UNKNOWN


def with_recipes(products: Iterable[Product], recipes: Mapping[str, str] | str) -> list[tuple[Product, str]]:
    """Return the products that have a time, without look-ups and what is not counted, and the recipe of each.

    Args:
        products: of a coverage, a plan or a recorded run; sizes are local to the rank.
        recipes: layer -> its recipe, or one for all; needed for FP8 with one scale, where formats do not tell.
    """
    return [
        (product, recipe_of_product(product, recipes if isinstance(recipes, str) else recipes.get(product.layer, "")))
        for product in products
        if product.macs and product.gemm != "lookup"
    ]


def expected(
    products: Iterable[Product],
    recipes: Mapping[str, str] | str,
    device: Device,
    *,
    table: Calibration | None = None,
) -> list[ProductTime]:
    """Return the expected times of the products of a step that run.

    Args:
        products, recipes: as of :func:`with_recipes`.
        device, table: as of :func:`timed`.

    Raises:
        SpeedError: the device does not run the recipe of a product.
    """
    return timed(with_recipes(products, recipes), device, table=table)


def timed(
    products: Iterable[tuple[Product, str]], device: Device, *, table: Calibration | None = None
) -> list[ProductTime]:
    """Return the expected times of products.

    Args:
        products: products that have a time, and the recipe of each; empty for high precision.
        device: the device, which need not be here.
        table: times that were measured on the device, which come before those of the model.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    layers: dict[str, list[tuple[int, Product, str]]] = defaultdict(list)
    for place, (product, recipe) in enumerate(products):
        layers[product.layer].append((place, product, recipe))
    found: dict[int, ProductTime] = {}
    known: dict[object, list[ProductTime]] = {}  # layers of a model are alike
    for of_layer in layers.values():
        kind = tuple(
            (p.gemm, p.family, p.n, p.m, p.k, p.batch, p.calls, p.macs, p.mask_share, recipe)
            for _, p, recipe in of_layer
        )
        if kind not in known:
            casts = _casts_of_layer([(product, recipe) for _, product, recipe in of_layer], device, table)
            known[kind] = [
                _time_of(p, recipe, *casts.get(p.gemm, _NO_CASTS), device, table) for _, p, recipe in of_layer
            ]
        for (place, product, _), like in zip(of_layer, known[kind], strict=True):
            found[place] = ProductTime(**{**vars(like), "product": product})
    return [found[place] for place in sorted(found)]


def alike(times: Sequence[ProductTime]) -> list[list[list[ProductTime]]]:
    """Return groups of layers, with the products of each: products and times are the same, and names differ in their
    numbers alone, so that one text names them."""
    of_layer: dict[str, list[ProductTime]] = defaultdict(list)
    for one in times:
        of_layer[one.layer].append(one)
    groups: dict[object, list[list[ProductTime]]] = defaultdict(list)
    for layer, found in of_layer.items():
        kinds = (
            (t.gemm, p.backward, t.shape, p.calls, t.recipe, t.source, p.why, p.mask_share)
            for t, p in ((t, t.product) for t in found)
        )
        groups[form_of(layer), tuple(kinds)].append(found)
    return list(groups.values())


def layers_without_gain(times: Iterable[ProductTime]) -> set[str]:
    """Return the layers whose products in low precision take at least as long as in BF16, casts included."""
    added: dict[str, float] = defaultdict(float)
    for one in times:
        if one.cost is not None:
            added[one.layer] += one.low_ms - one.high_ms
    return {layer for layer, ms in added.items() if ms >= 0}


def products_of_shapes(shapes: Iterable[Shape], recipe: str) -> list[Product]:
    """Return the three GEMMs of a linear layer of each shape, named after it."""
    kind = RECIPES[recipe].format
    found = []
    for shape in shapes:
        tokens, k, n = shape[:3]
        sizes: dict[GemmName, tuple[int, int, int]] = {
            "fprop": (tokens, n, k),
            "dgrad": (tokens, k, n),
            "wgrad": (n, k, tokens),
        }
        for gemm, of_product in sizes.items():
            operands: dict[str, str] = {str(tensor): kind for tensor in OPERANDS[gemm]}
            macs = shape.operations // 2
            found.append(Product(str(shape), "te", gemm, gemm != "fprop", *of_product, 1, 1, macs, operands))
    return found


_NO_CASTS: tuple[Cost, Cost | None] = Cost(0.0), Cost(0.0)


def _time_of(
    product: Product,
    recipe: str,
    modeled_casts: Cost,
    measured_casts: Cost | None,
    device: Device,
    table: Calibration | None,
) -> ProductTime:
    """Return the time of a product, with the casts that count with it as modeled and as measured."""
    shape = shape_of(product)
    count = calls_of(product)
    measured_ms = None if table is None else table.ms(high_key(shape))
    if product.family == "attention":
        # Fused kernels keep the scores on the chip: the operations alone count.
        share = 1 if product.mask_share is None else product.mask_share
        model_ms = shape.operations / (device.bf16_tflops * 1e9 * device.fitted.kernel[HIGH]) * share
    else:
        model_ms = high_ms(shape, device)
    high = (model_ms if measured_ms is None else measured_ms) * count
    if not recipe:
        source: Source = "model" if measured_ms is None else "calibrated"
        return ProductTime(high, high, 0.0, _UNKNOWN_INTERVAL, source, product, recipe)
    if recipe == UNKNOWN or product.gemm not in GEMMS:
        return ProductTime(high, math.nan, 0.0, _UNKNOWN_INTERVAL, "model", product, UNKNOWN)
    device.check_recipe(recipe)
    gemm_ms = None if table is None else table.ms(gemm_key(shape, recipe))
    if table is not None and measured_ms is not None and gemm_ms is not None and measured_casts is not None:
        cost = Cost(gemm_ms).times(count).plus(measured_casts)
        spread = math.hypot(*(table.times[key].spread for key in (high_key(shape), gemm_key(shape, recipe))))
        around = _around(high / cost.low_ms, _NORMAL * spread)
        return ProductTime(high, cost.low_ms, _casts_ms(cost), around, "calibrated", product, recipe, cost)
    cost = gemm_cost(shape, recipe, device).times(count).plus(modeled_casts)
    high = high_ms(shape, device) * count  # both sides from one source
    around = interval(high, cost, device)
    return ProductTime(high, cost.low_ms, _casts_ms(cost), around, "model", product, recipe, cost)


def _casts_ms(cost: Cost) -> float:
    return cost.cast_ms + cost.launch_ms


def calls_of(product: Product) -> float:
    """Return how often the product of the shape of its first call runs in a step: calls may differ in size."""
    return product.macs / (product.n * product.m * product.k * product.batch)


def _casts_of_layer(
    layer: Iterable[tuple[Product, str]], device: Device, table: Calibration | None
) -> dict[str, tuple[Cost, Cost | None]]:
    """Return GEMM -> the casts that count with it in a step, as modeled, and as measured; None if one was not."""
    low = {product.gemm: (product, recipe) for product, recipe in layer if recipe in RECIPES and product.gemm in GEMMS}
    found: dict[str, tuple[Cost, Cost | None]] = {}
    for operand, first, directions in cast_users({gemm: recipe for gemm, (_, recipe) in low.items()}):
        product, recipe = low[first]
        device.check_recipe(recipe)
        rows, columns = operand_sizes(operand, first, shape_of(product))
        calls = 1.0 if operand == "weight" else calls_of(product)
        elements = rows * columns * product.batch
        cost = cast_cost(recipe, operand, elements, device, rowwise=directions[0], columnwise=directions[1])
        ms = None if table is None else table.ms(cast_key(recipe, operand, rows, columns, directions))
        modeled, measured = found.get(first, _NO_CASTS)
        found[first] = (
            modeled.plus(cost.times(calls)),
            None if ms is None or measured is None else measured.plus(Cost(0.0, ms).times(calls)),
        )
    return found


def interval(high: float, cost: Cost, device: Device) -> Interval:
    """Return the interval of 95 % of a speed-up, from how far published times of shapes are from the model.

    Errors of kernels and casts are independent, and relative; those of a run are its own. The interval is symmetric in
    the logarithm. A device whose constants were measured on another one has the error of that transfer, too.
    """
    low = cost.low_ms
    if not low or not high:
        return _UNKNOWN_INTERVAL
    scatter = device.fitted.scatter
    kernel = (cost.kernel_ms + cost.padding_ms) / low
    variance = scatter.kernel**2 * (1 + kernel**2) + (scatter.cast * _casts_ms(cost) / low) ** 2
    return _around(high / low, _width(variance, device))


def _width(variance: float, device: Device) -> float:
    scatter = device.fitted.scatter
    return scatter.quantile * math.sqrt(
        variance + 2 * scatter.run**2 + (0 if device.is_measured else scatter.transfer**2)
    )


def _around(speedup: float, width: float) -> Interval:
    return speedup * math.exp(-width), speedup * math.exp(width)


def total(times: Iterable[ProductTime], device: Device) -> Total:
    """Return the time of several products together.

    Modeled times of one shape and recipe err together, all others independently. Products of which the cost is not
    known are in no figure.
    """
    times = list(times)
    known = [one for one in times if not one.recipe or one.cost is not None]
    unknown = len(times) - len(known)
    high, low = sum(one.high_ms for one in known), sum(one.low_ms for one in known)
    casts = sum(one.cast_ms for one in known)
    of_kind: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    of_measured = 0.0
    in_low = [one for one in known if one.cost is not None]
    for one in in_low:
        if one.source == "calibrated":
            of_measured += (one.low_ms * math.log(one.interval[1] / one.interval[0]) / 2 / _NORMAL) ** 2
        else:
            sums = of_kind[one.shape, one.recipe]
            sums[0] += one.high_ms
            sums[1] += one.low_ms - one.cast_ms
            sums[2] += one.cast_ms
    if not known or not low:
        return Total(high, low, casts, _UNKNOWN_INTERVAL, "model", unknown, len(known))
    if not in_low:
        return Total(high, low, casts, (1.0, 1.0), "model", unknown, len(known))
    if not of_kind:
        around = _around(high / low, _NORMAL * math.sqrt(of_measured) / low)
        return Total(high, low, casts, around, "calibrated", unknown, len(known), is_low=True)
    scatter = device.fitted.scatter
    variance = of_measured / low**2 + sum(
        (scatter.kernel * h / high) ** 2 + (scatter.kernel * k / low) ** 2 + (scatter.cast * c / low) ** 2
        for h, k, c in of_kind.values()
    )
    around = _around(high / low, _width(variance, device))
    return Total(high, low, casts, around, "model", unknown, len(known), is_low=True)
