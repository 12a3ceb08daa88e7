"""NVFP4: E2M1 data, an E4M3 scale for 16 elements, and a float32 amax for the whole tensor.

Usage::

    casting = BlockScaling()
    out = casting.create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    casting.write(quantizer, tensor, out)
    out._rowwise_data  # uint8, [..., columns / 2]: two codes a byte, the even one in the low half
    out._columnwise_data  # uint8, [columns, rows / 2]: the transpose, quantized by itself
    out._rowwise_scale_inv  # E4M3 as uint8, padded with zeros to multiples of 128 x 4

``pytorch/csrc/quantizer.cpp``, ``NVFP4Quantizer``, and the kernels that it picks (TE 2.20):
``common/cast/nvfp4/quantize_transpose_nvfp4.cuh``, ``common/transpose/quantize_transpose_vector_blockwise_fp4.cu``,
``common/cast/nvfp4/quantize_4over6_nvfp4.cuh``,
``common/hadamard_transform/row_cast_col_hadamard_transform_cast_fusion.cu``.

With A the tensor's amax, a the block's, and F the largest finite float32, all in float32:

==================== ================================================================================================
encode scale S       min(6 * 448 / A, F); 1 where A or S is 0
a block's scale      E4M3, nearest and saturating, of min(a * (S * (1 / 6)), F)
what multiplies it   min(1 / (the block's scale * (1 / S)), F)
data                 E2M1, nearest (ties to even) and saturating, of element * multiplier; NaN becomes 6, -0 stays -0
==================== ================================================================================================

NaN is passed over in every amax. Only the kernel that fuses the Hadamard transform is different: there a block with NaN
has the scale NaN, and an infinite A makes every scale 0 or NaN; see :func:`_is_fused`.

``NVTE_USE_FAST_MATH=1``, which has the GPU divide approximately, changes nothing here;
``NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1`` does what it does upstream.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.numerics.formats import E2M1, E4M3
from te_precision_callbacks.numerics.hadamard import random_hadamard_transform
from te_precision_callbacks.numerics.layouts import SWIZZLE_COLUMNS, SWIZZLE_ROWS, packed
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import (
    build,
    empty,
    is_noop,
    matrix_shape,
    overwrite,
    round_up,
    usages,
    zeros,
)
from te_precision_callbacks.reference.extension.scaling import FLOAT32_MAX, amax_of
from te_precision_callbacks.reference.extension.swizzling import as_stored
from te_precision_callbacks.reference.target import capability

BLOCK = 16
"""Elements that share a scale, and the side of a square block."""

# What is quantized at once: all that is made of it on the way fits into a cache.
_ELEMENTS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class _Rules:
    """How one matrix is quantized.

    Attributes:
        square: whether 16 x 16 elements share a scale, not 1 x 16.
        stochastic: whether data is rounded up or down at random.
        largest_scale: E4M3 number that stands for the largest scale.
        better_of_two: whether each block takes the better of two scales ("4over6"), by the error "MAE" or "MSE".
        nan_spreads: whether a NaN makes its block's amax NaN.
    """

    square: bool = False
    stochastic: bool = False
    largest_scale: float = 448.0
    better_of_two: str | None = None
    nan_spreads: bool = False


class BlockScaling:
    """NVFP4 in all that its quantizer offers."""

    rounds_first = True
    sums_unrounded = False

    def takes_amax(self, quantizer: Any) -> bool:
        """Unless it is measured in a way of its own: after the Hadamard transform, or in each row."""
        return not (quantizer.with_rht or quantizer.row_scaled_nvfp4)

    def create(
        self,
        quantizer: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> Any:
        """An NVFP4Tensor, or its storage class for an internal quantizer: scales and amaxes 0, data not written.

        Raises:
            ReferenceBackendError: rows or columns that are no multiple of 16; row-scaled without rowwise usage.
        """
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
        from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

        _check_usage(quantizer)
        _check_shape(shape)
        buffers: dict[str, torch.Tensor | None] = {}
        for direction, wanted in usages(quantizer).items():
            buffers |= {
                name: _buffer(quantizer, name, shape, device, pin_memory) if wanted else None
                for name in _names(direction)
            }
        return build(
            NVFP4Tensor,
            NVFP4TensorStorage,
            quantizer,
            shape,
            dtype,
            device,
            **buffers,
            fp4_dtype=quantizer.dtype,
            with_gemm_swizzled_scales=_writes_swizzled(quantizer, shape),
            row_scaled_nvfp4=quantizer.row_scaled_nvfp4,
            nvfp4_use_4over6=quantizer.nvfp4_use_4over6,
            nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
        )

    def fit(self, quantizer: Any, out: Any) -> None:
        """Give ``out`` the buffers that the quantizer's usages ask for, and only those."""
        if not is_nvfp4(out):
            raise ReferenceBackendError(
                f"{type(quantizer).__name__} writes to an NVFP4Tensor, not to a {type(out).__name__}."
            )
        data = out._rowwise_data if out._rowwise_data is not None else out._columnwise_data
        if data is None:
            raise ReferenceBackendError(f"The {type(out).__name__} to quantize into has no data.")
        shape = _logical_shape(out)
        _check_usage(quantizer)
        _check_shape(shape)
        for direction, wanted in usages(quantizer).items():
            for name in _names(direction):
                there = getattr(out, f"_{name}")
                if not wanted:
                    setattr(out, f"_{name}", None)
                elif there is None or ("amax" in name and there.numel() != _amax_length(quantizer, direction, shape)):
                    setattr(out, f"_{name}", _buffer(quantizer, name, shape, data.device))
        out._row_scaled_nvfp4 = quantizer.row_scaled_nvfp4
        out._nvfp4_use_4over6 = quantizer.nvfp4_use_4over6
        out._nvfp4_e4m3_max = quantizer.nvfp4_e4m3_max

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        noop: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize both directions that ``out`` has buffers for.

        Stochastic rounding draws from torch's generator of the tensor's device, so that ``torch.manual_seed`` makes it
        repeatable: a number is rounded up with the probability of its distance from the next smaller E2M1 number, to
        24 bits. A GPU draws from Philox with a seed and an offset of its own, with as few as 8 bits a number, so its
        bytes are others and their distribution is the same.

        Args:
            quantizer: the quantizer.
            source: float32, float16 or bfloat16; bfloat16 for the Hadamard transform.
            out: where to.
            noop: float32, [1]; 1 leaves data and scales, and without a Hadamard transform amaxes too, as they are.
            amax: float32, [1], of the source, where :meth:`takes_amax`.

        Raises:
            ReferenceBackendError: options that upstream does not do together, or not for this source.
        """
        if source.numel() == 0:
            if amax is not None:
                _reduce(quantizer, out)
            return
        matrix = source.detach().reshape(matrix_shape(source.shape))
        _check_options(quantizer, matrix, out)
        transposed = matrix.t() if out._columnwise_data is not None else None
        if quantizer.with_rht and transposed is not None:
            transposed = random_hadamard_transform(transposed, int(quantizer.rht_matrix_random_sign_mask_t))
        # Upstream measures for a Hadamard transform whatever the flag says; and collectives take part in any case.
        skipped = is_noop(noop)
        if quantizer.with_rht or not skipped:
            _measure(quantizer, matrix, transposed, out, amax)
        _reduce(quantizer, out)
        if skipped:
            return
        rules = _rules(quantizer, matrix)
        # Only now: with the no-op flag the scales stay in the order that they were in.
        out._with_gemm_swizzled_scales = _writes_swizzled(quantizer, matrix.shape)
        if out._rowwise_data is not None:
            _store(out, "rowwise", *_quantized(matrix, out._amax_rowwise, rules))
        if transposed is not None:
            _store(out, "columnwise", *_quantized(transposed, out._amax_columnwise, rules))


def is_nvfp4(tensor: Any) -> bool:
    """Whether this is an NVFP4Tensor, its storage class, or something with the same buffers."""
    return hasattr(tensor, "_fp4_dtype") and hasattr(tensor, "_amax_rowwise")


def _quantized(matrix: torch.Tensor, amax: torch.Tensor, rules: _Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of a matrix.

    Args:
        matrix: any float type, [rows, columns]; both multiples of 16, rows for square blocks only.
        amax: float32, [1], or [rows] where each row has its own.
        rules: how.

    Returns:
        E2M1 codes, uint8, [rows, columns / 2], two a byte; and E4M3 codes of the scales, uint8, [rows, columns / 16].
    """
    rows, columns = matrix.shape
    codes = matrix.new_empty((rows, columns // 2), dtype=torch.uint8)
    scales = matrix.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    encode_scale = encode_scale_of(amax.view(-1, 1), rules.largest_scale, nan_spreads=rules.nan_spreads)
    step = round_up(max(1, _ELEMENTS_AT_ONCE // columns), BLOCK)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        blocks = matrix[part].contiguous().float().view(-1, columns // BLOCK, BLOCK)
        each = slice(None) if amax.numel() == 1 else part
        if rules.better_of_two is None:
            found, scale = _one_scale(blocks, encode_scale[each], rules)
        else:
            found, scale = _better_of_two_scales(blocks, amax.view(-1, 1)[each], encode_scale[each], rules)
        codes[part] = packed(found.view(-1, columns))
        scales[part] = scale
    return codes, scales


def encode_scale_of(amax: torch.Tensor, largest_scale: float = 448.0, *, nan_spreads: bool = False) -> torch.Tensor:
    """What brings a tensor into the range of E2M1 times E4M3: ``6 * largest_scale / amax``.

    ``compute_global_encode_scaling_factor_FP4`` of ``common/cast/nvfp4/core_nvfp4.cuh`` (TE 2.20).

    Args:
        amax: float32, any shape.
        largest_scale: 448, or 256 for a tensor of 4over6.
        nan_spreads: whether it is computed as in the fused kernel of the Hadamard transform, where the scale of an
            infinite amax is 0 and that of NaN is 1, not 1 and the largest float32.

    Returns:
        float32, same shape.
    """
    scale = torch.full_like(amax, E2M1.max * largest_scale) / amax
    scale = torch.fmin(scale, torch.full_like(scale, FLOAT32_MAX))
    unusable = ~(amax > 0) if nan_spreads else (amax == 0) | (scale == 0)
    return torch.where(unusable, torch.ones_like(scale), scale)


def block_scale_codes(block_amax: torch.Tensor, encode_scale: torch.Tensor) -> torch.Tensor:
    """The E4M3 codes of blocks' scales: uint8, the shape of ``block_amax`` (float32)."""
    scale = block_amax * (encode_scale * (1.0 / E2M1.max))
    return E4M3.encode(torch.minimum(scale, torch.full_like(scale, FLOAT32_MAX)))


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes: ties to even, saturating, -0 is -0, NaN is the largest number.

    What ``cvt.rn.satfinite.e2m1x2.f32`` does (PTX ISA 8.6). TE's pure-torch reference gives 0 for -0 and for NaN.

    Args:
        values: float32, contiguous, any shape.

    Returns:
        uint8, same shape, one code a byte.
    """
    bits = values.view(torch.int32)
    # All numbers where the code changes end in more than 16 zero bits, so what is below only says: a little more.
    key = (bits >> 16) & 0xFFFF
    key |= (bits & 0xFFFF) != 0
    return _code_table(values.device).index_select(0, key.view(-1)).view(values.shape)


@functools.cache
def _code_table(device: torch.device) -> torch.Tensor:
    """The code of each float32 number whose low half is 0, by its high half."""
    high = torch.arange(1 << 16, dtype=torch.int32)
    values = torch.where(high < 1 << 15, high, high - (1 << 16)).mul(1 << 16).view(torch.float32)
    numbers = torch.tensor([E2M1.value(code) for code in range(8)])
    codes = torch.searchsorted(numbers, E2M1.round(values).abs()).clamp(max=7)
    codes = torch.where(values.isnan(), 7, codes + 8 * torch.signbit(values))
    return codes.to(torch.uint8).to(device)


def _stochastic_codes(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs().clamp(max=E2M1.max)
    # Numbers are 0.5 apart below 2, 1 below 4, 2 above.
    apart = torch.where(magnitude >= 4.0, 2.0, torch.where(magnitude >= 2.0, 1.0, 0.5))
    below = torch.floor(magnitude / apart) * apart
    up = torch.rand_like(magnitude) < (magnitude - below) / apart
    return e2m1_codes(torch.copysign(below + apart * up, values))


def _one_scale(blocks: torch.Tensor, encode_scale: torch.Tensor, rules: _Rules) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scale_codes(_block_amax(blocks, rules), encode_scale)
    values = blocks * _multiplier(E4M3.decode(scales), encode_scale, rules).unsqueeze(-1)
    return (_stochastic_codes(values) if rules.stochastic else e2m1_codes(values)), scales


def _better_of_two_scales(
    blocks: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, rules: _Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """4over6: each block's largest element becomes 6, or 4 where the error of the block is smaller then."""
    base = _block_amax(blocks, rules)
    base = base / torch.full_like(base, E2M1.max) * encode_scale
    scales_6, scales_4 = E4M3.encode(base), E4M3.encode(base * 1.5)
    codes_6, error_6 = _candidate(blocks, scales_6, amax, encode_scale, rules)
    codes_4, error_4 = _candidate(blocks, scales_4, amax, encode_scale, rules)
    take_4 = error_4 < error_6
    return torch.where(take_4.unsqueeze(-1), codes_4, codes_6), torch.where(take_4, scales_4, scales_6)


def _candidate(
    blocks: torch.Tensor, scale_codes: torch.Tensor, amax: torch.Tensor, encode_scale: torch.Tensor, rules: _Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes under one choice of scales, and the error of each block: float32, summed in the kernel's order."""
    scale = E4M3.decode(scale_codes)
    codes = e2m1_codes(blocks * _multiplier(scale, encode_scale, rules).unsqueeze(-1))
    # In the order of the sum, so that each term of all blocks is in one piece.
    back = E2M1.decode(codes).movedim(-1, 0) * scale
    elements = blocks.movedim(-1, 0)
    if os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") not in ("", "0"):
        # In units of the E4M3 scale. Upstream multiplies in float16, which is exact: 2 and 4 significant bits.
        difference = back - elements * encode_scale
    else:
        back = back * amax
        difference = back / torch.full_like(back, E2M1.max * rules.largest_scale) - elements
    error = difference.square() if rules.better_of_two == "MSE" else difference.abs()
    total = torch.zeros_like(scale)
    for term in error:
        total += term
    if rules.square:
        # The tree of a warp's reduction: halves are added until one is left.
        halves = total.view(-1, BLOCK, total.shape[-1])
        while halves.shape[1] > 1:
            halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
        total = halves.expand(-1, BLOCK, -1).reshape(total.shape)
    return codes, total


def _multiplier(scale: torch.Tensor, encode_scale: torch.Tensor, rules: _Rules) -> torch.Tensor:
    multiplier = torch.reciprocal(scale * torch.reciprocal(encode_scale))
    largest = torch.full_like(multiplier, FLOAT32_MAX)
    return torch.minimum(multiplier, largest) if rules.nan_spreads else torch.fmin(multiplier, largest)


def _block_amax(blocks: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """The largest magnitude of each block: float32, [rows, blocks]; the same for all rows of a square block."""
    amax = blocks.abs().amax(dim=-1)
    if not rules.nan_spreads and bool(amax.isnan().any()):
        amax = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1)
    if rules.square:
        squares = amax.view(-1, BLOCK, amax.shape[-1]).amax(dim=1, keepdim=True)
        amax = squares.expand(-1, BLOCK, -1).reshape(amax.shape)
    return amax


def _rules(quantizer: Any, matrix: torch.Tensor) -> _Rules:
    fused = _is_fused(quantizer, matrix.shape)
    return _Rules(
        # The fused kernel knows no square blocks.
        square=quantizer.with_2d_quantization and not fused,
        stochastic=quantizer.stochastic_rounding,
        largest_scale=float(quantizer.nvfp4_e4m3_max),
        better_of_two=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
        nan_spreads=fused,
    )


def _is_fused(quantizer: Any, shape: Sequence[int]) -> bool:
    """Whether a GPU transforms and quantizes in one kernel: ``NVFP4Quantizer::is_eligible_for_rht_cast_fusion``."""
    rows, columns = matrix_shape(shape)
    return bool(quantizer.with_rht) and rows % 64 == 0 and columns % 128 == 0 and (10, 0) <= capability() <= (11, 0)


def _writes_swizzled(quantizer: Any, shape: Sequence[int]) -> bool:
    """Whether a GPU's kernel writes the scales in the order of a GEMM: ``nvfp4_emits_gemm_swizzled_scales``.

    Where it does not, and the quantizer wants that order, they are swizzled afterwards, by most callers.
    """
    if not quantizer.optimize_for_gemm:
        return False
    if quantizer.with_rht:
        return _is_fused(quantizer, shape)
    rows, columns = matrix_shape(shape)
    return bool(
        quantizer.with_2d_quantization
        and not quantizer.row_scaled_nvfp4
        and not quantizer.nvfp4_use_4over6
        and rows % 128 == 0
        and columns % 128 == 0
        and (10, 0) <= capability() <= (11, 0)
    )


def _measure(
    quantizer: Any, matrix: torch.Tensor, transposed: torch.Tensor | None, out: Any, amax: torch.Tensor | None
) -> None:
    """Write the amax of each direction."""
    if quantizer.row_scaled_nvfp4:
        overwrite(out._amax_rowwise, _amax_of_rows(matrix))
        if transposed is not None:
            overwrite(out._amax_columnwise, _amax_of_rows(transposed))
        return
    if amax is None:
        amax = amax_of(matrix)
    if out._amax_rowwise is not None:
        overwrite(out._amax_rowwise, amax)
    if transposed is not None:
        overwrite(out._amax_columnwise, amax_of(transposed) if quantizer.with_rht else amax)


def _amax_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    magnitudes = matrix.abs()
    amax = magnitudes.amax(dim=1)
    if bool(amax.isnan().any()):
        amax = magnitudes.masked_fill(magnitudes.isnan(), 0.0).amax(dim=1)
    return amax.float()


def _reduce(quantizer: Any, out: Any) -> None:
    if not quantizer.with_amax_reduction:
        return
    group = quantizer._canonicalized_amax_reduction_group()
    for amax in (out._amax_rowwise, out._amax_columnwise):
        if amax is not None:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)


def _store(out: Any, direction: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    data, scale_inv = getattr(out, f"_{direction}_data"), getattr(out, f"_{direction}_scale_inv")
    overwrite(data, codes.view(data.shape))
    swizzled = out._with_gemm_swizzled_scales
    overwrite(scale_inv, as_stored(scales, scale_inv.shape, along_columns=False, swizzled=swizzled))


def _names(direction: str) -> tuple[str, str, str]:
    return f"{direction}_data", f"{direction}_scale_inv", f"amax_{direction}"


def _buffer(
    quantizer: Any, name: str, shape: Sequence[int], device: torch.device, pin_memory: bool = False
) -> torch.Tensor:
    direction = "columnwise" if "columnwise" in name else "rowwise"
    rows, columns = matrix_shape(shape)
    if direction == "columnwise":
        rows, columns = columns, rows
    if "amax" in name:
        return zeros([_amax_length(quantizer, direction, shape)], torch.float32, device, pin_memory)
    if "scale" in name:
        scale_shape = [round_up(rows, SWIZZLE_ROWS), round_up(columns // BLOCK, SWIZZLE_COLUMNS)]
        return zeros(scale_shape, torch.uint8, device, pin_memory)
    # Columnwise data is a matrix, whatever the leading dimensions.
    leading = [rows] if direction == "columnwise" else shape[:-1]
    return empty([*leading, columns // 2], torch.uint8, device, pin_memory)


def _amax_length(quantizer: Any, direction: str, shape: Sequence[int]) -> int:
    if not quantizer.row_scaled_nvfp4:
        return 1
    return matrix_shape(shape)[0 if direction == "rowwise" else 1]


def _logical_shape(out: Any) -> list[int]:
    if out._rowwise_data is not None:
        *leading, half = out._rowwise_data.shape
        return [*leading, half * 2]
    columns, *leading, half = out._columnwise_data.shape
    return [*leading, half * 2, columns]


def _check_shape(shape: Sequence[int]) -> None:
    if any(size % BLOCK for size in matrix_shape(shape)):
        raise ReferenceBackendError(
            f"NVFP4 needs rows and columns that are multiples of {BLOCK}; a tensor of shape {tuple(shape)} has "
            f"{' x '.join(str(size) for size in matrix_shape(shape))}."
        )


def _check_usage(quantizer: Any) -> None:
    if quantizer.row_scaled_nvfp4 and not quantizer.rowwise_usage:
        raise ReferenceBackendError("Row-scaled NVFP4 quantization requires rowwise usage.")


def _check_options(quantizer: Any, matrix: torch.Tensor, out: Any) -> None:
    """What upstream refuses, in ``quantizer.cpp`` and in ``common/cast/dispatch/quantize.cuh``."""
    refused = []
    if quantizer.nvfp4_use_4over6:
        refused = [("4over6", "the random Hadamard transform", quantizer.with_rht)]
        refused += [("4over6", "stochastic rounding", quantizer.stochastic_rounding)]
    if quantizer.row_scaled_nvfp4:
        refused += [
            ("row-scaled", "the random Hadamard transform", quantizer.with_rht),
            ("row-scaled", "2D quantization", quantizer.with_2d_quantization),
            ("row-scaled", "stochastic rounding", quantizer.stochastic_rounding),
            ("row-scaled", "amax reduction", quantizer.with_amax_reduction),
        ]
        if out._columnwise_data is not None:
            refused += [("row-scaled", "4over6 for columnwise data", quantizer.nvfp4_use_4over6)]
    for option, other, both in refused:
        if both:
            raise ReferenceBackendError(f"NVFP4 quantization: {option} does not support {other}.")
    rows, columns = matrix.shape
    transposable = matrix.dtype == torch.bfloat16 and rows % 32 == 0 and columns % 32 == 0
    if quantizer.row_scaled_nvfp4 and out._columnwise_data is not None and not transposable:
        raise ReferenceBackendError(
            "Row-scaled NVFP4 quantization for columnwise data requires bfloat16 and rows and columns that are "
            f"multiples of 32; this is {matrix.dtype}, {rows} x {columns}."
        )
    if quantizer.with_rht and matrix.dtype != torch.bfloat16:
        raise ReferenceBackendError(f"The random Hadamard transform takes bfloat16, not {matrix.dtype}.")
    if quantizer.with_rht and not quantizer.with_post_rht_amax:
        raise ReferenceBackendError(
            "An amax from before the random Hadamard transform is not supported, neither here nor in the compiled "
            "extension: use with_post_rht_amax=True."
        )
