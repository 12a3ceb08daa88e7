"""Expected times of GEMMs, in BF16 and as they run: by layer, in total, and the layers that gain nothing.

    estimate_step(session.coverage(), device_named("b300")).without_gain

A kernel takes the time of its operations at a share of the peak, or of its bytes at a share of the bandwidth,
whichever is longer, and at least the time of a launch. A cast takes the time of its bytes, and a launch for each of its
kernels. The shares and the launch time are :class:`~te_precision_callbacks.speed.devices.Constants`.

The input, the weight and the gradient of a layer are cast once for its three GEMMs, in the directions that its GEMMs in
low precision read: the weight once per optimizer step, as with ``is_first_microbatch``, the others once per
micro-batch. The time of a cast is added to the first GEMM that reads it: fprop for the input and the weight, dgrad for
the gradient.

Bytes of a cast, per element of two bytes. A direction is rowwise or columnwise. Codes with one scale per tensor are
written once if the GPU multiplies every layout (Blackwell), and otherwise once for each direction.

=================== ================================ ============================= =====================================
recipe              read                             written for each direction    kernels
=================== ================================ ============================= =====================================
fp8_delayed_scaling 2                                1                             cast, which also finds the amax
fp8_current_scaling 2 (amax), 2 (cast)               1                             zero, amax, scale, cast
fp8_block_scaling   2                                1 + 4/128 (weights 4/128^2)   cast
mxfp8               2                                1 + 1/32                      cast; swizzles of the scales
nvfp4               2 (amax), 2 (cast); columnwise   1/2 + 1/16                    zero, amax, cast; Hadamard cast of
                    activations and gradients 2 more                               activations and gradients; swizzles
=================== ================================ ============================= =====================================

A swizzle reads and writes a direction's scales. Blackwell emulates block scaling by MXFP8, with MXFP8's casts.

Read from Transformer Engine 2.20.2: ``pytorch/csrc/quantizer.cpp``,
``common/gemm/cublaslt_gemm.cu``, and ``pytorch/module/linear.py`` for the directions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.vocabulary import COLUMNWISE, GEMMS, ONE_SCALE, RECIPES, ROWWISE
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import fold_names, form_of
from te_precision_callbacks.speed.devices import KERNEL_OF_RECIPE, Device, SpeedError
from te_precision_callbacks.te.gemm_shapes import layer_sizes, takes_any_layout

_MOST_NAMES = 4

_HIGH_BYTES = 2

_LEAST_MS = 0.002
"""Time of the smallest kernel: torchao's ``roofline_utils.py``, measured on an H100."""

_BYTES_OF_KERNEL = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


@dataclass(frozen=True)
class ProductTime:
    """Expected time of a GEMM in a step, over its calls, in milliseconds.

    Attributes:
        recipe: its recipe; empty in high precision.
        high_ms: in BF16.
        gemm_ms: in its actual precision, without casts; nan if its recipe is unknown.
        cast_ms: the casts that it is the first to need, with launches.
    """

    product: Product
    recipe: str
    high_ms: float
    gemm_ms: float
    cast_ms: float

    @property
    def low_ms(self) -> float:
        return self.gemm_ms + self.cast_ms


@dataclass(frozen=True)
class Times:
    """The sums of several GEMMs; one in high precision adds its time in BF16 to both sums.

    Attributes:
        low_ms: in their actual precision, with casts.
        speedup: of low precision; nan without it, and with an unknown recipe.
        why_no_gain: the reason for no gain from low precision; empty with a gain, and in high precision.
    """

    high_ms: float
    low_ms: float
    cast_ms: float
    speedup: float
    why_no_gain: str

    @classmethod
    def of(cls, times: Sequence[ProductTime]) -> Times:
        high_ms = gemm_ms = cast_ms = 0.0
        is_low = False
        for time in times:
            high_ms += time.high_ms
            gemm_ms += time.gemm_ms
            cast_ms += time.cast_ms
            is_low |= bool(time.recipe)
        low_ms = gemm_ms + cast_ms
        if not is_low:
            return cls(high_ms, low_ms, cast_ms, math.nan, "")
        why = ""
        if gemm_ms >= high_ms:
            why = "too small: the GEMMs take as long as in BF16"
        elif low_ms >= high_ms:
            why = "too small: the casts take longer than the GEMMs save"
        return cls(high_ms, low_ms, cast_ms, high_ms / low_ms, why)

    def figures(self) -> dict[str, float | None]:
        figures = {name: value for name, value in vars(self).items() if name != "why_no_gain"}
        return {name: None if math.isnan(value) else value for name, value in figures.items()}


def time_products(products: Iterable[tuple[Product, str]], device: Device) -> list[ProductTime]:
    """Return the expected times of GEMMs with their recipes, empty in high precision, grouped by layer.

    Raises:
        SpeedError: the device does not run a recipe.
    """
    times = []
    for gemms in group_by_key((product.layer, (product, recipe)) for product, recipe in products).values():
        low = {product.gemm for product, recipe in gemms if recipe in RECIPES}
        for product, recipe in gemms:
            tokens, columns, rows = layer_sizes(product.gemm, product.n, product.m, product.k)
            elements = {"activation": tokens * columns, "weight": rows * columns, "gradient": tokens * rows}
            # In units of the largest call of the step, since other calls may be smaller.
            calls = product.macs / (product.n * product.m * product.k * product.batch)
            cast_ms = 0.0
            for operand, reader in ROWWISE.items():
                first = reader if reader in low else COLUMNWISE[operand]
                if product.gemm == first and recipe in RECIPES:
                    cast_ms += cast_time(
                        recipe,
                        operand,
                        elements[operand] * product.batch,
                        device,
                        # Transformer Engine always casts a gradient, and an operand with one scale, rowwise.
                        rowwise=reader in low or operand == "gradient" or recipe in ONE_SCALE,
                        columnwise=COLUMNWISE[operand] in low,
                    ) * (1 if operand == "weight" else calls)
            high_ms = calls * gemm_ms(product.n, product.k, product.m, "", device, product.batch)
            actual_ms = calls * gemm_ms(product.n, product.k, product.m, recipe, device, product.batch)
            times.append(ProductTime(product, recipe, high_ms, actual_ms, cast_ms))
    return times


def gemm_ms(rows: int, k: int, columns: int, recipe: str, device: Device, batch: int = 1) -> float:
    """Return the time of ``batch`` GEMMs without casts, each of rows x k by k x columns; an empty recipe means BF16.

    The time of an unknown recipe is nan. Raises SpeedError if the device does not run the recipe.
    """
    kernel = KERNEL_OF_RECIPE.get(recipe)
    if kernel is None:
        return math.nan
    if recipe:
        device.check_recipe(recipe)
    constants = device.constants
    operations_ms = 2 * batch * rows * k * columns / (device.peak_tflops(kernel) * 1e9 * constants.kernel[kernel])
    moved = batch * ((rows + columns) * k * _BYTES_OF_KERNEL[kernel] + rows * columns * _HIGH_BYTES)
    return max(operations_ms, moved / (device.bandwidth_tbs * 1e9 * constants.bandwidth), _LEAST_MS)


def cast_time(
    recipe: str, operand: str, elements: int, device: Device, *, rowwise: bool = True, columnwise: bool = True
) -> float:
    """Return the milliseconds of a cast of elements of two bytes, with its launches."""
    moved, kernels = cast_bytes(recipe, operand, device.capability, rowwise=rowwise, columnwise=columnwise)
    constants = device.constants
    bytes_ms = elements * moved / (device.bandwidth_tbs * 1e9 * constants.cast[recipe])
    return bytes_ms + kernels * constants.launch_ms


def cast_bytes(
    recipe: str, operand: str, capability: tuple[int, int], *, rowwise: bool = True, columnwise: bool = True
) -> tuple[float, int]:
    """Return the bytes that a cast reads and writes for each element, and the number of kernels that it launches.

    Args:
        operand: a weight has blocks in two dimensions, and no Hadamard transform.
        rowwise, columnwise: whether a GEMM reads the rowwise and the columnwise data.
    """
    directions = rowwise + columnwise
    if recipe == "nvfp4":
        hadamard = columnwise and rowwise and operand != "weight"
        return _HIGH_BYTES * (2 + hadamard) + directions * (0.5 + 3 / 16), 3 + hadamard + directions
    if recipe == "mxfp8" or (recipe == "fp8_block_scaling" and capability >= (10, 0)):
        return _HIGH_BYTES + directions * (1 + 3 / 32), 1 + directions
    if recipe == "fp8_block_scaling":
        return _HIGH_BYTES + directions * (1 + 4 / (128**2 if operand == "weight" else 128)), 1
    written = 1 if takes_any_layout(capability) else directions
    if recipe == "fp8_current_scaling":
        return 2 * _HIGH_BYTES + written, 4
    return _HIGH_BYTES + written, 1


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
        gemms = [(p.gemm, p.n, p.m, p.k, p.macs, p.recipe, p.why) for p in (time.product for time in times)]
        kinds.setdefault((form_of(layer), *gemms), []).append(layer)
    rows = sorted(kinds.values(), key=lambda layers: -len(layers) * Times.of(step.by_layer[layers[0]]).high_ms)
    table = terminal.table("layer", "tokens x in x out", *GEMMS, "all", "times as fast", "reason")
    for layers in rows:
        times = step.by_layer[layers[0]]
        layer_times = Times.of(times)
        reasons = dict.fromkeys([layer_times.why_no_gain, *(time.product.why for time in times)])
        first = times[0].product
        by_gemm = group_by_key((time.product.gemm, time) for time in times)
        cells = [_format_times(Times.of(by_gemm.get(gemm, [])), len(layers)) for gemm in GEMMS]
        table.add_row(
            terminal.cell_lines(fold_names(layers, most=_MOST_NAMES)),
            "x".join(map(str, layer_sizes(first.gemm, first.n, first.m, first.k))),
            *cells,
            _format_times(layer_times, len(layers)),
            _format_speedup(layer_times, ""),
            terminal.cell_lines(filter(None, reasons)),
        )
    terminal.show(table, optional=(*GEMMS, "tokens x in x out"))
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
