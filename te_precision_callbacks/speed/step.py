"""Expected times of a step's GEMMs: by layer, in total, and the layers that gain nothing from low precision."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.numerics.gemm_shapes import layer_sizes
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import fold_names, form_of
from te_precision_callbacks.speed.devices import Device, SpeedError
from te_precision_callbacks.speed.expected import UNKNOWN, ProductTime, Times, time_products, total, with_recipes

_MOST_ROWS = 60
_MOST_NAMES = 4


@dataclass(frozen=True)
class StepTimes:
    """Expected times of the GEMMs of a step.

    Attributes:
        times: the time of each GEMM, grouped by layer.
        attention: modules of attention, which are not included.
        not_counted: other modules that are not included.
    """

    device: Device
    times: tuple[ProductTime, ...]
    attention: Sequence[str]
    not_counted: Sequence[str]

    @functools.cached_property
    def total(self) -> Times:
        """The time of all GEMMs with known times."""
        return total((time for time in self.times if not math.isnan(time.low_ms)), self.device)

    @functools.cached_property
    def by_layer(self) -> Mapping[str, Sequence[ProductTime]]:
        return group_by_key((time.layer, time) for time in self.times)

    @functools.cached_property
    def without_gain(self) -> Mapping[str, str]:
        """Layer -> why low precision does not make it faster."""
        reasons = {layer: total(times, self.device).why_no_gain for layer, times in self.by_layer.items()}
        return {layer: why for layer, why in reasons.items() if why}

    def notes(self) -> Iterator[str]:
        if self.total.is_low and not self.device.is_measured:
            yield (
                f"The model was fitted to times of {self.device.constants.measured_on}, not of {self.device.title}, so"
                " the intervals are wider."
            )
        if self.attention:
            yield (
                f"Not included: attention ({', '.join(fold_names(self.attention, most=_MOST_NAMES))}). It depends on"
                " sequence lengths, and gains nothing unless the recipe has fp8_dpa=True."
            )
        if self.not_counted:
            yield f"Not included: {', '.join(fold_names(self.not_counted, most=_MOST_NAMES))}."
        unknown = sum(math.isnan(time.low_ms) for time in self.times)
        if unknown:
            yield f"Not in the total: {many(unknown, 'GEMM')} with an unknown recipe."
        wide = sum(not time.product.is_low and time.product.precision not in ("bf16", "fp16") for time in self.times)
        if wide:
            yield f"{many(wide, 'GEMM')} in FP32 or FP64: timed as BF16, but slower."

    def as_json(self) -> dict[str, Any]:
        products = []
        for time in self.times:
            shape = time.shape
            names = {"layer": time.layer, "gemm": time.product.gemm, "m": shape.m, "n": shape.n, "k": shape.k}
            products.append({**names, "recipe": time.recipe or None, **time.figures()})
        return {
            "device": self.device.title,
            "products": products,
            "total": self.total.figures(),
            "without_gain": self.without_gain,
            "notes": [*self.notes()],
        }


def estimate_step(
    products: Iterable[Product],
    recipe: str,
    device: Device,
    *,
    attention: Sequence[str] = (),
    not_counted: Sequence[str] = (),
) -> StepTimes:
    """Estimate the times of a step's GEMMs.

    Args:
        products: the products of the step, such as the coverage of a plan or a session.
        recipe: the recipe of the layers.
        device: the device, which need not be on this machine.

    Raises:
        SpeedError: the device does not run the recipe, or there are no GEMMs.
    """
    times = time_products(with_recipes(products, recipe), device)
    if not times:
        raise SpeedError("No GEMM of the model could be planned, so no times can be estimated.")
    return StepTimes(device, tuple(times), attention, not_counted)


def show(step: StepTimes) -> None:
    """Print a row for each kind of layer, longest first, the total, and the layers that gain nothing."""
    terminal.show_text(f"{step.device.title}. Expected milliseconds per step, in BF16 / as run with casts.")
    groups: dict[object, list[str]] = defaultdict(list)
    for layer, times in step.by_layer.items():
        kind = [(time.product.gemm, time.shape, time.product.macs, time.recipe, time.product.why) for time in times]
        groups[form_of(layer), tuple(kind)].append(layer)
    rows = sorted(groups.values(), key=lambda layers: -len(layers) * _high_ms(step.by_layer[layers[0]]))
    table = terminal.table("layer", "tokens x in x out", *GEMMS, "all", "times as fast", "result, or reason")
    for layers in rows[:_MOST_ROWS]:
        table.add_row(*_cells(layers, step.by_layer[layers[0]], step.device))
    terminal.show(table, optional=(*GEMMS, "tokens x in x out"))
    if rows[_MOST_ROWS:]:
        terminal.show_text(f"and {many(len(rows) - _MOST_ROWS, 'more row')}; --json lists all layers.")
    text = f"All GEMMs: {_format_times([step.total], 1)} ms"
    if step.total.is_low:
        text += f", {_format_speedup(step.total)} times as fast as BF16"
    terminal.show_text(f"{text}.")
    for why, layers in group_by_key((why, layer) for layer, why in step.without_gain.items()).items():
        terminal.show_text(f"No gain: {', '.join(fold_names(layers, most=_MOST_NAMES))} ({why}).", hanging=2)
    terminal.show_notes(step.notes())


def _cells(layers: Sequence[str], times: Sequence[ProductTime], device: Device) -> Iterator[Text]:
    """Yield the cells of layers with the same times."""
    layer_total = total(times, device)
    first = times[0].product
    tokens, in_features, out_features = layer_sizes(first.gemm, first.n, first.m, first.k)
    yield terminal.cell_lines(fold_names(layers, most=_MOST_NAMES))
    yield terminal.cell(f"{tokens}x{in_features}x{out_features}")
    for gemm in GEMMS:
        yield terminal.cell(_format_times([time for time in times if time.product.gemm == gemm], len(layers)))
    yield terminal.cell(_format_times([layer_total], len(layers)))
    yield terminal.cell(_format_speedup(layer_total))
    reasons = dict.fromkeys(time.product.why for time in times)
    yield terminal.cell_lines(filter(None, [layer_total.verdict, *reasons]))


def _high_ms(times: Iterable[Times]) -> float:
    return sum(time.high_ms for time in times)


def _format_times(times: Sequence[Times], layers: int) -> str:
    if not times:
        return ""
    low = sum(time.low_ms for time in times)
    return " / ".join(map(_format_ms, (layers * _high_ms(times), layers * low)))


def _format_ms(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _format_speedup(times: Times) -> str:
    if not times.is_low:
        return ""
    low, high = times.interval
    return f"{times.speedup:.2f} ({low:.2f} to {high:.2f})"
