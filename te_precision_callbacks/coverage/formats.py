"""The formats of tensors and quantizers, as messages name them, and the GEMMs that a backward skips.

The classes of storages and quantizers were read from Transformer Engine 2.20.2 (``pytorch/tensor``). An unknown class
appears by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import (
    GEMMS,
    HYBRID_QUANTIZER,
    IDENTITY_QUANTIZER,
    GemmName,
    class_names,
    format_of_class,
    recipe_of,
)
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_GRADIENT, NO_INPUT_GRADIENT
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import recipe_of_module
from te_precision_callbacks.te.tensors import fp8_dtype, fp8_format_of, gemm_operand

MODIFIED = " (modified)"

_DTYPES = {
    torch.float32: "FP32",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    torch.float64: "FP64",
    torch.float8_e4m3fn: "FP8 E4M3",
    torch.float8_e5m2: "FP8 E5M2",
}


def format_of_operand(operand: Any, *, columnwise: bool) -> str:
    """The format that a GEMM reads from an operand, with :data:`MODIFIED` if a feature has changed it."""
    text = format_of(operand, columnwise=columnwise)
    if not hasattr(operand, "rowwise_gemm_tensor"):  # not of the debug path
        return text
    from te_precision_callbacks.te.debug import debug_quantization

    quantizer = operand.quantizer
    plan = quantizer.columnwise_tensor_plan if columnwise else quantizer.rowwise_tensor_plan
    return f"{text}{MODIFIED}" if plan == debug_quantization.API_CALL_MODIFY else text


def format_of(tensor: Any, *, columnwise: bool) -> str:
    """The format of the data, row- or columnwise, that a GEMM reads from a tensor or storage of any class."""
    data = gemm_operand(tensor, columnwise=columnwise)
    if type(data) is torch.Tensor:  # the most frequent type, for which attribute look-ups are slow
        return dtype_name(data.dtype)
    return _known_format(data) or _unknown_format(data)


def quantizer_format(quantizer: Any, high_precision: torch.dtype, *, columnwise: bool) -> str:
    """The format that a quantizer produces; ``high_precision`` is the dtype of a tensor that is not quantized."""
    names = class_names(quantizer)
    if HYBRID_QUANTIZER in names:
        part = quantizer.rowwise_quantizer
        if columnwise:
            part = quantizer.columnwise_quantizer
        return quantizer_format(part, high_precision, columnwise=columnwise)
    if quantizer is None or IDENTITY_QUANTIZER in names:
        return dtype_name(high_precision)
    return _known_format(quantizer) or type(quantizer).__name__


def format_made_by(quantizer: Any, otherwise: str) -> str:
    """The format that a quantizer gives an inner tensor of attention; ``otherwise`` without one, as in MXFP8."""
    if quantizer is None:
        return otherwise
    return quantizer_format(quantizer, torch.float32, columnwise=False)


def gemms_left_out(
    module: torch.nn.Module, layers: Sequence[str], *, input_needs_gradient: bool
) -> dict[str, dict[GemmName, str]]:
    """Map each layer to its GEMMs that the backward skips, after a forward with gradients, with the reasons."""
    row = te_modules.of(module)
    left_out: dict[str, dict[GemmName, str]] = {layer: {} for layer in layers}
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    for layer, is_frozen in zip(layers, row.frozen(module), strict=True):
        if not input_needs_gradient and not row.has_norm:
            left_out[layer]["dgrad"] = NO_INPUT_GRADIENT
        if is_frozen:
            left_out[layer]["wgrad"] = FROZEN
        if not input_needs_gradient and not trains:
            left_out[layer] = dict.fromkeys(GEMMS[1:], NO_GRADIENT)
    return left_out


def recipe_of_operator(module: Any, arguments: Any) -> str:
    """The recipe of a compiled ``te.Linear``, given its operator's arguments.

    In the first run of a graph the module does not have its recipe yet: Dynamo sets attributes after the graph.
    """
    if not arguments.fp8:
        return ""
    recipe = recipe_of_module(module)
    if module.fp8 and recipe:
        return recipe_text(recipe)
    quantizer = arguments.weight_quantizer or arguments.input_quantizer
    return recipe_of(quantizer) or type(quantizer).__name__


def recipe_text(recipe: Any) -> str:
    if recipe is None:
        return ""
    return recipe_of(recipe) or type(recipe).__name__


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype))


def _known_format(tensor_or_quantizer: Any) -> str | None:
    if getattr(tensor_or_quantizer, "custom", False):
        return None  # a user's own class, even a subclass of TE's, has another GEMM
    kind: type = type(tensor_or_quantizer)
    return _format_name(kind, fp8_dtype(tensor_or_quantizer))


@functools.cache
def _format_name(kind: type, dtype: Any) -> str | None:
    name = format_of_class(kind)
    if name in (None, "NVFP4"):
        return name
    return f"{name} {fp8_format_of(dtype).name}"


def _unknown_format(tensor: Any) -> str:
    is_quantized = "QuantizedTensorStorage" in class_names(tensor)
    if isinstance(tensor, torch.Tensor) and not is_quantized:
        return dtype_name(tensor.dtype)
    if not is_quantized or getattr(tensor, "custom", False):
        return type(tensor).__name__
    # Transformer Engine passes the decoded tensor to the GEMM.
    return f"{dtype_name(tensor.dequantize().dtype)} (of {type(tensor).__name__})"
