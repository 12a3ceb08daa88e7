"""Plain and gated activations, forward and backward, with the quantization that follows them.

All are computed in float32 (``common/util/math.h`` and ``common/util/vectorized_pointwise.h``, TE 2.20). GELU is the
tanh approximation. A gated activation splits the last dimension in half: the activation of the first half is multiplied
by the second half.

Under delayed scaling the float32 result is quantized directly. Otherwise it is first rounded to the input's dtype, also
for MXFP8, and current scaling uses the amax of the float32 result (``pytorch/csrc/extensions/activation.cpp``,
``common/cast/mxfp8/*.cuh``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.quantization import casting_for, quantize_result, row_sum

QUICK_GELU_ALPHA = 1.702


@dataclass(frozen=True)
class Activation:
    """A pointwise function, x to f(x), and its gradient, (g, x) to g * f'(x), float32 to float32."""

    value: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def quick_gelu(alpha: float) -> Activation:
    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(alpha * x)
        return grad * (alpha * x * gate * (1.0 - gate) + gate)

    return Activation(lambda x: x * torch.sigmoid(alpha * x), gradient)


def _sigmoid_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return grad * gate * (1.0 - gate)


IDENTITY = Activation(lambda x: x, lambda grad, x: grad)
SIGMOID = Activation(torch.sigmoid, _sigmoid_gradient)
GELU = Activation(
    lambda x: F.gelu(x, approximate="tanh"),
    lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
)
QUICK_GELU = quick_gelu(QUICK_GELU_ALPHA)
# Upstream compares with 0 (common/util/math.h, TE 2.20), so NaN becomes 0, unlike in torch's relu.
RELU = Activation(lambda x: _where_positive(x, x), lambda grad, x: grad * (x > 0))
SQUARED_RELU = Activation(lambda x: _where_positive(x, x * x), lambda grad, x: grad * _where_positive(x, 2.0 * x))
SILU = Activation(F.silu, lambda grad, x: torch.ops.aten.silu_backward(grad, x))


def _where_positive(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, value, torch.zeros_like(value))


def clamped_quick_gelu(limit: float, alpha: float) -> Activation:
    inner = quick_gelu(alpha)

    def clamped(x: torch.Tensor) -> torch.Tensor:
        return torch.fmin(x, torch.full_like(x, limit))  # NaN becomes the limit, as with upstream's min

    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = inner.gradient(torch.ones_like(x), clamped(x))
        return grad * torch.where(x <= limit, slope, torch.zeros_like(slope))

    return Activation(lambda x: inner.value(clamped(x)), gradient)


def clamped_offset(limit: float, offset: float) -> Activation:
    return Activation(
        # NaN becomes -limit, as with upstream's min and max.
        lambda x: torch.fmin(torch.fmax(x, torch.full_like(x, -limit)), torch.full_like(x, limit)) + offset,
        lambda grad, x: grad * ((x <= limit) & (x >= -limit)),
    )


@torch.no_grad()
def _pointwise(act: Activation, input: torch.Tensor, quantizer: Any) -> Any:
    value = act.value(input.detach().contiguous().float())
    return quantize_result(value, input.dtype, quantizer, measure_first=True)


@torch.no_grad()
def _pointwise_backward(act: Activation, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    value = act.gradient(grad.detach().contiguous().float(), fwd_input.detach().contiguous().float())
    return quantize_result(value, fwd_input.dtype, quantizer, measure_first=True)


@torch.no_grad()
def _gated(act: Activation, input: torch.Tensor, quantizer: Any, up: Activation = IDENTITY) -> Any:
    activated, linear = _halves(input)
    return quantize_result(act.value(activated) * up.value(linear), input.dtype, quantizer, measure_first=True)


@torch.no_grad()
def _gated_backward(
    act: Activation, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, up: Activation = IDENTITY
) -> Any:
    activated, linear = _halves(fwd_input)
    grad = grad.detach().float().reshape(activated.shape)
    halves = [act.gradient(grad * up.value(linear), activated), up.gradient(grad * act.value(activated), linear)]
    return quantize_result(torch.cat(halves, dim=-1), fwd_input.dtype, quantizer, measure_first=True)


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.shape[-1] % 2:
        raise ReferenceBackendError(
            f"A gated activation splits the last dimension in half; {tensor.shape[-1]} is an odd number."
        )
    activated, linear = tensor.detach().float().chunk(2, dim=-1)
    return activated, linear


@torch.no_grad()
def _bias_backward(act: Activation, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
    value = act.gradient(grad.detach().contiguous().float(), fwd_input.detach().contiguous().float())
    dact = quantize_result(value, grad.dtype, quantizer, measure_first=True)
    # Fused kernels sum the float32 result; the unfused path sums the tensor rounded to the input's type.
    unrounded = quantizer is not None and casting_for(quantizer).sums_unrounded
    return [row_sum(value if unrounded else value.to(grad.dtype)).to(grad.dtype), dact]


_Function = Callable[..., Any]


def _functions(act: Activation) -> tuple[_Function, _Function, _Function]:
    """Return the forward, (input, quantizer); the backward, (grad, fwd_input, quantizer); and the backward that also
    returns the bias gradient, a sum over rows.
    """
    partial = functools.partial
    return partial(_pointwise, act), partial(_pointwise_backward, act), partial(_bias_backward, act)


gelu, dgelu, dbias_dgelu = _functions(GELU)
qgelu, dqgelu, dbias_dqgelu = _functions(QUICK_GELU)
relu, drelu, dbias_drelu = _functions(RELU)
srelu, dsrelu, dbias_dsrelu = _functions(SQUARED_RELU)
silu, dsilu, dbias_dsilu = _functions(SILU)


def _gated_functions(act: Activation) -> tuple[_Function, _Function]:
    """Return the forward, (input, quantizer) -> act(first half) * second half, and the backward, (grad, fwd_input,
    quantizer).
    """
    return functools.partial(_gated, act), functools.partial(_gated_backward, act)


glu, dglu = _gated_functions(SIGMOID)
geglu, dgeglu = _gated_functions(GELU)
qgeglu, dqgeglu = _gated_functions(QUICK_GELU)
reglu, dreglu = _gated_functions(RELU)
sreglu, dsreglu = _gated_functions(SQUARED_RELU)
swiglu, dswiglu = _gated_functions(SILU)


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK_GELU_ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    """``x * sigmoid(alpha * x)`` of the first half, clamped to at most ``limit``, times the second half, clamped to
    [-limit, limit], plus ``glu_linear_offset``.
    """
    up = clamped_offset(limit, glu_linear_offset)
    return _gated(clamped_quick_gelu(limit, alpha), input, quantizer, up)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = QUICK_GELU_ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    up = clamped_offset(limit, glu_linear_offset)
    return _gated_backward(clamped_quick_gelu(limit, alpha), grad, fwd_input, quantizer, up)
