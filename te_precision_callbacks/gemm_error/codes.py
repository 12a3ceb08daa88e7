"""Checks the codes and scales of a quantized tensor against the tensor before quantization, on a few blocks.

A code is correct if it is the nearest value of the format to the element divided by its factor; with stochastic
rounding, if it is one of the two neighbors. A scale is correct if it follows from the block's amax by the format's rule
(:mod:`te_precision_callbacks.base.numerics.scaling`).

Elements with inf or nan, the scales of their blocks, and codes with a factor of inf or nan are skipped. In NVFP4, an
inf makes all factors of its tensor inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.formats import E4M3, FloatFormat
from te_precision_callbacks.base.numerics.layouts import BLOCK_1D, BLOCK_2D, MXFP8, PER_TENSOR, Stored
from te_precision_callbacks.base.numerics.nvfp4 import random_hadamard_transform
from te_precision_callbacks.base.numerics.scaling import (
    FLOAT32_MAX,
    fp8_scale,
    mxfp8_scale_inv,
    nvfp4_block_scales,
    nvfp4_encode_scale,
)

SLACK = 1e-3
"""The tolerance of the rounding point, relative to the distance of two values: factors are rounded."""

WINDOW_ROWS = 128
WINDOW_COLUMNS = 1024
"""Rows and columns in memory that are checked at once: whole blocks of each format."""


@dataclass(frozen=True)
class RoundingRules:
    """The rounding of a quantizer.

    Attributes:
        stochastic: whether rounding is stochastic.
        sign_mask: the mask of the random Hadamard transform before quantization, if any.
        square: whether blocks are square although the layout stores a scale for each of their rows.
        scales_follow: whether a scale follows from the amax of the block, or of the tensor with per-tensor scaling.
        power_of_two: whether a float32 scale is rounded down to a power of two.
        amax_epsilon: the minimum amax for a float32 scale.
    """

    stochastic: bool = False
    sign_mask: int | None = None
    square: bool = False
    scales_follow: bool = True
    power_of_two: bool = False
    amax_epsilon: float = 0.0


def rules_of(quantizer: Any, *, columnwise: bool) -> RoundingRules:
    """Return the rounding rules of one of Transformer Engine's quantizers.

    Read from TE 2.20.2, ``pytorch/tensor/{float8,mxfp8,float8_blockwise,nvfp4}_tensor.py``. ``scales_follow`` is False
    for delayed scaling and for scales reduced over ranks. NVFP4's columnwise data of an activation or gradient may be a
    Hadamard transform.
    """
    transformed = columnwise and bool(getattr(quantizer, "with_rht", False))
    follows = type(quantizer).__name__ != "Float8Quantizer"
    for other in ("with_amax_reduction", "nvfp4_use_4over6", "row_scaled_nvfp4"):
        follows = follows and not getattr(quantizer, other, False)
    return RoundingRules(
        stochastic=bool(getattr(quantizer, "stochastic_rounding", False)),
        sign_mask=int(quantizer.rht_matrix_random_sign_mask_t) if transformed else None,
        square=bool(getattr(quantizer, "with_2d_quantization", False)),
        scales_follow=follows and not transformed,
        power_of_two=bool(getattr(quantizer, "force_pow_2_scales", False)),
        amax_epsilon=float(getattr(quantizer, "amax_epsilon", 0.0)),
    )


class CodeCheck(NamedTuple):
    """The result of a check: 0-dim float64 tensors on the device of the codes, which add up over checks.

    Attributes:
        codes, wrong: the numbers of checked and of wrong codes.
        rounded: the number of stochastically rounded codes.
        rounding_bias: the sum over these codes of (|decoded| - |exact|) / the distance of the two neighbors; its
            expected value is 0.
        rounded_to_0, expected_0: the number of these codes that are 0, and its expected value.
        scales, wrong_scales: the numbers of checked and of wrong scales.
    """

    codes: torch.Tensor
    wrong: torch.Tensor
    rounded: torch.Tensor
    rounding_bias: torch.Tensor
    rounded_to_0: torch.Tensor
    expected_0: torch.Tensor
    scales: torch.Tensor
    wrong_scales: torch.Tensor


def check_codes(part: Stored, high: torch.Tensor, rules: RoundingRules, row: int, column: int) -> CodeCheck:
    """Check the codes and scales of a window of one direction of a quantized tensor.

    Args:
        high: the tensor before quantization, in any float dtype; leading dimensions are merged.
        row, column: the position of the window, counted in windows, modulo their number.
    """
    height, width = part.matrix_shape
    rows = _window(height, WINDOW_ROWS, row)
    columns = _window(width, WINDOW_COLUMNS, column)
    matrix = high.detach().reshape(-1, high.shape[-1])
    if part.transposed:
        matrix = matrix.t()
    exact = matrix[rows, columns]
    if rules.sign_mask is not None:
        exact = random_hadamard_transform(exact.to(torch.bfloat16).contiguous(), rules.sign_mask)
    height, width = part.block
    all_factors = part.factors()
    if all_factors.numel() == 1:
        factors = all_factors.reshape(1, 1)
        block = (exact.shape[0], exact.shape[1])
    else:
        factors = _window_values(all_factors, rows, columns, part.block)
        block = (height, width)
    decoded = part.elements(rows)[:, columns].double()
    spread = blocks.repeat_per_block(factors, block, (exact.shape[0], exact.shape[1])).double()
    y = torch.where(spread.isfinite(), exact.double() / spread, torch.nan)
    codes = _codes(decoded, y, part.element_format, stochastic=rules.stochastic)
    scales = _scales(part, matrix, exact, rules, rows, columns) if rules.scales_follow else _none(y)
    return CodeCheck(*codes, *scales)


def _window(extent: int, size: int, number: int) -> slice:
    first = number % max(1, -(-extent // size)) * size
    return slice(first, min(first + size, extent))


def _window_values(blocked: torch.Tensor, rows: slice, columns: slice, block: tuple[int, int]) -> torch.Tensor:
    height, width = block
    return blocked[rows.start // height : -(-rows.stop // height), columns.start // width : -(-columns.stop // width)]


def distance(y: torch.Tensor, number_format: FloatFormat) -> torch.Tensor:
    """Return the distance between the two values of a format around each y, float64."""
    lowest = torch.frexp(torch.tensor(number_format.min_normal, dtype=torch.float64)).exponent.item()
    exponent = torch.frexp(y).exponent.masked_fill(y == 0, int(lowest)).clamp(min=int(lowest))
    exponent = exponent - 1 - number_format.mantissa_bits
    return torch.ldexp(torch.ones_like(y), exponent)


def _codes(
    decoded: torch.Tensor, y: torch.Tensor, number_format: FloatFormat, *, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first six fields of :class:`CodeCheck`; ``decoded`` and ``y`` are float64 without the factor."""
    use = y.isfinite()
    y = torch.where(use, y, 0.0).clamp(-number_format.max, number_format.max)
    decoded = torch.where(use, decoded, 0.0)
    apart = distance(y, number_format)
    most = 1.0 if stochastic else 0.5
    off = (decoded - y).abs() / apart
    wrong = ~(off <= most + SLACK)
    if not stochastic:
        none = torch.zeros((), dtype=torch.float64, device=y.device)
        return use.double().sum(), wrong.double().sum(), none, none, none, none
    share = y.abs() / apart
    counted = use & (y != 0)
    bias = torch.where(counted, (decoded.abs() - y.abs()) / apart, 0.0).nan_to_num()
    expected = torch.where(counted, 1.0 - share, 0.0).clamp(min=0.0)
    zeros = (counted & (decoded == 0)).double().sum()
    return use.double().sum(), wrong.double().sum(), counted.double().sum(), bias.sum(), zeros, expected.sum()


def _scales(
    part: Stored,
    matrix: torch.Tensor,
    exact: torch.Tensor,
    rules: RoundingRules,
    rows: slice,
    columns: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    if part.mode == PER_TENSOR:
        amax = torch.maximum(matrix.amax(), -matrix.amin()).float().reshape(1)  # abs() would copy the tensor
        wanted = torch.reciprocal(_fp8_scale(amax, part, rules, FLOAT32_MAX))
        return _count_wrong(_are_close(part.scales.reshape(1), wanted), amax.isfinite())
    block = (max(part.block),) * 2 if rules.square else part.block
    amaxes = blocks.as_tiles(exact.float().abs(), block).amax((1, 3))
    if rules.square and block != part.block:
        numbers = blocks.block_counts(exact.shape, part.block)
        amaxes = amaxes.repeat_interleave(block[0] // part.block[0], 0)[: numbers[0]]
        amaxes = amaxes.repeat_interleave(block[1] // part.block[1], 1)[:, : numbers[1]]
    scales = _window_values(part.block_scales(), rows, columns, part.block)
    use = amaxes.isfinite()
    if part.mode in (BLOCK_1D, BLOCK_2D):
        largest = min(torch.finfo(matrix.dtype).max, FLOAT32_MAX)
        return _count_wrong(_are_close(scales, torch.reciprocal(_fp8_scale(amaxes, part, rules, largest))), use)
    if part.mode == MXFP8:
        # At a power of two both scales are correct, since the quotient is rounded.
        low, high = (mxfp8_scale_inv(amaxes * (1.0 + sign * 1e-6), part.element_format) for sign in (-1, 1))
        return _count_wrong((scales == low) | (scales == high), use)
    if part.amax is None or part.largest_scale is None:
        return _none(scales)
    tensor_amax = part.amax.reshape(-1, 1)
    wanted = nvfp4_block_scales(amaxes, nvfp4_encode_scale(tensor_amax, part.largest_scale)).double()
    wanted = wanted.clamp(max=E4M3.max)
    right = (scales.double() - wanted).abs() <= distance(wanted, E4M3) * (0.5 + SLACK)
    return _count_wrong(right, use & tensor_amax.isfinite())


def _fp8_scale(amaxes: torch.Tensor, part: Stored, rules: RoundingRules, largest: float) -> torch.Tensor:
    return fp8_scale(
        amaxes,
        part.element_format.max,
        power_of_two=rules.power_of_two,
        epsilon=rules.amax_epsilon,
        largest_scale=largest,
    )


def _are_close(scales: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (scales - wanted).abs() <= 1e-5 * wanted


def _count_wrong(right: torch.Tensor, use: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return use.double().sum(), (use & ~right).double().sum()


def _none(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_zeros((), dtype=torch.float64), like.new_zeros((), dtype=torch.float64)
