"""The steps of Adam and SGD over lists of tensors, for Transformer Engine's FusedAdam and FusedSGD.

``common/multi_tensor/adam.cu`` and ``sgd.cu`` (TE 2.20). Computed in float32, and rounded to the type of each tensor.
``mode`` 0 is Adam with L2 regularization, 1 is AdamW. ``chunk_size`` has no effect.
"""

from __future__ import annotations

from typing import SupportsInt

import torch

from te_precision_callbacks.base.numerics.scaling import amax_of
from te_precision_callbacks.reference.extension.enums import fp8_format
from te_precision_callbacks.reference.extension.multi_tensor import TensorLists

L2_REGULARIZATION = 0


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step for lists [gradients, parameters, first moments, second moments], and master weights as a fifth."""
    for grad, param, exp_avg, exp_avg_sq, *rest in zip(*tensor_lists, strict=True):
        master = rest[0] if rest else param
        updated = _adam(
            grad.float(), master.float(), exp_avg, exp_avg_sq, _Step(step, bias_correction, beta1, beta2), lr, epsilon,
            mode, weight_decay,
        )  # fmt: skip
        master.copy_(updated)
        if rest:
            param.copy_(updated)


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: SupportsInt,
) -> None:
    """One step for FP8 parameters in delayed scaling with plain master weights.

    Lists: [gradients, FP8 codes, first moments, second moments, master weights, scales, amaxes, inverse scales].
    """
    fmt = fp8_format(fp8_dtype)
    for grad, codes, exp_avg, exp_avg_sq, master, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
        updated = _adam(
            grad.float(), master.float(), exp_avg, exp_avg_sq, _Step(step, bias_correction, beta1, beta2), lr, epsilon,
            mode, weight_decay,
        )  # fmt: skip
        master.copy_(updated)
        codes.view(torch.uint8).copy_(fmt.encode(updated * scale.view(-1)).view(codes.shape))
        amax.copy_(torch.maximum(amax, amax_of(updated).view_as(amax)))
        scale_inv.copy_(torch.reciprocal(scale))


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One step of SGD for lists [gradients, weights, momenta], and copies of the weights as a fourth.

    Nothing happens if ``noop_flag`` is not 0. ``wd`` is the weight decay, applied after the momentum if
    ``wd_after_momentum``; ``dampening`` reduces the gradient's contribution to the momentum, which starts as the
    gradient in the ``first_run``; ``scale`` multiplies the gradients.
    """
    if bool(noop_flag.view(-1)[0] != 0):
        return
    for gradient, weight, velocity, *copies in zip(*tensor_lists, strict=True):
        grad, current = gradient.float() * scale, weight.float()
        if wd != 0.0 and not wd_after_momentum:
            grad = grad + wd * current
        if momentum != 0.0:
            average = grad if first_run else velocity.float() * momentum + (1.0 - dampening) * grad
            velocity.copy_(average)
            grad = grad + momentum * average if nesterov else average
        if wd != 0.0 and wd_after_momentum:
            grad = grad + wd * current
        # Upstream adds in the weight's own type, so the update is rounded before the sum is.
        weight.add_((-lr * grad).to(weight.dtype))
        for copy in copies:
            copy.copy_(weight)


class _Step:
    """The decay rates of a step, their complements, and the bias corrections of its moments, rounded to float32."""

    def __init__(self, step: int, bias_correction: int, beta1: float, beta2: float) -> None:
        self.beta1, self.beta2 = _float32(beta1), _float32(beta2)
        self.rest1, self.rest2 = _float32(1.0 - self.beta1), _float32(1.0 - self.beta2)
        corrected = bias_correction == 1
        self.correction1 = _float32(1.0 - self.beta1**step) if corrected else 1.0
        self.correction2 = _float32(1.0 - self.beta2**step) if corrected else 1.0


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _adam(
    grad: torch.Tensor,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: _Step,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> torch.Tensor:
    """Update the moments in place; return the new parameter, float32."""
    if mode == L2_REGULARIZATION:
        grad = grad + weight_decay * param
    first = step.beta1 * exp_avg.float() + step.rest1 * grad
    second = step.beta2 * exp_avg_sq.float() + step.rest2 * grad * grad
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    update = (first / step.correction1) / ((second / step.correction2).sqrt() + epsilon)
    if mode != L2_REGULARIZATION:
        update = update + weight_decay * param
    return param - lr * update
