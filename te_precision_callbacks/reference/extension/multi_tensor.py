"""Scaling, norms, the update of delayed scaling, and optimizers of lists of tensors: ``common/multi_tensor`` (TE 2.20).

``chunk_size`` has no effect. Tensors at the same index of all ``tensor_lists`` belong together. The arithmetic of
scaling is in ``base/numerics/scaling.py``.

The steps of Transformer Engine's FusedAdam and FusedSGD (``adam.cu`` and ``sgd.cu``) are computed in float32, and
rounded to each tensor's dtype. ``mode`` 0 is Adam with L2 regularization, 1 is AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, SupportsInt

import torch

from te_precision_callbacks.base.numerics.scaling import amax_of, delayed_scaling, fp8_scale
from te_precision_callbacks.reference.extension.buffers import overwrite
from te_precision_callbacks.reference.extension.enums import fp8_format
from te_precision_callbacks.reference.extension.exports import export

TensorLists = Sequence[Sequence[torch.Tensor]]


@export
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = in * scale`` for each pair of [inputs, outputs]; ``is_infinite`` becomes 1 if an input is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        _note_nonfinite(source, is_infinite)
        overwrite(target, source.float() * scale)


@export
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Euclidean norm of a list of tensors, float32 [1], and of each tensor, float32 [number of tensors] or [0].

    ``noop_flag`` becomes 1 if a norm is not finite.
    """
    norms = [torch.sqrt(tensor.float().square().sum()) for (tensor,) in zip(*tensor_lists, strict=True)]
    tensor_norms = torch.stack(norms) if norms else torch.empty(0, dtype=torch.float32, device=noop_flag.device)
    _note_nonfinite(tensor_norms, noop_flag)
    return torch.sqrt(tensor_norms.square().sum()).reshape(1), tensor_norms if per_tensor else tensor_norms[:0]


@export
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Compute scale and inverse scale from each amax; lists [amaxes, scales, inverse scales], float32."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        overwrite(scale, fp8_scale(amax, max_fp8, power_of_two=force_pow_2_scales, epsilon=epsilon))
        overwrite(scale_inv, torch.reciprocal(scale))


def _note_nonfinite(source: torch.Tensor, flag: torch.Tensor) -> None:
    if not bool(source.isfinite().all()):
        flag.fill_(1)


@export
def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of ``tensor`` into ``amax`` (float32, shape [1]); NaN is skipped."""
    overwrite(amax, amax_of(tensor).view_as(amax))


@export
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: SupportsInt,
    margin: float,
) -> None:
    """Roll the amax histories and update the scales of delayed scaling, once per step for all modules, in place.

    ``common/recipe/delayed_scaling.cu``, ``kernel_bulk`` (TE 2.20). Histories of one length are updated together.

    Args:
        amax_reduction_buffer: float32, the newest amaxes of all modules, concatenated.
        amax_histories, scales: for each module float32 [history length, number of tensors], and [number of tensors].
        amax_compute_algo: "max" (over the history) or "most_recent".
        fp8_dtype: E4M3 or E5M2.
        margin: the scale is lowered by this power of two.
    """
    scaled_max = fp8_format(fp8_dtype).max * 2.0**-margin
    reduced = torch.split(amax_reduction_buffer.view(-1), [scale.numel() for scale in scales])
    by_length = defaultdict(list)
    for module in zip(reduced, amax_histories, scales, strict=True):
        by_length[module[1].shape[0]].append(module)
    for modules in by_length.values():
        newest, histories, module_scales = zip(*modules, strict=True)
        updated = delayed_scaling(
            torch.cat(newest),
            torch.cat(histories, dim=1),
            torch.cat([scale.view(-1) for scale in module_scales]),
            most_recent=amax_compute_algo == "most_recent",
            largest_number=scaled_max,
        )
        counts = [amaxes.shape[0] for amaxes in newest]
        with torch.inference_mode():  # in which some of them may have been made
            torch._foreach_copy_(histories, torch.split(updated[0], counts, dim=-1))
            torch._foreach_copy_([scale.view(-1) for scale in module_scales], torch.split(updated[1], counts, dim=-1))


L2_REGULARIZATION = 0


@export
def multi_tensor_adam(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, *hyperparameters: Any
) -> None:
    """One step for lists [gradients, parameters, first moments, second moments], and master weights as a fifth.

    ``hyperparameters``: of :func:`_adam`.
    """
    for grad, param, exp_avg, exp_avg_sq, *rest in zip(*tensor_lists, strict=True):
        (master,) = rest or [param]
        updated = _adam(grad, master, exp_avg, exp_avg_sq, *hyperparameters)
        if rest:
            param.copy_(updated)


@export
def multi_tensor_adam_fp8(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, *hyperparameters: Any
) -> None:
    """One step for FP8 parameters in delayed scaling with plain master weights.

    Lists: [gradients, FP8 codes, first moments, second moments, master weights, scales, amaxes, inverse scales]. The
    last of ``hyperparameters`` is the dtype of the codes.
    """
    fmt = fp8_format(hyperparameters[-1])
    for grad, codes, exp_avg, exp_avg_sq, master, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
        updated = _adam(grad, master, exp_avg, exp_avg_sq, *hyperparameters[:-1])
        codes.view(torch.uint8).copy_(fmt.encode(updated * scale.view(-1)).view(codes.shape))
        amax.copy_(torch.maximum(amax, amax_of(updated).view_as(amax)))
        scale_inv.copy_(torch.reciprocal(scale))


@export
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
        grad = gradient.float() * scale
        current = weight.float()
        if wd != 0.0 and not wd_after_momentum:
            grad = grad + wd * current
        if momentum != 0.0:
            average = grad
            if not first_run:
                average = velocity.float() * momentum + (1.0 - dampening) * grad
            velocity.copy_(average)
            if nesterov:
                average = grad + momentum * average
            grad = average
        if wd != 0.0 and wd_after_momentum:
            grad = grad + wd * current
        # Upstream adds in the weight's dtype, so the update is rounded before the sum.
        weight.add_((-lr * grad).to(weight.dtype))
        for copy in copies:
            copy.copy_(weight)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _adam(
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> torch.Tensor:
    """Update the parameter and its moments in place; return the new parameter, float32.

    The decay rates, their complements and the bias corrections are rounded to float32.
    """
    grad = gradient.float()
    param = parameter.float()
    if mode == L2_REGULARIZATION:
        grad = grad + weight_decay * param
    decay1 = _float32(beta1)
    decay2 = _float32(beta2)
    first = decay1 * exp_avg.float() + _float32(1.0 - decay1) * grad
    second = decay2 * exp_avg_sq.float() + _float32(1.0 - decay2) * grad * grad
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if bias_correction == 1:
        first = first / _float32(1.0 - decay1**step)
        second = second / _float32(1.0 - decay2**step)
    update = first / (second.sqrt() + epsilon)
    if mode != L2_REGULARIZATION:
        update = update + weight_decay * param
    param = param - lr * update
    parameter.copy_(param)
    return param
