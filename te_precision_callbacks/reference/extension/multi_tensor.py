"""Scaling and norms of lists of tensors: ``common/multi_tensor`` (TE 2.20).

``chunk_size`` divides the work of a GPU and has no effect here. The tensors at one place of each of ``tensor_lists``
belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from te_precision_callbacks.base.numerics.scaling import fp8_scale
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import overwrite

TensorLists = Sequence[Sequence[torch.Tensor]]


def groups(tensor_lists: TensorLists, counts: Sequence[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors that belong together, one group after the other.

    Raises:
        ReferenceBackendError: the number of lists is not one of ``counts``, or the lists differ in length.
    """
    if len(tensor_lists) not in counts:
        allowed = " or ".join(str(count) for count in counts)
        raise ReferenceBackendError(f"{len(tensor_lists)} lists of tensors were given; {allowed} are needed.")
    if len({len(tensors) for tensors in tensor_lists}) != 1:
        raise ReferenceBackendError(f"The lists of tensors have lengths {[len(tensors) for tensors in tensor_lists]}.")
    return zip(*tensor_lists, strict=True)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """``out = in * scale`` for each pair of [inputs, outputs]; ``is_infinite`` becomes 1 if an input is not finite."""
    for source, target in groups(tensor_lists, (2,)):
        _note_nonfinite(source, is_infinite)
        overwrite(target, source.float() * scale)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Euclidean norm of a list of tensors, float32 [1], and of each tensor, float32 [number of tensors] or [0].

    ``noop_flag`` becomes 1 if a norm is not finite.
    """
    norms = [torch.sqrt(tensor.float().square().sum()) for (tensor,) in groups(tensor_lists, (1,))]
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
    for amax, scale, scale_inv in groups(tensor_lists, (3,)):
        overwrite(scale, fp8_scale(amax, max_fp8, power_of_two=force_pow_2_scales, epsilon=epsilon))
        overwrite(scale_inv, torch.reciprocal(scale))


def _note_nonfinite(source: torch.Tensor, flag: torch.Tensor) -> None:
    if not bool(source.isfinite().all()):
        flag.fill_(1)
