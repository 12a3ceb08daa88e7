"""Expected times of products: in BF16, and as they run, with an interval for the speed-up.

    times = expected(products, recipes, device)            # a plan or a run, in the plan of a training
    products = products_of_shapes([Shape.parse("15872x4096x4096")], "fp8_current_scaling")     # one call each
    for one in times:
        one.layer, one.gemm, one.high_ms, one.low_ms, one.speedup, one.interval, one.verdict
    total(times, device).speedup

Two plans of calls. ``training``: the input, the weight and the gradient of a layer are cast once for its three GEMMs,
each in the directions that its GEMMs in low precision read; the weight once an optimizer step, as with
``is_first_microbatch``, and the others in each micro-batch. A cast counts with the first GEMM that reads it: the input
and the weight with fprop, the gradient with dgrad. ``benchmark``: each product is a forward that casts both operands,
as Transformer Engine's benchmark_gemm.py measures.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from te_precision_callbacks.base.numerics.gemm_shapes import layer_sizes
from te_precision_callbacks.base.vocabulary import (
    GEMMS,
    OPERANDS,
    RECIPES,
    GemmName,
)
from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.speed.calibration import Calibration
from te_precision_callbacks.speed.costs import (
    CallPlan,
    Cost,
    Shape,
    call_cost,
    cast_ms,
    cast_of,
    cast_users,
    gemm_cost,
    high_ms,
    operand_sizes,
)
from te_precision_callbacks.speed.devices import HIGH, Device

Source = Literal["model", "calibrated GEMM, modeled cast", "calibrated"]
"""Origin of a time: the cost model, or a table of times measured for the same shapes."""

Verdict = Literal["faster", "slower", "not resolved", "unknown", ""]

_NORMAL = 1.96
"""The quantile of a normal distribution for an interval of 95 %."""

UNKNOWN = "unknown"
"""The recipe of a product in low precision whose recipe is not known."""


@dataclass(frozen=True)
class ProductTime:
    """The expected time of a product in a step, over its calls.

    Attributes:
        layer, gemm, family, backward: as in :class:`~te_precision_callbacks.coverage.coverage.Product`.
        shape: of one call.
        calls: the calls in a step.
        recipe: the recipe that it runs in; empty for high precision, :data:`UNKNOWN` if that is not known.
        high_ms: in BF16.
        cost: as it runs in low precision; None where it does not, or where the cost is not known.
        interval: the interval of 95 % of the speed-up; (nan, nan) without a cost.
        source: where the times come from.
        reason: why it does not run in low precision; None if it does.
        why: the same in words.
        precision: the precision of the product as it runs.
        mask_share: as ``Product.mask_share``: the times have that share of the operations; None counts as 1.
    """

    layer: str
    gemm: str
    family: str
    backward: bool
    shape: Shape
    calls: int
    recipe: str
    high_ms: float
    cost: Cost | None
    interval: tuple[float, float] = (math.nan, math.nan)
    source: Source = "model"
    reason: Reason | None = None
    why: str = ""
    precision: str = ""
    mask_share: float | None = None

    def of(self, layer: str) -> ProductTime:
        """That of the same product of another layer."""
        made = object.__new__(ProductTime)  # replace() takes ten times as long, and models have many alike layers
        vars(made).update(vars(self), layer=layer)
        return made

    @property
    def sizes(self) -> str:
        """The sizes of the layer, tokens x in x out, which its three GEMMs share."""
        rows, summed, columns, batch = self.shape
        return str(Shape(*layer_sizes(self.gemm, rows, columns, summed), batch))

    @property
    def low_ms(self) -> float:
        """The time as it runs: in high precision if it does not run in low precision; nan if that is not known."""
        if self.cost is not None:
            return self.cost.low_ms
        return math.nan if self.recipe else self.high_ms

    @property
    def cast_ms(self) -> float:
        """Casts with their launches; 0 in high precision."""
        return 0.0 if self.cost is None else self.cost.cast_ms + self.cost.launch_ms

    @property
    def speedup(self) -> float:
        """How many times as fast as in BF16 it is."""
        return self.high_ms / self.low_ms if self.low_ms else math.nan

    @property
    def verdict(self) -> Verdict:
        """Whether low precision makes it faster; empty for a product in high precision."""
        if not self.recipe:
            return ""
        return verdict_of(self.interval)

    def as_json(self) -> dict[str, object]:
        """As ``te-precision speed --json`` has it; m, n and k as :class:`Shape` has them."""
        is_low = self.cost is not None
        return {
            "layer": self.layer,
            "gemm": self.gemm,
            "m": self.shape.m,
            "n": self.shape.n,
            "k": self.shape.k,
            "recipe": self.recipe or None,
            "high_ms": self.high_ms,
            "low_ms": self.low_ms if is_low else None,
            "cast_ms": self.cast_ms if is_low else None,
            "speedup": self.speedup if is_low else None,
            "speedup_low": self.interval[0] if is_low else None,
            "speedup_high": self.interval[1] if is_low else None,
            "source": self.source,
        }


@dataclass(frozen=True)
class Total:
    """The time of several products. Attributes and units are those of :class:`ProductTime`; a product in high precision
    counts with its time in BF16 on both sides.

    Attributes:
        unknown: products in low precision whose cost is not known; they are in no figure.
        known: the others.
        is_low: whether any of those runs in low precision.
    """

    high_ms: float
    low_ms: float
    cast_ms: float
    interval: tuple[float, float]
    source: Source = "model"
    unknown: int = 0
    known: int = 0
    is_low: bool = False

    @property
    def speedup(self) -> float:
        """How many times as fast as in BF16 all of them are."""
        return self.high_ms / self.low_ms if self.low_ms else math.nan

    @property
    def verdict(self) -> Verdict:
        """Whether low precision makes them faster."""
        return verdict_of(self.interval)

    def as_json(self) -> dict[str, object]:
        """As ``te-precision speed --json`` has it."""
        return {
            "high_ms": self.high_ms,
            "low_ms": self.low_ms,
            "cast_ms": self.cast_ms,
            "speedup": self.speedup,
            "speedup_low": self.interval[0],
            "speedup_high": self.interval[1],
            "source": self.source,
            "unknown": self.unknown,
        }


def verdict_of(interval: tuple[float, float]) -> Verdict:
    """What an interval of a speed-up says: ``not resolved`` if it includes 1."""
    if math.isnan(interval[0]):
        return "unknown"
    return "faster" if interval[0] > 1 else "slower" if interval[1] < 1 else "not resolved"


def recipe_of_product(product: Product, given: str = "") -> str:
    """The recipe of a product: as its operands' formats tell, or as it is given.

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


def shape_of(product: Product) -> Shape:
    """The shape of a product, in this part's notation: its m are the rows of the result, Product's n."""
    return Shape(product.n, product.k, product.m, product.batch)


def recipes_of(products: Iterable[Product], recipes: Mapping[str, str] | str) -> list[str]:
    """The recipe of each product; the recipes are given as to :func:`expected`."""
    return [
        recipe_of_product(product, recipes if isinstance(recipes, str) else recipes.get(product.layer, ""))
        for product in products
    ]


def counted(products: Iterable[Product]) -> list[Product]:
    """The products that have a time: those that run, without look-ups and what is not counted."""
    return [product for product in products if product.macs and product.gemm != "lookup"]


def expected(
    products: Iterable[Product],
    recipes: Mapping[str, str] | str,
    device: Device,
    *,
    plan: CallPlan = "training",
    table: Calibration | None = None,
) -> list[ProductTime]:
    """The expected times of the products of a step that run, without look-ups and what is not counted.

    Args:
        products: of a coverage, a plan or a recorded run; sizes are local to the rank.
        recipes: layer -> its recipe, or one for all; needed for FP8 with one scale, where formats do not tell.
        device: the device, which need not be here.
        plan: how often operands are cast.
        table: times that were measured on the device, which come before those of the model.

    Raises:
        SpeedError: the device does not run the recipe of a product.
    """
    found = counted(products)
    return timed(found, recipes_of(found, recipes), device, plan=plan, table=table)


def timed(
    products: Sequence[Product],
    recipes: Sequence[str],
    device: Device,
    *,
    plan: CallPlan = "training",
    table: Calibration | None = None,
) -> list[ProductTime]:
    """The expected times of products if each runs in its recipe.

    Args:
        products: products that have a time.
        recipes: the recipe of each; empty for high precision.
        device, plan, table: as of :func:`expected`.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, product in enumerate(products):
        places[product.layer].append(place)
    found: list[ProductTime | None] = [None] * len(products)
    kinds: dict[object, list[ProductTime]] = {}  # layers of a model are alike
    for layer, of_layer in places.items():
        kind = tuple(_kind(products[place], recipes[place]) for place in of_layer)
        if kind not in kinds:
            kinds[kind] = _times_of_layer([(products[p], recipes[p]) for p in of_layer], device, plan, table)
        for place, one in zip(of_layer, kinds[kind], strict=True):
            found[place] = one if one.layer == layer else one.of(layer)
    return [one for one in found if one is not None]


def _kind(product: Product, recipe: str) -> object:
    """What makes products of several layers alike."""
    p = product
    sizes = p.n, p.m, p.k, p.batch, p.calls, p.macs
    why = p.reason, p.reason_ref, p.not_run
    return p.gemm, p.family, p.backward, *sizes, p.precision, *why, p.mask_share, recipe


def _times_of_layer(
    layer: Sequence[tuple[Product, str]], device: Device, plan: CallPlan, table: Calibration | None
) -> list[ProductTime]:
    casts = _casts_of_layer(layer, device, table) if plan == "training" else {}
    return [
        _time_of(product, recipe, casts.get(product.gemm, (Cost(0.0), 0.0)), device, plan, table)
        for product, recipe in layer
    ]


def alike(times: Sequence[ProductTime], *, by_name: bool = False) -> dict[object, list[list[ProductTime]]]:
    """The products of layers, of which each is like the others under one key.

    Args:
        times: the times.
        by_name: whether names of alike layers differ in their numbers alone, so that one text names them.
    """
    of_layer: dict[str, list[ProductTime]] = defaultdict(list)
    for one in times:
        of_layer[one.layer].append(one)
    alike: dict[object, list[list[ProductTime]]] = defaultdict(list)
    for layer, found in of_layer.items():
        form = form_of(layer) if by_name else ""
        key = form, *((p.gemm, p.backward, p.shape, p.calls, p.recipe, p.source, p.why, p.mask_share) for p in found)
        alike[key].append(found)
    return alike


def layers_without_gain(times: Iterable[ProductTime]) -> set[str]:
    """Layers whose products in low precision take at least as long as in BF16, casts included."""
    added: dict[str, float] = defaultdict(float)
    for one in times:
        if one.cost is not None:
            added[one.layer] += one.low_ms - one.high_ms
    return {layer for layer, ms in added.items() if ms >= 0}


def products_of_shapes(shapes: Sequence[Shape], recipe: str, *, plan: CallPlan = "benchmark") -> list[Product]:
    """The products of one call of each shape, named after it: its forward in the plan ``benchmark``, and the three
    GEMMs of a linear layer in the plan ``training``."""
    kind = RECIPES[recipe].format
    found = []
    for shape in shapes:
        tokens, in_features, out_features = shape[:3]
        sizes: dict[GemmName, tuple[int, int, int]] = {"fprop": (tokens, out_features, in_features)}
        if plan == "training":
            sizes |= {"dgrad": (tokens, in_features, out_features), "wgrad": (out_features, in_features, tokens)}
        for gemm, (n, m, k) in sizes.items():
            operands: dict[str, str] = {str(tensor): kind for tensor in OPERANDS[gemm]}
            found.append(
                Product(str(shape), "te", gemm, gemm != "fprop", n, m, k, 1, 1, shape.operations // 2, operands)
            )
    return found


def _time_of(
    product: Product,
    recipe: str,
    casts_of_gemm: tuple[Cost, float],
    device: Device,
    plan: CallPlan,
    table: Calibration | None,
) -> ProductTime:
    shape = shape_of(product)
    count = calls_of(product)
    measured = None if table is None else table.high_ms(shape)
    if product.family == "attention":
        # Fused kernels keep the scores on the chip: the operations alone count.
        share = 1 if product.mask_share is None else product.mask_share
        of_model = shape.operations / (device.bf16_tflops * 1e9 * device.fitted.kernel[HIGH]) * share
    else:
        of_model = high_ms(shape, device)
    high = (of_model if measured is None else measured) * count
    made = ProductTime(
        product.layer,
        product.gemm,
        product.family,
        product.backward,
        shape,
        product.calls,
        recipe,
        high,
        None,
        source="model" if measured is None else "calibrated",
        reason=product.reason,
        why=product.why,
        precision=product.precision,
        mask_share=product.mask_share,
    )
    if not recipe:
        return made
    if recipe == UNKNOWN or product.gemm not in GEMMS:
        return replace(made, recipe=UNKNOWN, source="model")
    device.check_recipe(recipe)
    casts, modeled_ms = casts_of_gemm
    of_call = None if table is None else (table.call if plan == "benchmark" else table.gemm)(shape, recipe)
    if table is not None and measured is not None and of_call is not None:
        cost = of_call.times(count).plus(casts)
        width = _NORMAL * table.spread(shape, recipe)
        source: Source = "calibrated"
        if modeled_ms:
            source = "calibrated GEMM, modeled cast"
            scatter, transfer = device.fitted.scatter, 0.0 if device.is_measured else device.fitted.scatter.transfer
            cast = scatter.quantile * math.hypot(scatter.cast, scatter.run, transfer)
            width = math.hypot(width, cast * modeled_ms / cost.low_ms)
        speedup = high / cost.low_ms
        around = speedup * math.exp(-width), speedup * math.exp(width)
        return replace(made, cost=cost, interval=around, source=source)
    one = call_cost(shape, recipe, device) if plan == "benchmark" else gemm_cost(shape, recipe, device)
    cost = one.times(count).plus(casts)
    high = high_ms(shape, device) * count  # both sides from one source
    return replace(made, high_ms=high, cost=cost, interval=interval(high, cost, device), source="model")


def calls_of(product: Product) -> float:
    """How often the product of the shape of its first call runs in a step: calls may differ in size."""
    return product.macs / (product.n * product.m * product.k * product.batch)


def _casts_of_layer(
    layer: Sequence[tuple[Product, str]], device: Device, table: Calibration | None
) -> dict[str, tuple[Cost, float]]:
    """GEMM -> the casts that count with it in a step, and the milliseconds of them that are not measured."""
    low = {product.gemm: (product, recipe) for product, recipe in layer if recipe in RECIPES and product.gemm in GEMMS}
    if not low:
        return {}
    found: dict[str, tuple[Cost, float]] = {}
    for operand, first, directions in cast_users({gemm: recipe for gemm, (_, recipe) in low.items()}):
        product, recipe = low[first]
        device.check_recipe(recipe)
        rows, columns = operand_sizes(operand, first, shape_of(product))
        calls = 1.0 if operand == "weight" else calls_of(product)
        cost = None if table is None else table.cast(recipe, operand, rows, columns, directions)
        modeled_ms = 0.0
        if cost is None:
            cast = cast_of(
                recipe,
                operand,
                rows * columns * product.batch,
                device.capability,
                rowwise=directions[0],
                columnwise=directions[1],
            )
            of_bytes, of_launches = cast_ms(cast, recipe, device)
            cost = Cost(0.0, of_bytes, 0.0, of_launches)
            modeled_ms = cost.low_ms * calls
        casts, before_ms = found.get(first, (Cost(0.0), 0.0))
        found[first] = casts.plus(cost.times(calls)), before_ms + modeled_ms
    return found


def interval(high: float, cost: Cost, device: Device) -> tuple[float, float]:
    """The interval of 95 % of a speed-up, from how far published times of shapes are from the model.

    Errors of kernels and casts are independent, and relative; those of a run are its own. The interval is symmetric in
    the logarithm. A device whose constants were measured on another one has the error of that transfer, too.
    """
    low = cost.low_ms
    if not low or not high:
        return (math.nan, math.nan)
    scatter = device.fitted.scatter
    kernel = (cost.kernel_ms + cost.padding_ms) / low
    casts = (cost.cast_ms + cost.launch_ms) / low
    variance = scatter.kernel**2 * (1 + kernel**2) + (scatter.cast * casts) ** 2
    return _around(high / low, variance, device)


def _around(speedup: float, variance: float, device: Device) -> tuple[float, float]:
    scatter = device.fitted.scatter
    variance += 2 * scatter.run**2 + (0 if device.is_measured else scatter.transfer**2)
    width = scatter.quantile * math.sqrt(variance)
    return speedup * math.exp(-width), speedup * math.exp(width)


def total(times: Iterable[ProductTime], device: Device) -> Total:
    """The time of several products together.

    Modeled times of one shape and recipe err together, all others independently. Products of which the cost is not
    known are in no figure.
    """
    known = 0
    unknown = 0
    high = low = casts = 0.0
    of_kind: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    measured: dict[object, float] = defaultdict(float)
    sources = set()
    for one in times:
        if one.recipe and one.cost is None:
            unknown += 1
            continue
        known += 1
        high += one.high_ms
        low += one.low_ms
        casts += one.cast_ms
        if one.cost is None:
            continue
        sources.add(one.source)
        if one.source != "model":
            deviation = one.low_ms * math.log(one.interval[1] / one.interval[0]) / 2 / _NORMAL
            measured[one if one.source == "calibrated" else (one.shape, one.recipe)] += deviation
        else:
            sums = of_kind[one.shape, one.recipe]
            sums[0] += one.high_ms
            sums[1] += one.cost.kernel_ms + one.cost.padding_ms
            sums[2] += one.cast_ms
    if not known or not low:
        return Total(high, low, casts, (math.nan, math.nan), unknown=unknown, known=known)
    source: Source = next((each for each in get_args(Source) if each in sources), "model")
    of_measured = sum(deviation**2 for deviation in measured.values())
    if not sources:
        return Total(high, low, casts, (1.0, 1.0), source, unknown, known)
    if not of_kind:
        width, speedup = _NORMAL * math.sqrt(of_measured) / low, high / low
        around = speedup * math.exp(-width), speedup * math.exp(width)
        return Total(high, low, casts, around, source, unknown, known, is_low=True)
    scatter = device.fitted.scatter
    variance = sum(
        (scatter.kernel * h / high) ** 2 + (scatter.kernel * k / low) ** 2 + (scatter.cast * c / low) ** 2
        for h, k, c in of_kind.values()
    )
    variance += of_measured / low**2
    return Total(high, low, casts, _around(high / low, variance, device), source, unknown, known, is_low=True)
