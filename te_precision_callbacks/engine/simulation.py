"""Simulated quantization: rounds blocks by a recipe, without storing codes.

Nothing here synchronizes, and all functions can be compiled into a kernel. Rounding is to nearest. NVFP4 is simulated
without the random Hadamard transform and the better of two scales ("4over6"). Delayed scaling is not supported, since
its scale depends on earlier steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.blocks import Block, as_matrix, join_blocks, split_into_blocks
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from te_precision_callbacks.base.numerics.scaling import (
    FLOAT32_MAX,
    fp8_scale,
    mxfp8_scale_inv,
    nvfp4_block_scales,
    nvfp4_encode_scale,
    nvfp4_factors,
    nvfp4_multiplier,
)

FLOAT32_SCALES = (E8M0.min_subnormal, E8M0.max)
"""Limits of MXFP8's scales, 2^-127 and 2^127; also of float32 scales: 1 / amax, at most the largest float32 or the
largest power of two below it."""


class QuantizerSettings(NamedTuple):
    """Options of a quantizer.

    Attributes:
        e5m2: whether FP8 elements are E5M2 instead of E4M3.
        square: whether blocks are squares instead of parts of a row.
        power_of_two: whether a float32 scale is rounded down to a power of two.
        amax_epsilon: lower bound of amax for float32 scales.
    """

    e5m2: bool = False
    square: bool = False
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    @property
    def fp8(self) -> FloatFormat:
        if self.e5m2:
            return E5M2
        return E4M3


class Rounded(NamedTuple):
    """Rounded blocks.

    Attributes:
        values: [blocks, elements].
        factors: [blocks, 1], from code to value.
        scales: [blocks, 1], as stored.
    """

    values: torch.Tensor
    factors: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Recipe:
    """A recipe without state: its result depends only on the tensor.

    Attributes:
        side: number of elements along a block; None for the whole tensor.
        limits: lower and upper limit of the stored scales.
        square_weights: whether the blocks of a weight are squares by default.
        hybrid: whether gradients are E5M2 by default (``Format.HYBRID``). Read from TE 2.20.2,
            ``common/recipe/__init__.py``: ``fp8_format`` of each recipe.
        power_of_two: whether float32 scales are powers of two by default.
    """

    side: int | None
    limits: tuple[float, float] = (0.0, math.inf)
    square_weights: bool = False
    hybrid: bool = False
    power_of_two: bool = False

    def block(self, settings: QuantizerSettings) -> Block | None:
        if self.side is None:
            return None
        return (self.side if settings.square else 1, self.side)

    def defaults(self, tensor: str, *, e5m2: bool | None = None) -> QuantizerSettings:
        """Return the recipe's options for a tensor; an ``e5m2`` of None is the recipe's default."""
        return QuantizerSettings(
            e5m2=(self.hybrid and tensor == "gradient") if e5m2 is None else e5m2,
            square=self.square_weights and tensor == "weight",
            power_of_two=self.power_of_two,
        )


SIMULATED: dict[str, Recipe] = {
    "fp8_current_scaling": Recipe(None, hybrid=True),
    "mxfp8": Recipe(32, FLOAT32_SCALES),
    "fp8_block_scaling": Recipe(128, FLOAT32_SCALES, square_weights=True, power_of_two=True),
    "nvfp4": Recipe(16, (0.0, E4M3.max), square_weights=True),
}


def round_blocks(recipe: str, blocks: torch.Tensor, tensor_amax: torch.Tensor, settings: QuantizerSettings) -> Rounded:
    """Quantize and dequantize blocks by a recipe.

    Args:
        blocks: [blocks, elements], any float dtype. Non-finite elements count as 0; elements beyond float32's range are
            clamped to it.
        tensor_amax: float32, one element: the largest finite magnitude of the tensor.
    """
    x = blocks if blocks.dtype == torch.float64 else blocks.to(torch.float32)
    x = torch.where(x.abs() < math.inf, x, 0.0).clamp(-FLOAT32_MAX, FLOAT32_MAX).to(torch.float32)
    amax = x.abs().amax(1, keepdim=True)
    if recipe == "mxfp8":
        return _round_mxfp8(x, amax, settings.fp8)
    if recipe == "nvfp4":
        encode = nvfp4_encode_scale(tensor_amax)
        scales = E4M3.round(nvfp4_block_scales(amax, encode))
        factors = nvfp4_factors(scales, tensor_amax)
        return Rounded(E2M1.round(x * nvfp4_multiplier(scales, encode)) * factors, factors, scales)
    largest_scale = FLOAT32_MAX
    if recipe == "fp8_current_scaling":
        amax = tensor_amax.reshape(1, 1)
    else:  # FP8 block scaling clamps a scale beyond float32 to the largest number of the tensor's dtype
        largest_scale = min(torch.finfo(blocks.dtype).max, FLOAT32_MAX)
    scale = fp8_scale(
        amax,
        settings.fp8.max,
        power_of_two=settings.power_of_two,
        epsilon=settings.amax_epsilon,
        largest_scale=largest_scale,
    )
    scale_inv = torch.reciprocal(scale)
    return Rounded(settings.fp8.round(x * scale) * scale_inv, scale_inv, scale_inv)


def _round_mxfp8(x: torch.Tensor, amax: torch.Tensor, fp8: FloatFormat) -> Rounded:
    scale_inv = mxfp8_scale_inv(amax, fp8)
    return Rounded(fp8.round(x * torch.reciprocal(scale_inv)) * scale_inv, scale_inv, scale_inv)


def round_to_mxfp8(values: torch.Tensor, *, e5m2: bool, columnwise: bool) -> torch.Tensor:
    """Round a tensor to MXFP8 and back: float32, the same shape; blocks at an edge may be partial.

    As in the recipe, NaN stays NaN, and does not affect the scale of its block. inf stays inf, and the scale of its
    block becomes 2^127, so that most other elements round to 0.

    Args:
        columnwise: whether blocks have 32 rows instead of 32 elements of the last dimension.
    """
    matrix = as_matrix(values).to(torch.float32)
    block = (32, 1) if columnwise else (1, 32)
    blocks = split_into_blocks(matrix, block, 0.0)
    amax = blocks.abs().masked_fill(blocks.isnan(), 0.0).amax(1, keepdim=True)
    rounded = _round_mxfp8(blocks, amax, QuantizerSettings(e5m2).fp8)
    return join_blocks(rounded.values, block, (matrix.shape[0], matrix.shape[1])).reshape(values.shape)
