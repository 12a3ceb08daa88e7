"""Quantizing and dequantizing tensors: ``pytorch/csrc/extensions/cast.cpp`` and ``bias.cpp`` (TE 2.20).

A quantizer is recognized by the name of its class or of a base class, so Transformer Engine is not imported here, and
subclasses are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsInt

import torch

from te_precision_callbacks.base.numerics.layouts import unquantized
from te_precision_callbacks.base.numerics.scaling import amax_of
from te_precision_callbacks.base.vocabulary import RECIPES, recipe_of
from te_precision_callbacks.reference.errors import UnsupportedRecipeError
from te_precision_callbacks.reference.extension import float8, float8_block, mxfp8, nvfp4
from te_precision_callbacks.reference.extension.buffers import is_noop, swizzle_scales_for_gemm_
from te_precision_callbacks.reference.extension.casting import Casting, Quantizer
from te_precision_callbacks.reference.extension.enums import torch_dtype
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.extension.float8 import transpose
from te_precision_callbacks.reference.extension.operands import dequantized

_CASTINGS: dict[str, Casting] = {
    "fp8_delayed_scaling": float8.DelayedScaling(),
    "fp8_current_scaling": float8.CurrentScaling(),
    "fp8_block_scaling": float8_block.Float8BlockCasting(),
    "mxfp8": mxfp8.Mxfp8Casting(),
    "nvfp4": nvfp4.Nvfp4Casting(),
}


def casting_for(quantizer: Quantizer) -> Casting:
    """The implementation for a quantizer.

    Raises:
        UnsupportedRecipeError: the reference backend has no implementation.
    """
    recipe = recipe_of(quantizer)
    if recipe is None:
        raise UnsupportedRecipeError(
            f"{type(quantizer).__name__}: the reference backend does not have this quantizer. It has"
            f" {', '.join(row.quantizer for row in RECIPES.values())}."
        )
    return _CASTINGS[recipe]


@export
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Quantize a tensor, into a new tensor or into ``output``.

    Args:
        tensor: float32, float16 or bfloat16, any shape.
        quantizer: a quantizer of Transformer Engine; None returns the tensor itself.
        output: a quantized tensor to write to; its buffers are first adapted to the quantizer's usages.
        noop: float32, shape [1]; 1 leaves the data of ``output`` unchanged.

    Raises:
        UnsupportedRecipeError: the reference backend does not support the quantizer.
        ReferenceBackendError: the compiled extension also rejects the shape, or ``output``.
    """
    output = _cast(tensor, quantizer, output, noop)
    if quantizer is not None and quantizer.optimize_for_gemm:
        # Some kernels write unswizzled scales. Other callers of _cast do not swizzle.
        swizzle_scales_for_gemm_(output)
    return output


def _cast(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    source = tensor.detach().contiguous()
    if quantizer is None:
        return source
    casting = casting_for(quantizer)
    if output is None:
        output = casting.create(quantizer, source.shape, source.dtype, source.device)
    else:
        casting.fit(quantizer, output)
    casting.write(quantizer, source, output, skip=is_noop(noop))
    return output


@export
def dequantize(input: Any, otype: SupportsInt) -> torch.Tensor:
    """Dequantize to a plain tensor of dtype ``otype``, in the logical shape."""
    return dequantized(input).to(torch_dtype(otype))


@export
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> Any:
    device = torch.device(device)
    if quantizer is None:
        return torch.empty(list(shape), dtype=dtype, device=device)
    return casting_for(quantizer).create(quantizer, shape, dtype, device, pin_memory)


def quantize_result(
    value: torch.Tensor, dtype: torch.dtype, quantizer: Any, *, out: Any = None, measure_first: bool = False
) -> Any:
    """Convert a kernel's float32 result: round it to ``dtype``, quantize it, or both in this order.

    The result is written to ``out``, if given. With ``measure_first``, the amax is measured before rounding, for
    quantizers that need an amax.
    """
    if quantizer is None:
        if out is None:
            return value.to(dtype)
        return out.copy_(value)
    casting = casting_for(quantizer)
    if unquantized.wanted:
        unquantized.result = value.to(dtype)
    if out is None:
        out = casting.create(quantizer, value.shape, dtype, value.device)
    # Upstream's activation kernels measure the float32 result, normalization kernels the rounded result.
    amax = amax_of(value) if measure_first and casting.takes_amax(quantizer) else None
    casting.write(quantizer, value.to(dtype) if casting.rounds_first else value, out, amax=amax)
    return out


@export
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the bias gradient, and the quantized output gradient, or the gradient itself without a quantizer.

    The bias gradient is the sum of the gradient, [..., features], over all rows, in float32, rounded to its dtype.
    """
    source = input.detach().contiguous()
    return [row_sum(source).to(source.dtype), _cast(source, quantizer)]


def row_sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).sum(dim=0, dtype=torch.float32)


@export
def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Quantize each tensor with its quantizer; the scales of NVFP4 are not swizzled afterwards."""
    return [_cast(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@export
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor [rows, ...] along its first dimension, possibly into empty parts; quantize each with its
    quantizer.

    ``disable_bulk_allocation`` has no effect, since each part has its own memory here.
    """
    parts = torch.split(tensor.detach(), [int(rows) for rows in split_sections])
    return multi_tensor_quantize(parts, quantizer_list)


@export
def fp8_transpose(input: torch.Tensor, dtype: SupportsInt, *, out: torch.Tensor | None) -> torch.Tensor:
    """The transpose of FP8 data: uint8, [..., columns] to [columns, ...]."""
    result = transpose(input)
    if out is None:
        return result
    return out.copy_(result.view(out.shape))


@export
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    result = tensor.transpose(0, 1).contiguous()
    if out is None:
        return result
    return out.copy_(result.view(out.shape))
