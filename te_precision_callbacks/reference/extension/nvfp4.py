"""NVFP4: E2M1 data, an E4M3 scale for 16 elements, and a float32 amax for the whole tensor.

``_rowwise_data`` is uint8, [..., columns / 2], with two codes per byte, the even one in the low half;
``_columnwise_data``, [columns, rows / 2], is the separately quantized transpose. Scales are E4M3 as uint8, padded with
zeros to multiples of 128 x 4. The blocks of a weight are square, so its transpose is not requantized.

``pytorch/csrc/quantizer.cpp``, ``NVFP4Quantizer``, and ``pytorch/csrc/extensions/transpose.cpp`` (TE 2.20). The
arithmetic is in :mod:`te_precision_callbacks.reference.nvfp4`. ``NVTE_USE_FAST_MATH=1``, approximate division on
the GPU, has no effect here; ``NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1`` has the same effect as upstream.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import NVFP4, SWIZZLE_COLUMNS, SWIZZLE_ROWS, pack_fp4, unpack_fp4
from te_precision_callbacks.base.numerics.scaling import amax_of
from te_precision_callbacks.reference.conversions import block_amaxes
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import as_stored, matrix_shape, overwrite, round_up
from te_precision_callbacks.reference.extension.casting import Buffer, Buffers, Casting, by_usage
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.nvfp4 import BLOCK, Nvfp4Rules, quantize, random_hadamard_transform
from te_precision_callbacks.reference.target import capability


class Nvfp4Casting(Casting):
    """Casting to NVFP4: an E4M3 scale for 16 elements or for 16 x 16, and an amax of the tensor or of each row."""

    modes = (NVFP4,)
    classes = "nvfp4_tensor:NVFP4Tensor", "storage.nvfp4_tensor_storage:NVFP4TensorStorage"
    codes_per_byte = 2
    updated = "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"

    def takes_amax(self, quantizer: Any) -> bool:
        """Return True unless the amax is measured after the Hadamard transform, or for each row."""
        return not (quantizer.with_rht or quantizer.row_scaled_nvfp4)

    def buffers(self, quantizer: Any, shape: Sequence[int]) -> Buffers:
        """Rows and columns must be multiples of 16. Columnwise data is always a matrix."""
        if quantizer.row_scaled_nvfp4 and not quantizer.rowwise_usage:
            raise ReferenceBackendError("Row-scaled NVFP4 quantization requires rowwise usage.")
        rows, columns = matrix_shape(shape)
        if rows % BLOCK or columns % BLOCK:
            raise ReferenceBackendError(
                f"NVFP4 needs rows and columns that are multiples of {BLOCK}; a tensor of shape {tuple(shape)} has "
                f"{rows} x {columns}."
            )
        by_row = quantizer.row_scaled_nvfp4
        return by_usage(
            quantizer,
            {
                "rowwise_data": Buffer([*shape[:-1], columns // 2]),
                "rowwise_scale_inv": _scales(rows, columns),
                "amax_rowwise": Buffer([rows if by_row else 1], torch.float32, zero=True),
                "columnwise_data": Buffer([columns, rows // 2]),
                "columnwise_scale_inv": _scales(columns, rows),
                "amax_columnwise": Buffer([columns if by_row else 1], torch.float32, zero=True),
            },
        )

    def settings(self, quantizer: Any, shape: Sequence[int]) -> dict[str, Any]:
        return {
            "fp4_dtype": quantizer.dtype,
            "with_gemm_swizzled_scales": _writes_swizzled(quantizer, shape),
            "row_scaled_nvfp4": quantizer.row_scaled_nvfp4,
            "nvfp4_use_4over6": quantizer.nvfp4_use_4over6,
            "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max,
        }

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize all directions with buffers in ``out``; the Hadamard transform needs bfloat16.

        Stochastic rounding uses torch's generator of the tensor's device. The probability of rounding up is, to 24
        bits, the relative distance from the next smaller E2M1 value. A GPU uses Philox with its own seed and offset,
        and as few as 8 bits per element, so its bytes differ, with the same distribution.

        With ``skip``, data and scales are unchanged; amaxes too, without a Hadamard transform.

        Raises:
            ReferenceBackendError: upstream does not support these options together, or for this source.
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
        # Upstream measures for a Hadamard transform regardless of the flag; and collectives must always run.
        if quantizer.with_rht or not skip:
            _measure(quantizer, matrix, transposed, out, amax)
        _reduce(quantizer, out)
        if skip:
            return
        rules = _rules(quantizer, matrix)
        # Not with the no-op flag, which leaves the scales in their order.
        out._with_gemm_swizzled_scales = _writes_swizzled(quantizer, matrix.shape)
        if out._rowwise_data is not None:
            _store(out, "rowwise", *quantize(matrix, out._amax_rowwise, rules))
        if transposed is not None:
            _store(out, "columnwise", *quantize(transposed, out._amax_columnwise, rules))


def _rules(quantizer: Any, matrix: torch.Tensor) -> Nvfp4Rules:
    fused = _is_fused(quantizer, matrix.shape)
    return Nvfp4Rules(
        # The fused kernel has no square blocks.
        square=quantizer.with_2d_quantization and not fused,
        stochastic=quantizer.stochastic_rounding,
        largest_scale=float(quantizer.nvfp4_e4m3_max),
        better_of_two=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
        error_in_scale_units=os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "0") not in ("", "0"),
        nan_spreads=fused,
    )


def _is_fused(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether one kernel transforms and quantizes: ``NVFP4Quantizer::is_eligible_for_rht_cast_fusion``."""
    return bool(quantizer.with_rht) and _fills_tiles(shape, 64)


def _writes_swizzled(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether a GPU's kernel writes swizzled scales: ``nvfp4_emits_gemm_swizzled_scales``.

    Otherwise, if the quantizer requires swizzled scales, most callers swizzle them afterwards.
    """
    in_squares = quantizer.with_2d_quantization and not (quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6)
    return bool(quantizer.optimize_for_gemm) and (
        _is_fused(quantizer, shape) if quantizer.with_rht else bool(in_squares) and _fills_tiles(shape, 128)
    )


def _fills_tiles(shape: Sequence[int], height: int) -> bool:
    """Return whether the kernels of Blackwell's first GPUs take a shape, in tiles of 128 columns."""
    rows, columns = matrix_shape(shape)
    return rows % height == 0 and columns % 128 == 0 and (10, 0) <= capability() <= (11, 0)


def _measure(
    quantizer: Any, matrix: torch.Tensor, transposed: torch.Tensor | None, out: Any, amax: torch.Tensor | None
) -> None:
    if quantizer.row_scaled_nvfp4:
        rowwise = _row_amaxes(matrix)
        columnwise = None if transposed is None else _row_amaxes(transposed)
    else:
        rowwise = amax_of(matrix) if amax is None else amax
        columnwise = amax_of(transposed) if quantizer.with_rht and transposed is not None else rowwise
    for target, value in ((out._amax_rowwise, rowwise), (out._amax_columnwise, columnwise)):
        if target is not None and value is not None:
            overwrite(target, value)


def _row_amaxes(matrix: torch.Tensor) -> torch.Tensor:
    return block_amaxes(matrix, (1, matrix.shape[1])).view(-1)


def _reduce(quantizer: Any, out: Any) -> None:
    if not quantizer.with_amax_reduction:
        return
    group = quantizer._canonicalized_amax_reduction_group()
    for amax in (out._amax_rowwise, out._amax_columnwise):
        if amax is not None:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)


def _store(out: Any, direction: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    data = getattr(out, f"_{direction}_data")
    scale_inv = getattr(out, f"_{direction}_scale_inv")
    overwrite(data, codes.view(data.shape))
    swizzled = out._with_gemm_swizzled_scales
    overwrite(scale_inv, as_stored(scales, scale_inv.shape, along_columns=False, swizzled=swizzled))


def _scales(rows: int, columns: int) -> Buffer:
    return Buffer([round_up(rows, SWIZZLE_ROWS), round_up(columns // BLOCK, SWIZZLE_COLUMNS)], zero=True)


def _check_options(quantizer: Any, matrix: torch.Tensor, out: Any) -> None:
    """Reject options that ``quantizer.cpp`` and ``common/cast/dispatch/quantize.cuh`` reject."""
    transforms = quantizer.with_rht, "the random Hadamard transform"
    stochastic = quantizer.stochastic_rounding, "stochastic rounding"
    columnwise = quantizer.nvfp4_use_4over6 and out._columnwise_data is not None, "4over6 for columnwise data"
    in_squares = quantizer.with_2d_quantization, "2D quantization"
    reduces = quantizer.with_amax_reduction, "amax reduction"
    for is_used, option, conflicts in (
        (quantizer.nvfp4_use_4over6, "4over6", (transforms, stochastic)),
        (quantizer.row_scaled_nvfp4, "row-scaled", (transforms, in_squares, stochastic, reduces, columnwise)),
    ):
        for is_other_used, other in conflicts:
            if is_used and is_other_used:
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


@export
def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """The transpose of packed E2M1 codes: uint8, [rows, columns / 2], rows even, to [columns, rows / 2]."""
    result = pack_fp4(unpack_fp4(input).t())
    if out is None:
        return result.contiguous()
    return out.copy_(result)


@export
def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """The scales of the transpose of a tensor with ``M_tiles`` x ``K_tiles`` square blocks.

    Args:
        input: E4M3 as uint8, [padded rows, padded columns / 16], each scale on the 16 rows of its block.
        output: E4M3 as uint8, [padded columns, padded rows / 16]; padding rows become 0, padding columns are unchanged.
    """
    block_scales = input[: M_tiles * BLOCK : BLOCK, :K_tiles].t()
    valid = output[:, :M_tiles]
    valid.zero_()
    valid[: K_tiles * BLOCK] = block_scales.repeat_interleave(BLOCK, 0)[: valid.shape[0]]
