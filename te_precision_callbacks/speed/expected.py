"""Expected times of GEMMs, in BF16 and as they run.

    time_products([(product, "fp8_current_scaling") for product in products], device_named("b300"))

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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import COLUMNWISE, ONE_SCALE, RECIPES, ROWWISE
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.devices import KERNEL_OF_RECIPE, Device
from te_precision_callbacks.te.gemm_shapes import layer_sizes, takes_any_layout

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
        figures = {"high_ms": self.high_ms, "low_ms": self.low_ms, "cast_ms": self.cast_ms, "speedup": self.speedup}
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
                is_first = product.gemm == reader or (product.gemm == COLUMNWISE[operand] and reader not in low)
                if is_first and recipe in RECIPES:
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
