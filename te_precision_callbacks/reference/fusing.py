"""Functions that a GPU runs as one kernel: computed in float32, and rounded once at the end.

``torch.compile`` fuses a function that Transformer Engine marks ``jit_fuser`` into one kernel, which computes bfloat16
and float16 inputs in float32 (``triton.codegen_upcast_to_fp32`` of torch's ``_inductor/config.py``). Without
compilation such a function rounds after every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)
FUSED_IN = "transformer_engine.pytorch.jit"
"""The module whose compiled functions are pure: they return new tensors, and do not write to their arguments."""

ELEMENTWISE = ("bias_gelu_fused_", "gelu_fused_", "dgelu_fused_", "bgrad_dgelu_fused_")
"""Functions of that module of a dozen elementwise operations, of the largest activation of a layer. The last one also
returns, first, the sum of its gradient over the rows."""

_ELEMENTS_AT_ONCE = 1 << 17
"""Elements for which all intermediate results fit into a cache."""


def rounding_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pure ``function`` of positional tensors, with half-precision inputs converted to float32, and results and
    gradients rounded once, to the types of ``function``'s own results.
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
    with torch.no_grad():
        result = function(
            *(
                torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
                for value in arguments
            )
        )
    return tuple(value.dtype for value in result) if isinstance(result, tuple) else result.dtype


def in_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of :data:`ELEMENTWISE`, called with some rows at a time: the same bits, without going through memory for each
    operation. With gradients, it is called at once.
    """

    @functools.wraps(function)
    def parted(*arguments: torch.Tensor) -> Any:
        first = arguments[0]
        rows = max(1, _ELEMENTS_AT_ONCE // max(1, first[:1].numel()))
        if len(first) <= rows or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)):
            return function(*arguments)
        whole = torch.empty_like(first)
        sums = False
        for begin in range(0, len(first), rows):
            part = slice(begin, begin + rows)
            result = function(*(tensor[part] if tensor.shape == first.shape else tensor for tensor in arguments))
            sums = isinstance(result, tuple)
            whole[part] = result[1] if sums else result
        return (whole.sum(dim=0), whole) if sums else whole

    return parted
