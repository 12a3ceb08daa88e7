"""Plain and gated activations, forward and backward, with the quantization that follows them.

All are computed in float32 (``common/util/math.h`` and ``common/util/vectorized_pointwise.h``, TE 2.20). GELU is the
tanh approximation. A gated activation splits the last dimension in half: the activation of the first half is multiplied
by the second half.

Under delayed scaling the float32 result is quantized directly. Otherwise it is first rounded to the input's dtype, also
for MXFP8, and current scaling uses the amax of the float32 result (``pytorch/csrc/extensions/activation.cpp``,
``common/cast/mxfp8/*.cuh``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from te_precision_callbacks.reference.extension.exports import export
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
    return torch.where(x > 0, value, 0.0)


def gated(activated: Activation, linear: Activation = IDENTITY) -> Activation:
    """The product of ``activated`` of the first half of the last dimension, and ``linear`` of the second half."""

    def value(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return activated.value(first) * linear.value(second)

    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        grad = grad.reshape(first.shape)
        halves = [
            activated.gradient(grad * linear.value(second), first),
            linear.gradient(grad * activated.value(first), second),
        ]
        return torch.cat(halves, dim=-1)

    return Activation(value, gradient)


def _forward(act: Activation, input: torch.Tensor, quantizer: Any) -> Any:
    return quantize_result(act.value(_float(input)), input.dtype, quantizer, measure_first=True)


def _backward(act: Activation, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    value = act.gradient(_float(grad), _float(fwd_input))
    return quantize_result(value, fwd_input.dtype, quantizer, measure_first=True)


def _bias_backward(act: Activation, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the bias gradient, a sum over rows, and the result of :func:`_backward`."""
    value = act.gradient(_float(grad), _float(fwd_input))
    dact = quantize_result(value, grad.dtype, quantizer, measure_first=True)
    # Fused kernels sum the float32 result; the unfused path sums the tensor rounded to the input's type.
    unrounded = quantizer is not None and casting_for(quantizer).sums_unrounded
    return [row_sum(value if unrounded else value.to(grad.dtype)).to(grad.dtype), dact]


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().float()


_PLAIN = {"gelu": GELU, "qgelu": QUICK_GELU, "relu": RELU, "srelu": SQUARED_RELU, "silu": SILU}
_GATED = {
    "glu": SIGMOID,
    "geglu": GELU,
    "qgeglu": QUICK_GELU,
    "reglu": RELU,
    "sreglu": SQUARED_RELU,
    "swiglu": SILU,
}

for name, act in _PLAIN.items():
    export(partial(_bias_backward, act), f"dbias_d{name}")
for name, act in (_PLAIN | {name: gated(act) for name, act in _GATED.items()}).items():
    export(partial(_forward, act), name)
    export(partial(_backward, act), f"d{name}")


def _clamped(limit: float = 7.0, alpha: float = QUICK_GELU_ALPHA, glu_linear_offset: float = 1.0) -> Activation:
    """``x * sigmoid(alpha * x)`` of the first half, clamped to at most ``limit``, times the second half, clamped to
    [-limit, limit], plus ``glu_linear_offset``.
    """
    gelu = quick_gelu(alpha)

    def clamp(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x <= limit, x, limit)  # NaN becomes the limit, as with upstream's min

    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad * torch.where(x <= limit, gelu.gradient(torch.ones_like(x), clamp(x)), 0.0)

    linear = Activation(
        # NaN becomes -limit, as with upstream's min and max.
        lambda x: torch.where(x >= -limit, clamp(x), -limit) + glu_linear_offset,
        lambda grad, x: grad * ((x <= limit) & (x >= -limit)),
    )
    return gated(Activation(lambda x: gelu.value(clamp(x)), gradient), linear)


@export
def clamped_swiglu(input: torch.Tensor, quantizer: Any, *options: float) -> Any:
    """``options``: as for :func:`_clamped`."""
    return _forward(_clamped(*options), input, quantizer)


@export
def clamped_dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *options: float) -> Any:
    return _backward(_clamped(*options), grad, fwd_input, quantizer)
