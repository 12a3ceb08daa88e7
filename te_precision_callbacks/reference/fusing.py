"""Functions that a GPU runs as one kernel: computed in float32, and rounded once at the end.

Usage::

    fused = rounding_once(function)
    fused(x, bias)  # bfloat16 in, bfloat16 out; float32 between

``torch.compile`` fuses a function that Transformer Engine marks ``jit_fuser`` into one kernel, which computes bfloat16
and float16 inputs in float32 (``triton.codegen_upcast_to_fp32`` of torch's ``_inductor/config.py``). Without
compilation such a function rounds after every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_precision_callbacks.reference.extension.activation import GELU


def _bias_gelu(inp: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return GELU.value(inp + bias)


def _bias_gelu_gradients(
    grad: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = GELU.gradient(grad, inp + bias)
    return gradient.sum(dim=0), gradient


KERNELS: dict[str, Callable[..., Any]] = {
    "bias_gelu_fused_": _bias_gelu,
    "gelu_fused_": GELU.value,
    "bgrad_dgelu_fused_": _bias_gelu_gradients,
    "dgelu_fused_": GELU.gradient,
}
"""Functions of that module for which torch has a kernel: the tanh approximation of GELU, of which Transformer Engine
writes a dozen operations. That many passes over the largest activation took a third of a step without FP8."""

_HALF = (torch.bfloat16, torch.float16)
FUSED_IN = "transformer_engine.pytorch.jit"
"""The module whose compiled functions are pure: they return new tensors, and do not write to their arguments."""


def rounding_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A ``function`` of positional tensors, with half-precision inputs converted to float32 and results rounded once.

    The results have the types of ``function``'s own results. ``function`` must be pure; gradients also round once.
    """
    results: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def rounded(*arguments: Any) -> Any:
        dtypes = tuple(value.dtype if isinstance(value, torch.Tensor) else None for value in arguments)
        if not any(dtype in _HALF for dtype in dtypes):
            return function(*arguments)
        if dtypes not in results:
            results[dtypes] = _result_types(function, arguments)
        wide = (value.float() if dtype in _HALF else value for value, dtype in zip(arguments, dtypes, strict=True))
        result = function(*wide)
        if isinstance(result, tuple):
            return tuple(value.to(dtype) for value, dtype in zip(result, results[dtypes], strict=True))
        return result.to(results[dtypes])

    return rounded


def _result_types(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The type of the result, or of each, found without computing them."""
    with torch.no_grad():
        result = function(
            *(
                torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
                for value in arguments
            )
        )
    return tuple(value.dtype for value in result) if isinstance(result, tuple) else result.dtype
