"""Quantization to NVFP4 (E2M1 codes, an E4M3 scale per 16 elements), and the random Hadamard transform.

Usage::

    codes, scales = quantize(matrix, amax_of(matrix), Rules())

Read from the kernels of Transformer Engine 2.20: ``common/cast/nvfp4/quantize_transpose_nvfp4.cuh``,
``common/transpose/quantize_transpose_vector_blockwise_fp4.cu``, ``common/cast/nvfp4/quantize_4over6_nvfp4.cuh``,
``common/hadamard_transform/row_cast_col_hadamard_transform_cast_fusion.cu``.

With the tensor's amax A, a block's amax a, and the largest finite float32 F, all in float32:

==================== ================================================================================================
encode scale S       min(6 * 448 / A, F); 1 where A or S is 0
block scale          E4M3, nearest and saturating, of min(a * (S * (1 / 6)), F)
multiplier           min(1 / (block scale * (1 / S)), F)
data                 E2M1, nearest (ties to even) and saturating, of element * multiplier; NaN becomes 6, -0 stays -0
==================== ================================================================================================

NaN is skipped in every amax, except in the kernel with the fused Hadamard transform: there, a block with NaN has the
scale NaN, and an infinite A makes every scale 0 or NaN.

The transform spreads an outlier over 16 elements before quantization. Both operands of a GEMM are transformed along the
summed dimension, so the transform cancels out in the product, and is never undone. Sources:
``common/hadamard_transform/*.cu`` and ``pytorch/tensor/nvfp4_tensor.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3
from te_precision_callbacks.base.numerics.layouts import pack_fp4
from te_precision_callbacks.base.numerics.scaling import nvfp4_block_scales, nvfp4_encode_scale, nvfp4_multiplier
from te_precision_callbacks.reference.conversions import block_amaxes, encode_blocks, transform_groups

BLOCK = 16
"""Number of elements that share a scale, and the side of a square block."""


@dataclass(frozen=True)
class Nvfp4Rules:
    """Options of the quantization of a matrix.

    Attributes:
        square: whether 16 x 16 elements share a scale, instead of 1 x 16.
        largest_scale: the largest scale in E4M3.
        better_of_two: the error, "MAE" or "MSE", that selects the better of two scales per block ("4over6").
        error_in_scale_units: whether this error is in units of the E4M3 scale.
        nan_spreads: whether NaN makes the amax of its block NaN.
    """

    square: bool = False
    stochastic: bool = False
    largest_scale: float = E4M3.max
    better_of_two: str | None = None
    error_in_scale_units: bool = False
    nan_spreads: bool = False


def quantize(matrix: torch.Tensor, amax: torch.Tensor, rules: Nvfp4Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of a matrix.

    Args:
        matrix: any float type, [rows, columns]; columns a multiple of 16, and rows too for square blocks.
        amax: float32, [1], or [rows] with an amax per row.

    Returns:
        E2M1 codes, uint8, [rows, columns / 2], two per byte; and E4M3 scale codes, uint8, [rows, columns / 16].
    """
    matrix = matrix.contiguous()
    amax = amax.view(-1, 1)
    encode_scale = nvfp4_encode_scale(amax, rules.largest_scale, nan_spreads=rules.nan_spreads)
    if rules.better_of_two is not None:
        return _quantize_with_better_scale(matrix, amax, encode_scale, rules)
    scales = E4M3.encode(nvfp4_block_scales(_block_amax(matrix, rules), encode_scale))
    random = torch.rand(matrix.shape, dtype=torch.float32, device=matrix.device) if rules.stochastic else None
    return encode_blocks(matrix, _multiplier(scales, encode_scale, rules), (1, BLOCK), E2M1, random), scales


def _quantize_with_better_scale(
    rows: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, rules: Nvfp4Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each block's largest element to 6, or to 4 if the error is then smaller ("4over6")."""
    blocks = rows.float().view(len(rows), -1, BLOCK)
    base = _block_amax(rows, rules)
    base = base / torch.full_like(base, E2M1.max) * encode_scale
    scales_6 = E4M3.encode(base)
    scales_4 = E4M3.encode(base * 1.5)
    codes_6, error_6 = _quantize_candidate(blocks, scales_6, amax, encode_scale, rules)
    codes_4, error_4 = _quantize_candidate(blocks, scales_4, amax, encode_scale, rules)
    take_4 = error_4 < error_6
    codes = torch.where(take_4.unsqueeze(-1), codes_4, codes_6)
    return pack_fp4(codes.view(rows.shape)), torch.where(take_4, scales_4, scales_6)


def _quantize_candidate(
    blocks: torch.Tensor, scale_codes: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, rules: Nvfp4Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = E2M1.encode(blocks * _multiplier(scale_codes, encode_scale, rules).unsqueeze(-1))
    scale = E4M3.decode(scale_codes)
    # Elements of a block first, so that each term of the sum is contiguous over the blocks.
    back = E2M1.decode(codes).movedim(-1, 0) * scale
    elements = blocks.movedim(-1, 0)
    if rules.error_in_scale_units:
        # Upstream multiplies in float16, which is exact: 2 and 4 significant bits.
        difference = back - elements * encode_scale
    else:
        back = back * amax
        difference = back / torch.full_like(back, E2M1.max * rules.largest_scale) - elements
    error = difference.square() if rules.better_of_two == "MSE" else difference.abs()
    total = torch.zeros_like(scale)
    for term in error:
        total += term
    if rules.square:
        # In the order of a warp's tree reduction: halves are added until one element is left.
        halves = total.view(-1, BLOCK, total.shape[-1])
        while halves.shape[1] > 1:
            halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
        total = halves.expand(-1, BLOCK, -1).reshape(total.shape)
    return codes, total


def _multiplier(scale_codes: torch.Tensor, encode_scale: torch.Tensor, rules: Nvfp4Rules) -> torch.Tensor:
    return nvfp4_multiplier(E4M3.decode(scale_codes), encode_scale, nan_spreads=rules.nan_spreads)


def _block_amax(rows: torch.Tensor, rules: Nvfp4Rules) -> torch.Tensor:
    side = BLOCK if rules.square else 1
    return block_amaxes(rows, (side, BLOCK), nan_spreads=rules.nan_spreads).repeat_interleave(side, 0)


SIZE = 16


def random_hadamard_transform(matrix: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Multiply each group of 16 along the last dimension by ``diag(signs) @ H / 4``: bfloat16, same shape.

    H is the Hadamard matrix of size 16 in Sylvester's order; bit r of the mask is the sign of row r. The kernels sum in
    float32 on the tensor cores, and round to bfloat16. This function sums in float64, so that the order of terms does
    not matter, and rounds to float32, then to bfloat16. It always rounds to bfloat16, which upstream's fused kernel
    skips with ``NVTE_USE_FAST_MATH=1``.
    """
    if matrix.numel():
        return transform_groups(matrix, _matrix(sign_mask, matrix.device))
    return matrix.contiguous()


@functools.cache
def _matrix(sign_mask: int, device: torch.device) -> torch.Tensor:
    rows = []
    for row in range(SIZE):
        factor = (-1.0) ** (sign_mask >> row & 1) / 4.0
        rows.append([(-1.0) ** (row & column).bit_count() * factor for column in range(SIZE)])
    return torch.tensor(rows, dtype=torch.float64, device=device)
