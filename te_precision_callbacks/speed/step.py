"""Expected times of a step's GEMMs: by layer, in total, and the layers that gain nothing from low precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import fold_names, form_of
from te_precision_callbacks.speed.devices import Device, SpeedError
from te_precision_callbacks.speed.expected import ProductTime, Times, time_products
from te_precision_callbacks.te.gemm_shapes import layer_sizes

_MOST_ROWS = 60
_MOST_NAMES = 4


@dataclass(frozen=True)
class StepTimes:
    """Expected times of the GEMMs of a step.

    Attributes:
        times: the time of each GEMM, grouped by layer; the products of attention are not included.
    """

    device: Device
    times: Sequence[ProductTime]

    @property
    def total(self) -> Times:
        """The time of all GEMMs with known times."""
        return Times.of([time for time in self.times if not math.isnan(time.low_ms)])

    @functools.cached_property
    def by_layer(self) -> Mapping[str, Sequence[ProductTime]]:
        return group_by_key((time.product.layer, time) for time in self.times)

    @property
    def without_gain(self) -> Mapping[str, str]:
        """Layer -> why low precision does not make it faster."""
        reasons = {}
        for layer, times in self.by_layer.items():
            why = Times.of(times).why_no_gain
            if why:
                reasons[layer] = why
        return reasons

    def notes(self) -> Iterator[str]:
        fitted = self.device.constants.measured_on
        if fitted != self.device.title:
            yield f"The model was fitted to times of {fitted}, not of {self.device.title}."
        unknown = wide = 0
        for time in self.times:
            unknown += math.isnan(time.gemm_ms)
            wide += not time.product.is_low and time.product.precision not in ("bf16", "fp16")
        if unknown:
            yield f"Not in the total: {many(unknown, 'GEMM')} with an unknown recipe."
        if wide:
            yield f"{many(wide, 'GEMM')} in FP32 or FP64: timed as BF16, but slower."

    def as_json(self) -> dict[str, Any]:
        products = []
        for time in self.times:
            product = time.product
            sizes = {"m": product.n, "n": product.m, "k": product.k, "recipe": time.recipe or None}
            products.append({"layer": product.layer, "gemm": product.gemm, **sizes, **Times.of([time]).figures()})
        return {
            "device": self.device.title,
            "products": products,
            "total": self.total.figures(),
            "without_gain": self.without_gain,
            "notes": list(self.notes()),
        }


def estimate_step(products: Iterable[Product], device: Device) -> StepTimes:
    """Estimate the times of a step's GEMMs.

    Args:
        products: the products of the step, such as the coverage of a plan or a session.
        device: the device, which need not be on this machine.

    Raises:
        SpeedError: the device does not run the recipe, or there are no GEMMs.
    """
    timed = [product for product in products if product.macs and product.gemm in GEMMS]
    times = time_products(((product, product.recipe if product.is_low else "") for product in timed), device)
    if not times:
        raise SpeedError("No GEMM of the model could be planned, so no times can be estimated.")
    return StepTimes(device, times)


def show(step: StepTimes) -> None:
    """Print a row for each kind of layer, longest first, the total, and the layers that gain nothing."""
    terminal.show_text(f"{step.device.title}. Expected milliseconds per step, in BF16 / as run with casts.")
    kinds: dict[object, list[str]] = {}
    for layer, times in step.by_layer.items():
        kind: list[object] = [form_of(layer)]
        for time in times:
            product = time.product
            kind.append((product.gemm, product.n, product.m, product.k, product.macs, time.recipe, product.why))
        kinds.setdefault(tuple(kind), []).append(layer)
    rows = sorted(kinds.values(), key=lambda layers: -len(layers) * Times.of(step.by_layer[layers[0]]).high_ms)
    table = terminal.table("layer", "tokens x in x out", *GEMMS, "all", "times as fast", "reason")
    for layers in rows[:_MOST_ROWS]:
        times = step.by_layer[layers[0]]
        of_layer = Times.of(times)
        reasons = dict.fromkeys([of_layer.why_no_gain, *(time.product.why for time in times)])
        first = times[0].product
        by_gemm = group_by_key((time.product.gemm, time) for time in times)
        cells = [_format_times(Times.of(by_gemm.get(gemm, [])), len(layers)) for gemm in GEMMS]
        table.add_row(
            terminal.cell_lines(fold_names(layers, most=_MOST_NAMES)),
            "x".join(map(str, layer_sizes(first.gemm, first.n, first.m, first.k))),
            *cells,
            _format_times(of_layer, len(layers)),
            _format_speedup(of_layer, ""),
            terminal.cell_lines(filter(None, reasons)),
        )
    terminal.show(table, optional=(*GEMMS, "tokens x in x out"))
    if rows[_MOST_ROWS:]:
        terminal.show_text(f"and {many(len(rows) - _MOST_ROWS, 'more row')}; --json lists all layers.")
    faster = _format_speedup(step.total, " times as fast as BF16")
    terminal.show_text(f"{', '.join(filter(None, [f'All GEMMs: {_format_times(step.total)} ms', faster]))}.")
    for why, layers in group_by_key((why, layer) for layer, why in step.without_gain.items()).items():
        terminal.show_text(f"No gain: {', '.join(fold_names(layers, most=_MOST_NAMES))} ({why}).", hanging=2)
    terminal.show_notes(step.notes())


def _format_times(times: Times, layers: int = 1) -> str:
    if not times.high_ms:
        return ""
    return f"{_format_ms(layers * times.high_ms)} / {_format_ms(layers * times.low_ms)}"


def _format_ms(value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _format_speedup(times: Times, unit: str) -> str:
    if math.isnan(times.speedup):
        return ""
    return f"{times.speedup:.2f}{unit}"
