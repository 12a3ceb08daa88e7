"""Cost of one matrix product: operations, bytes and launches, and from them milliseconds.

    shape = Shape(15872, 4096, 12288)       # tokens x in x out: m, k and n
    device = device_named("b300")
    gemm_ms(shape, "", device)                              # in BF16
    gemm_ms(shape, "fp8_current_scaling", device)           # a GEMM of quantized operands
    cast_time("fp8_current_scaling", "weight", 4096 * 12288, device).ms

A kernel takes the time of its operations at a share of the peak, or of its bytes at a share of the bandwidth,
whichever is longer, and at least the time of a launch. A cast takes the time of its bytes, and a launch for each of its
kernels. The shares and the launch time are :class:`~te_precision_callbacks.speed.devices.Constants`.

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

from typing import NamedTuple

from te_precision_callbacks.base.numerics.gemm_shapes import takes_any_layout
from te_precision_callbacks.base.vocabulary import ONE_SCALE, OperandName
from te_precision_callbacks.speed.devices import HIGH, KERNEL_OF_RECIPE, Device

_HIGH_BYTES = 2

_LEAST_MS = 0.002
"""Time of the smallest kernel: torchao's ``roofline_utils.py``, measured on an H100."""

_BYTES_OF_KERNEL = {HIGH: 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


class Shape(NamedTuple):
    """Shape of a GEMM: the result has m rows of n elements, each a sum of k products; a call runs ``batch`` GEMMs.

    In a forward, m is tokens, k in_features, and n out_features; ``str()`` is tokens x in x out.
    """

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n * self.batch

    def __str__(self) -> str:
        text = f"{self.m}x{self.k}x{self.n}"
        if self.batch > 1:
            return f"{self.batch} x {text}"
        return text


class CastTime(NamedTuple):
    """Milliseconds of a cast, and the part of them that its launches take."""

    ms: float
    launch_ms: float


def cast_bytes(
    recipe: str,
    operand: OperandName,
    elements: int,
    capability: tuple[int, int],
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[float, int]:
    """Return the bytes that a cast reads and writes, and the number of kernels that it launches.

    Args:
        recipe: one of :data:`~te_precision_callbacks.base.vocabulary.RECIPES`.
        operand: a weight has blocks in two dimensions, and no Hadamard transform.
        elements: the number of elements, of two bytes each.
        rowwise, columnwise: whether a GEMM reads the rowwise and the columnwise data.
    """
    directions = rowwise + columnwise
    reads = 1
    kernels = 1
    if recipe == "fp8_block_scaling" and capability >= (10, 0):
        recipe = "mxfp8"  # block scaling is emulated by MXFP8
    if recipe in ONE_SCALE:
        written: float = directions
        if takes_any_layout(capability):
            written = 1
        if recipe == "fp8_current_scaling":
            reads = 2
            kernels = 4
    elif recipe == "fp8_block_scaling":
        block = 128
        if operand == "weight":
            block *= 128
        written = directions * (1 + 4 / block)
    elif recipe == "mxfp8":
        written, kernels = directions * (1 + 1 / 32 + 2 / 32), 1 + directions  # 2 / 32: swizzled scales
    else:
        hadamard = columnwise and rowwise and operand != "weight"
        reads = 2 + hadamard
        kernels = 3 + hadamard + directions
        written = directions * (0.5 + 1 / 16 + 2 / 16)
    return elements * (_HIGH_BYTES * reads + written), kernels


def cast_time(
    recipe: str, operand: OperandName, elements: int, device: Device, *, rowwise: bool = True, columnwise: bool = True
) -> CastTime:
    """Return the time of a cast, from its bytes and launches; arguments as in :func:`cast_bytes`."""
    moved, kernels = cast_bytes(recipe, operand, elements, device.capability, rowwise=rowwise, columnwise=columnwise)
    constants = device.constants
    launch_ms = kernels * constants.launch_ms
    return CastTime(moved / (device.bandwidth_tbs * 1e9 * constants.cast[recipe]) + launch_ms, launch_ms)


def gemm_ms(shape: Shape, recipe: str, device: Device) -> float:
    """Return the time of a GEMM without casts; an empty recipe means BF16.

    Raises:
        SpeedError: the device does not run the recipe.
    """
    kernel = HIGH
    if recipe:
        device.check_recipe(recipe)
        kernel = KERNEL_OF_RECIPE[recipe]
    constants = device.constants
    read = shape.batch * (shape.m * shape.k + shape.k * shape.n) * _BYTES_OF_KERNEL[kernel]
    written = shape.batch * shape.m * shape.n * _HIGH_BYTES  # the result is in BF16
    operations_ms = shape.operations / (device.peak_tflops(kernel) * 1e9 * constants.kernel[kernel])
    bytes_ms = (read + written) / (device.bandwidth_tbs * 1e9 * constants.bandwidth)
    return max(operations_ms, bytes_ms, _LEAST_MS)
