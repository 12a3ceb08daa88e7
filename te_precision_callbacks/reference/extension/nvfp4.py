"""NVFP4: E2M1 data, an E4M3 scale for 16 elements, and a float32 amax for the whole tensor.

Usage::

    casting = BlockScaling()
    out = casting.create(quantizer, tensor.shape, tensor.dtype, tensor.device)
    casting.write(quantizer, tensor, out)
    out._rowwise_data  # uint8, [..., columns / 2]: two codes a byte, the even one in the low half
    out._columnwise_data  # uint8, [columns, rows / 2]: the transpose, quantized by itself
    out._rowwise_scale_inv  # E4M3 as uint8, padded with zeros to multiples of 128 x 4

    # The blocks of a weight are square, so its transpose needs no requantization.
    columnwise_data = nvfp4_data_transpose(out._rowwise_data, out=None)
    nvfp4_2d_scale_transpose(out._rowwise_scale_inv, columnwise_scale_inv, rows // 16, columns // 16)

``pytorch/csrc/quantizer.cpp``, ``NVFP4Quantizer``, and ``pytorch/csrc/extensions/transpose.cpp`` (TE 2.20). The
arithmetic of the kernels is in :mod:`te_precision_callbacks.base.numerics.nvfp4`.

``NVTE_USE_FAST_MATH=1``, with which the GPU divides approximately, changes nothing here;
``NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1`` has the same effect as upstream.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.conversions import block_amaxes
from te_precision_callbacks.base.numerics.hadamard import random_hadamard_transform
from te_precision_callbacks.base.numerics.layouts import (
    NVFP4,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    packed,
    unpacked,
)
from te_precision_callbacks.base.numerics.nvfp4 import BLOCK, Nvfp4Rules, quantized
from te_precision_callbacks.base.numerics.scaling import amax_of
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
from te_precision_callbacks.reference.extension.casting import Casting
from te_precision_callbacks.reference.extension.swizzling import as_stored
from te_precision_callbacks.reference.target import capability


class Nvfp4Casting(Casting):
    """NVFP4 with all options of its quantizer."""

    modes = (NVFP4,)

    def takes_amax(self, quantizer: Any) -> bool:
        """Yes, unless the amax is measured after the Hadamard transform, or for each row."""
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
            ReferenceBackendError: rows or columns are not a multiple of 16; row-scaled without rowwise usage.
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

    def _fit(self, quantizer: Any, out: Any) -> None:
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
        """Quantize all directions that have buffers in ``out``.

        Stochastic rounding draws from torch's generator of the tensor's device, so ``torch.manual_seed`` makes it
        repeatable: a number is rounded up with a probability equal to its distance from the next smaller E2M1 number,
        to 24 bits. A GPU draws from Philox with its own seed and offset, with as few as 8 bits a number, so its
        bytes differ, with the same distribution.

        Args:
            quantizer: the quantizer.
            source: float32, float16 or bfloat16; bfloat16 for the Hadamard transform.
            out: the tensor to write to.
            noop: float32, [1]; 1 leaves data and scales, and without a Hadamard transform also amaxes, unchanged.
            amax: float32, [1], of the source, if :meth:`takes_amax`.

        Raises:
            ReferenceBackendError: options that upstream does not support together, or not for this source.
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
        # Upstream measures for a Hadamard transform whatever the flag; and collectives must always run.
        skipped = is_noop(noop)
        if quantizer.with_rht or not skipped:
            _measure(quantizer, matrix, transposed, out, amax)
        _reduce(quantizer, out)
        if skipped:
            return
        rules = _rules(quantizer, matrix)
        # Only now: with the no-op flag the scales keep their order.
        out._with_gemm_swizzled_scales = _writes_swizzled(quantizer, matrix.shape)
        if out._rowwise_data is not None:
            _store(out, "rowwise", *quantized(matrix, out._amax_rowwise, rules))
        if transposed is not None:
            _store(out, "columnwise", *quantized(transposed, out._amax_columnwise, rules))


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
    """Return whether a GPU transforms and quantizes at once: ``NVFP4Quantizer::is_eligible_for_rht_cast_fusion``."""
    rows, columns = matrix_shape(shape)
    return bool(quantizer.with_rht) and rows % 64 == 0 and columns % 128 == 0 and (10, 0) <= capability() <= (11, 0)


def _writes_swizzled(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether a GPU's kernel writes the scales in the order of a GEMM: ``nvfp4_emits_gemm_swizzled_scales``.

    Otherwise, if the quantizer requires that order, most callers swizzle the scales afterwards.
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
        overwrite(out._amax_rowwise, _row_amaxes(matrix))
        if transposed is not None:
            overwrite(out._amax_columnwise, _row_amaxes(transposed))
        return
    if amax is None:
        amax = amax_of(matrix)
    if out._amax_rowwise is not None:
        overwrite(out._amax_rowwise, amax)
    if transposed is not None:
        overwrite(out._amax_columnwise, amax_of(transposed) if quantizer.with_rht else amax)


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
    """Refuse what upstream refuses, in ``quantizer.cpp`` and in ``common/cast/dispatch/quantize.cuh``."""
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


@torch.no_grad()
def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """The transpose of packed E2M1 codes.

    Args:
        input: uint8, [rows, columns / 2], an even number of rows.
        out: uint8, [columns, rows / 2], to write to; a new tensor if None.
    """
    if input.dim() != 2 or input.shape[0] % 2:
        raise ReferenceBackendError(
            f"nvfp4_data_transpose takes a matrix with an even number of rows, not {list(input.shape)}."
        )
    shape = (input.shape[1] * 2, input.shape[0] // 2)
    if out is not None and tuple(out.shape) != shape:
        raise ReferenceBackendError(f"nvfp4_data_transpose: out has shape {list(out.shape)}; {list(shape)} is needed.")
    result = packed(unpacked(input).t())
    return result.contiguous() if out is None else out.copy_(result)


@torch.no_grad()
def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """The scales of the transpose of a tensor with square blocks.

    Args:
        input: E4M3 as uint8, [padded rows, padded columns / 16], each scale on the 16 rows of its block.
        output: E4M3 as uint8, [padded columns, padded rows / 16]; its padding becomes 0 below the blocks, and does not
            change beside them.
        M_tiles: blocks along the rows.
        K_tiles: blocks along the columns.
    """
    of_blocks = input[: M_tiles * BLOCK : BLOCK, :K_tiles].t()
    valid = output[:, :M_tiles]
    valid.zero_()
    valid[: K_tiles * BLOCK] = of_blocks.repeat_interleave(BLOCK, 0)[: valid.shape[0]]
