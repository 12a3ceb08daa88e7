"""Scales of each recipe, computed from amaxes.

Usage::

    amax = amax_of(tensor)  # float32, shape [1]
    scale = fp8_scale(amax, E4M3.max)  # multiplies the values before the cast
    scale_inv = torch.reciprocal(scale)  # multiplies the codes to get the values back

    encode = nvfp4_encode_scale(amax)  # of the whole tensor
    stored = E4M3.encode(nvfp4_block_scales(block_amaxes(matrix, (1, 16)), encode))
    multiplier = nvfp4_multiplier(E4M3.decode(stored), encode)  # of the elements before the cast
    factors = nvfp4_factors(E4M3.decode(stored), amax)  # of the decoded codes

All tensors are float32, rounded as in the kernels of Transformer Engine 2.20. Tensors are divided only by tensors:
torch computes number / tensor as a reciprocal and a product, which may differ in the last digit. Except
:func:`amax_of`, no function synchronizes, and all can be compiled into a kernel. Sources:
``common/recipe/recipe_common.cuh`` (current and FP8 block scaling), ``common/recipe/delayed_scaling.cu``,
``common/util/ptx_arch_spec.cuh`` (E8M0), ``common/cast/nvfp4/core_nvfp4.cuh``.
"""

from __future__ import annotations

import math

import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E8M0, FloatFormat

FLOAT32_MAX = torch.finfo(torch.float32).max


def amax_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude: float32, [1]; 0 for an empty tensor, or one of only NaN.

    NaN is skipped, infinity is not, as by ``fmaxf`` in ``common/recipe/current_scaling.cu``.
    """
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=tensor.device)
    extremes = tensor.detach().aminmax()
    amax = torch.maximum(-extremes.min, extremes.max).float().reshape(1)
    if amax.isnan():
        magnitudes = tensor.detach().abs()
        amax = magnitudes.masked_fill(magnitudes.isnan(), 0.0).max().float().reshape(1)
    return amax


def fp8_scale(
    amax: torch.Tensor,
    largest_number: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    largest_scale: float = FLOAT32_MAX,
) -> torch.Tensor:
    """Return the scale of current and FP8 block scaling: the largest FP8 number divided by amax.

    Equals ``compute_scale_from_amax``: the scale is 1 for an amax of 0, infinity or NaN.

    Args:
        power_of_two: whether the scale is rounded down to a power of two.
        epsilon: lower bound of amax.
        largest_scale: replaces an infinite scale, before it is rounded down. For FP8 block scaling, the largest number
            of the tensor's dtype.
    """
    amax = amax.clamp(min=epsilon)
    scale = torch.full_like(amax, largest_number) / amax
    scale = torch.where(scale.isinf(), largest_scale, scale)
    if power_of_two:
        # Keep sign and exponent.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0)


def delayed_scaling(
    newest: torch.Tensor, history: torch.Tensor, scale: torch.Tensor, *, most_recent: bool, largest_number: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the amax history and the scale of delayed scaling after a step.

    Equals ``kernel_bulk``: the newest amax is ``newest``, or row 0 of the history if ``newest`` is 0. If the newest
    amax is not 0, the history moves up by one row, the newest amax becomes its last row, and row 0 becomes 0. The scale
    becomes ``largest_number / amax``, at most the largest float32, if amax is finite and above 0; otherwise it is
    unchanged.

    Args:
        newest: [tensors]: the amaxes of the step.
        history: [history length, tensors].
        scale: [tensors].
        most_recent: whether to use the newest amax instead of the largest in the history.
        largest_number: the format's largest number, reduced by the margin: ``max * 2**-margin``.
    """
    newest = torch.where(newest != 0, newest, history[0])
    rolled = torch.cat([history[1:], newest.unsqueeze(0)])
    if most_recent:
        amax = newest
    else:
        # fmaxf skips NaN. A tensor without a new amax keeps its scale, as if its history were 0.
        amax = torch.where(rolled.isnan(), torch.zeros_like(rolled), rolled).amax(dim=0)
        amax = torch.where(newest != 0, amax, torch.zeros_like(amax))
    rolled[0] = 0.0
    usable = amax.isfinite() & (amax > 0)
    renewed = (torch.full_like(amax, largest_number) / amax).clamp(max=FLOAT32_MAX)
    return torch.where(newest != 0, rolled, history), torch.where(usable, renewed, scale.clamp(max=FLOAT32_MAX))


def mxfp8_scale_inv(amaxes: torch.Tensor, element_format: FloatFormat) -> torch.Tensor:
    """Return MXFP8's inverse scales: amax divided by the format's largest number, rounded up to a power of two.

    Equals ``cvt.rp.satfinite.ue8m0x2.f32``: numbers up to 2**-127, including 0, become 2**-127; infinity becomes
    2**127. As in upstream's kernels, the division is a product with the float32 reciprocal. NaN is not allowed.
    """
    bits = (amaxes * (1.0 / element_format.max)).view(torch.int32)
    exponents = bits >> 23
    mantissas = bits & 0x7FFFFF
    above = (mantissas > 0) & ~((exponents == 0) & (mantissas <= 0x400000))
    exponents = (exponents + above).clamp(max=E8M0.max_code)
    return torch.where(exponents == 0, 0x400000, exponents << 23).view(torch.float32)


def e8m0_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Encode powers of two from 2**-127 to 2**127 in E8M0: uint8."""
    return (numbers.view(torch.int32) >> 23).to(torch.uint8)


def nvfp4_encode_scale(
    amax: torch.Tensor, largest_scale: float = E4M3.max, *, nan_spreads: bool = False
) -> torch.Tensor:
    """Return the scale that maps a tensor to the range of E2M1 times E4M3: ``6 * largest_scale / amax``.

    Equals ``compute_global_encode_scaling_factor_FP4``.

    Args:
        largest_scale: 448, or 256 for a tensor quantized with 4over6.
        nan_spreads: whether to compute as the kernel with the fused Hadamard transform does, and the one for master
            weights: the scale is 0 for an infinite amax, and 1 for NaN, instead of 1 and the largest float32.
    """
    scale = torch.full_like(amax, E2M1.max * largest_scale) / amax
    scale = torch.fmin(scale, torch.full_like(scale, FLOAT32_MAX))
    unusable = ~(amax > 0) if nan_spreads else (amax == 0) | (scale == 0)
    return torch.where(unusable, torch.ones_like(scale), scale)


def nvfp4_block_scales(block_amaxes: torch.Tensor, encode_scale: torch.Tensor) -> torch.Tensor:
    """Return each block's scale before rounding to E4M3."""
    return block_amaxes * (encode_scale * (1.0 / E2M1.max))


def nvfp4_multiplier(scales: torch.Tensor, encode_scale: torch.Tensor, *, nan_spreads: bool = False) -> torch.Tensor:
    """Return the multiplier of each block's elements before the cast to E2M1, at most the largest float32.

    Args:
        scales: the blocks' scales, rounded to E4M3.
        encode_scale: the result of :func:`nvfp4_encode_scale`.
        nan_spreads: whether a scale of NaN returns NaN instead of the largest float32.
    """
    multiplier = torch.reciprocal(scales * torch.reciprocal(encode_scale))
    largest = torch.full_like(multiplier, FLOAT32_MAX)
    if nan_spreads:
        return torch.minimum(multiplier, largest)
    return torch.fmin(multiplier, largest)


def nvfp4_factors(scales: torch.Tensor, amax: torch.Tensor, largest_scale: float = E4M3.max) -> torch.Tensor:
    """Return each block's factor from E2M1 number to value.

    Computed in the order of ``common/cast/nvfp4/dequantize_nvfp4.cuh``: ``(scale * amax) * (1 / (6 *
    largest_scale))``.
    """
    return scales * amax * (1.0 / (E2M1.max * largest_scale))
