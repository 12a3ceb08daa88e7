"""LayerNorm and RMSNorm, forward and backward, with the quantization that follows them.

``pytorch/csrc/extensions/normalization.cpp`` and ``common/normalization`` (TE 2.20). Rows are all dimensions but the
last one. Computed in float32, with the biased variance, ``rsigma = 1 / sqrt(variance + eps)``, and 1 added to a
zero-centered gamma. Delayed scaling quantizes the float32 result; other recipes quantize the result rounded to
``otype``.
"""

from __future__ import annotations

from typing import Any, SupportsInt

import torch

from te_precision_callbacks.reference.extension.buffers import matrix_shape
from te_precision_callbacks.reference.extension.enums import torch_dtype
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.extension.operands import dequantized
from te_precision_callbacks.reference.extension.quantization import quantize_result


@export
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: SupportsInt,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """``(x - mean) * rsigma * gamma + beta``.

    Args:
        input: [..., hidden].
        weight, bias: gamma and beta, [hidden]; None is 0.
        eps: added to the variance.
        ln_out: the result to write to, quantized if ``quantizer`` is given; allocated if None.
        quantizer: None for a plain result.
        otype: dtype of a plain result, nominal dtype of a quantized result.
        sm_margin: no effect.
        zero_centered_gamma: whether gamma is stored minus 1.

    Returns:
        the result; the mean and rsigma of each row, float32, [rows].
    """
    x = dequantized(input)
    beta = None if bias is None else bias.float()
    value, mu, rsigma = torch.native_layer_norm(x, x.shape[-1:], _gamma(weight, zero_centered_gamma), beta, eps)
    out = quantize_result(value, torch_dtype(otype), quantizer, out=ln_out)
    return [out, mu.reshape(-1), rsigma.reshape(-1)]


@export
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of :func:`layernorm_fwd`: of the input (its type), of gamma and of beta (gamma's type).

    ``dz``, [..., hidden], is the gradient of the result; ``x``, ``mu`` and ``rsigma`` are of the forward.
    """
    rows, hidden = matrix_shape(x.shape)
    scale = _gamma(gamma, zero_centered_gamma)
    dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
        dz.float().reshape(rows, hidden),
        x.float().reshape(rows, hidden),
        [hidden],
        mu.reshape(rows, 1),
        rsigma.reshape(rows, 1),
        scale,
        torch.zeros_like(scale),
        [True, True, True],
    )
    return [dx.to(x.dtype).view(x.shape), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


@export
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: SupportsInt,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """``x * rsigma * gamma`` with ``rsigma = 1 / sqrt(mean(x**2) + eps)``; arguments as in :func:`layernorm_fwd`.

    Returns:
        the result; None; rsigma of each row, float32, [rows].
    """
    x = dequantized(input)
    rsigma = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    value = x * rsigma * _gamma(weight, zero_centered_gamma)
    return [quantize_result(value, torch_dtype(otype), quantizer, out=ln_out), None, rsigma.reshape(-1)]


@export
def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of :func:`rmsnorm_fwd`: of the input, plus ``add`` in float32, and of gamma, in their types."""
    rows, hidden = matrix_shape(x.shape)
    grad = dz.float().reshape(rows, hidden)
    inverse = rsigma.reshape(rows, 1)
    normalized = x.float().reshape(rows, hidden) * inverse
    dgamma = (grad * normalized).sum(dim=0)
    grad = grad * _gamma(gamma, zero_centered_gamma)
    dx = inverse * (grad - normalized * (grad * normalized).mean(dim=-1, keepdim=True))
    if add is not None:
        dx += add.float().view(dx.shape)
    return [dx.to(x.dtype).view(x.shape), dgamma.to(gamma.dtype)]


@export
def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    """:func:`rmsnorm_bwd_add` without ``add``."""
    return rmsnorm_bwd_add(dz, x, None, *others)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    gamma = dequantized(weight)
    if zero_centered:
        return gamma + 1.0
    return gamma
