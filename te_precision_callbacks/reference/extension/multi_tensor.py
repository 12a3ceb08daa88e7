"""Scaling and norms of lists of tensors: ``common/multi_tensor`` (TE 2.20).

``chunk_size`` divides the work of a GPU and has no effect here. The tensors at one place of each of ``tensor_lists``
belong together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_precision_callbacks.base.numerics.scaling import fp8_scale
from te_precision_callbacks.reference.extension.buffers import overwrite

TensorLists = Sequence[Sequence[torch.Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = in * scale`` for each pair of [inputs, outputs]; ``is_infinite`` becomes 1 if an input is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        _note_nonfinite(source, is_infinite)
        overwrite(target, source.float() * scale)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Euclidean norm of a list of tensors, float32 [1], and of each tensor, float32 [number of tensors] or [0].

    ``noop_flag`` becomes 1 if a norm is not finite.
    """
    norms = [torch.sqrt(tensor.float().square().sum()) for (tensor,) in zip(*tensor_lists, strict=True)]
    of_tensors = torch.stack(norms) if norms else torch.empty(0, dtype=torch.float32, device=noop_flag.device)
    _note_nonfinite(of_tensors, noop_flag)
    return torch.sqrt(of_tensors.square().sum()).reshape(1), of_tensors if per_tensor else of_tensors[:0]


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """The scale and its inverse for each amax, of lists [amaxes, scales, inverse scales], all float32."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        overwrite(scale, fp8_scale(amax, max_fp8, power_of_two=force_pow_2_scales, epsilon=epsilon))
        overwrite(scale_inv, torch.reciprocal(scale))


def _note_nonfinite(source: torch.Tensor, flag: torch.Tensor) -> None:
    if not bool(source.isfinite().all()):
        flag.fill_(1)
