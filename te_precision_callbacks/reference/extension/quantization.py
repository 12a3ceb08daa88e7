"""Quantizing and dequantizing tensors.

Usage::

    out = quantize(tensor, quantizer)  # a new quantized tensor
    quantize(tensor, quantizer, out)  # into an old one
    dequantize(out, DType.kFloat32)

``pytorch/csrc/extensions/cast.cpp`` and ``bias.cpp`` (TE 2.20). How a family of quantizers stores its data is in a file
of its own (``float8.py``); ``quantizers.py`` picks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsInt

import torch

from te_precision_callbacks.reference.extension.dtypes import torch_dtype
from te_precision_callbacks.reference.extension.float8 import transposed
from te_precision_callbacks.reference.extension.operands import dequantized
from te_precision_callbacks.reference.extension.quantizers import casting_for
from te_precision_callbacks.reference.extension.scaling import amax_of


@torch.no_grad()
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Quantize a tensor, into a new tensor or into ``output``.

    Args:
        tensor: float32, float16 or bfloat16, any shape.
        quantizer: one of Transformer Engine's; None returns the tensor itself.
        output: a quantized tensor to write to; its buffers are first made to fit the quantizer's usages.
        noop: float32, shape [1]; 1 leaves the data of ``output`` as it is.

    Raises:
        UnsupportedRecipeError: the reference backend does not have the quantizer's recipe.
    """
    source = tensor.detach().contiguous()
    if quantizer is None:
        return source
    casting = casting_for(quantizer)
    if output is None:
        output = casting.create(quantizer, source.shape, source.dtype, source.device)
    else:
        casting.fit(quantizer, output)
    casting.write(quantizer, source, output, noop)
    return output


@torch.no_grad()
def dequantize(input: Any, otype: SupportsInt) -> torch.Tensor:
    """The plain tensor that a quantized tensor stands for, of the logical shape and of type ``otype``."""
    return dequantized(input).to(torch_dtype(otype))


@torch.no_grad()
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False
) -> Any:
    """A quantized tensor whose buffers are allocated and not written."""
    device = torch.device(device)
    if quantizer is None:
        return torch.empty(list(shape), dtype=dtype, device=device)
    return casting_for(quantizer).create(quantizer, shape, dtype, device, pin_memory)


def quantize_result(
    value: torch.Tensor, dtype: torch.dtype, quantizer: Any, *, out: Any = None, measure_first: bool = False
) -> Any:
    """What becomes of a kernel's float32 result: rounded to ``dtype``, quantized, or both one after the other.

    Args:
        value: float32.
        dtype: type of the result where it is not quantized, and nominal type where it is.
        quantizer: None for a plain tensor.
        out: tensor to write to; a new one if None.
        measure_first: take amax before the result is rounded to ``dtype``, if the quantizer's family takes one.
    """
    if quantizer is None:
        return value.to(dtype) if out is None else out.copy_(value)
    casting = casting_for(quantizer)
    if out is None:
        out = casting.create(quantizer, value.shape, dtype, value.device)
    if casting.fuses:
        casting.write(quantizer, value, out)
    else:
        # Upstream's activation kernels measure the float32 result, its normalization kernels the rounded one.
        amax = amax_of(value) if measure_first and casting.takes_amax else None
        casting.write(quantizer, value.to(dtype), out, amax=amax)
    return out


@torch.no_grad()
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """A bias gradient and the quantized output gradient.

    Args:
        input: output gradient, [..., features].
        quantizer: None leaves the gradient as it is.

    Returns:
        the sum over all rows ([features], the type of ``input``, summed in float32), and the quantized tensor.
    """
    source = input.detach().contiguous()
    return [row_sum(source).to(source.dtype), quantize(source, quantizer)]


def row_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all dimensions but the last one, in float32."""
    return tensor.reshape(-1, tensor.shape[-1]).sum(dim=0, dtype=torch.float32)


def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """:func:`quantize` for each tensor with its quantizer."""
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and quantize each part with its quantizer.

    Args:
        tensor: [rows, ...].
        split_sections: rows of each part; 0 is allowed.
        quantizer_list: one quantizer a part.
        disable_bulk_allocation: has no effect, since each part has its own memory here.
    """
    parts = torch.split(tensor.detach(), [int(rows) for rows in split_sections])
    return multi_tensor_quantize(parts, quantizer_list)


@torch.no_grad()
def fp8_transpose(input: torch.Tensor, dtype: SupportsInt, *, out: torch.Tensor | None) -> torch.Tensor:
    """The transpose of FP8 data.

    Args:
        input: uint8, [..., columns].
        dtype: E4M3 or E5M2; the bytes only move, whichever it is.
        out: uint8, [columns, ...], to write to; a new tensor if None.
    """
    result = transposed(input)
    return result if out is None else out.copy_(result.view(out.shape))
