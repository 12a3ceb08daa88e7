"""What to do for speed, in the order of the milliseconds that it saves.

    for advice in estimate_step(step, device).advice:
        advice.text, advice.saves_ms, advice.interval, advice.patch

Each advice is priced by the same model as the step, with only what it changes changed. Two of them may not add up: a
layer that is kept in BF16 gains nothing from another recipe. Advice that costs time, or that changes numerics to a
narrower format, is not given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.costs import padded
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import SpeedError
from te_precision_callbacks.speed.expected import ProductTime, layers_without_gain, shape_of, total

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
    interval: tuple[float, float]
    patch: str = ""
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """As ``te-precision speed --json`` has it."""
        return {
            "text": self.text,
            "saves_ms": self.saves_ms,
            "saves_ms_low": self.interval[0],
            "saves_ms_high": self.interval[1],
            "patch": self.patch,
            "note": self.note,
        }


Price = Callable[[Sequence[Product], Sequence[str]], list[ProductTime]]
"""Times of products in recipes, on the device of a step."""


def advise(
    products: Sequence[Product],
    recipes: Sequence[str],
    times: Sequence[ProductTime],
    device: Device,
    alternative: str,
    price: Price,
) -> list[Advice]:
    """Return what to do, the largest saving first, and last the guesses, whose interval has no lower end.

    Args:
        products, recipes, times: those of the step.
        device: the device.
        alternative: the recipe that layers in high precision could run in; empty for none.
        price: estimates other products, or other recipes, on the device.
    """
    whole = _sum(times)
    found = _Advisor(products, recipes, times, device, alternative, price).all()
    worthwhile = [one for one in found if one.saves_ms > _LEAST_SHARE * whole]
    return sorted(worthwhile, key=lambda one: (not math.isfinite(one.interval[0]), -one.saves_ms))


class _Advisor:
    """Arguments are those of :func:`advise`."""

    def __init__(
        self,
        products: Sequence[Product],
        recipes: Sequence[str],
        times: Sequence[ProductTime],
        device: Device,
        alternative: str,
        price: Price,
    ) -> None:
        self._products, self._recipes, self._times = products, recipes, times
        self._device, self._recipe, self._timed = device, alternative, price

    def all(self) -> Iterable[Advice]:
        yield from self._keep_high()
        yield from self._other_recipe()
        yield from self._one_micro_batch()
        yield from self._low_instead()
        yield from self._attention()

    def _keep_high(self) -> Iterable[Advice]:
        """Layers that low precision makes slower."""
        layers = layers_without_gain(self._times)
        of_layers = [one for one in self._times if one.layer in layers and one.cost is not None]
        if not of_layers:
            return
        whole = total(of_layers, self._device)
        names = list(dict.fromkeys(one.layer for one in of_layers))
        yield Advice(
            f"keep {in_sentence(*names, most=3)} in BF16: low precision makes it slower",
            whole.low_ms - whole.high_ms,
            (whole.low_ms * (1 - whole.interval[1]), whole.low_ms * (1 - whole.interval[0])),
            keep_high(*names, others={one.layer for one in self._times} - set(names)),
            _DEBUG_PATH,
        )

    def _other_recipe(self) -> Iterable[Advice]:
        """Another recipe of FP8."""
        of_recipe: dict[str, list[int]] = defaultdict(list)
        for place, one in enumerate(self._times):
            if one.cost is not None:
                of_recipe[one.recipe].append(place)
        for old, places in of_recipe.items():
            if old not in (*_FP8, "fp8_block_scaling"):
                continue
            before = [self._times[place] for place in places]
            for new in _FP8:
                if new == old or not _runs(self._device, new):
                    continue
                after = self._timed([self._products[place] for place in places], [new] * len(places))
                saved = sum(one.low_ms for one in before) - sum(one.low_ms for one in after)
                # The kernels' errors are common to both where both have the same kernels; those of casts are not.
                scatter = self._device.fitted.scatter
                casts = math.hypot(sum(one.cast_ms for one in before), sum(one.cast_ms for one in after))
                width = scatter.quantile * scatter.cast * casts
                if new == "mxfp8" or old in ("mxfp8", "fp8_block_scaling"):
                    width = math.hypot(width, scatter.quantile * scatter.kernel * sum(one.low_ms for one in before))
                yield Advice(f"{new} instead of {old}", saved, (saved - width, saved + width), note=_NUMERICS)

    def _one_micro_batch(self) -> Iterable[Advice]:
        """All micro-batches of a step in one."""
        calls = {p.calls for p in self._products if p.family in ("te", "te_ops") and p.gemm == "fprop"}
        count = min(calls, default=1)
        if count < 2:
            return
        merged = []
        for product in self._products:
            if product.gemm == "wgrad":
                product = replace(product, k=product.k * count, calls=product.calls // count)
            elif product.gemm in GEMMS:
                product = replace(product, n=product.n * count, calls=product.calls // count)
            merged.append(product)
        after = self._timed(merged, self._recipes)
        saved = _sum(self._times) - _sum(after)
        launches = sum(one.cost.launch_ms for one in self._times if one.cost is not None)
        width = self._device.fitted.scatter.quantile * self._device.fitted.scatter.cast * launches
        yield Advice(
            f"{count} micro-batches in one",
            saved,
            (saved - width, saved + width),
            note="needs the memory of all their activations; what kernels gain from larger shapes is not counted",
        )

    def _low_instead(self) -> Iterable[Advice]:
        """Layers in high precision for a reason that can be changed."""
        if not self._recipe:
            return
        of_reason: dict[Reason, list[Product]] = defaultdict(list)
        for product, recipe in zip(self._products, self._recipes, strict=True):
            reason = product.reason
            if not recipe and product.gemm in GEMMS and reason is not None and reason in _REMEDY:
                of_reason[reason].append(product)
        for reason, products in of_reason.items():
            times = self._timed(products, [self._recipe] * len(products))
            gains: dict[str, float] = defaultdict(float)
            for one in times:
                gains[one.layer] += one.high_ms - one.low_ms
            better = [one for one in times if gains[one.layer] > 0]
            if not better:
                continue
            whole = total(better, self._device)
            names = list(dict.fromkeys(one.layer for one in better))
            refs = dict.fromkeys(filter(None, (product.reason_ref for product in products if product.layer in names)))
            text = _REMEDY[reason].format(
                layers=in_sentence(*names, most=3), by=" and ".join(refs) or "a section of the config"
            )
            low, high = whole.interval
            yield Advice(
                text + self._sizes([product for product in products if product.layer in names]),
                whole.high_ms - whole.low_ms,
                (whole.high_ms * (1 - 1 / low), whole.high_ms * (1 - 1 / high)),
                note=f"in {self._recipe}",
            )

    def _sizes(self, products: Sequence[Product]) -> str:
        """The dimensions that have to be padded for the recipe."""
        found: dict[tuple[int, int], None] = {}
        for product in products:
            shape = shape_of(product)
            filled = padded(shape, self._recipe, self._device.capability)
            found |= {(a, b): None for a, b in zip(shape[:3], filled[:3], strict=True) if a != b}
        return f", padded from {', '.join(f'{a} to {b}' for a, b in found)}" if found else ""

    def _attention(self) -> Iterable[Advice]:
        """Attention in FP8, of which no times are published."""
        high = sum(one.high_ms for one in self._times if one.family == "attention" and not one.recipe)
        if high and self._recipe in ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8"):
            yield Advice(
                "fp8_dpa=True in the recipe: attention in FP8",
                high / 4,
                (-math.inf, high / 2),
                note="at most half of attention's products; a quarter is a guess, since no times of it are published."
                " Measure it",
            )


_DEBUG_PATH = (
    "the figure is for te.autocast(enabled=False) around them in the model; this config, for a trial, takes their"
    " modules to Transformer Engine's debug path, whose time on a GPU is not measured"
)
"""What limits the saving of ``DisableFP8Layer``: docs/high-precision.md."""

_NUMERICS = "changes the numerics: compare the losses"


def _runs(device: Device, recipe: str) -> bool:
    try:
        device.check_recipe(recipe)
    except SpeedError:
        return False
    return True


def _sum(times: Iterable[ProductTime]) -> float:
    return sum(one.low_ms for one in times if not math.isnan(one.low_ms))
