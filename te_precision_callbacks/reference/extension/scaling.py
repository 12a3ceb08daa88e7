"""Amax and scale: measuring them, choosing them, and updating them under delayed scaling.

Usage::

    amax = amax_of(tensor)  # float32, shape [1]
    scale = scale_from_amax(amax, E4M3)  # what the values are multiplied by before the cast
    scale_inv = torch.reciprocal(scale)  # what brings them back

    # Delayed scaling, once a step, for all modules together:
    fused_amax_and_scale_update_after_reduction(amaxes, histories, scales, "max", DType.kFloat8E4M3, 0.0)

All in float32, rounded as upstream's kernels round. A division here is always of a tensor by a tensor: torch computes
number / tensor as a reciprocal and a product, which is off by one unit in the last place for some values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsInt

import torch
import torch.nn.functional as F

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import overwrite
from te_precision_callbacks.reference.extension.dtypes import fp8_format

FLOAT32_MAX = torch.finfo(torch.float32).max


@torch.no_grad()
def amax_of(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude; NaN is passed over, infinity is not.

    ``common/recipe/current_scaling.cu`` (TE 2.20): the running maximum is ``fmaxf``, which prefers a number to NaN.

    Args:
        tensor: any float type, any shape.

    Returns:
        float32, shape [1]; 0 for an empty tensor and for one that is NaN throughout.
    """
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=tensor.device)
    extremes = tensor.detach().aminmax()
    amax = torch.maximum(-extremes.min, extremes.max).float().reshape(1)
    if bool(amax.isnan()):
        magnitudes = tensor.detach().abs()
        amax = torch.where(magnitudes.isnan(), torch.zeros_like(magnitudes), magnitudes).max().float().reshape(1)
    return amax


def block_amaxes(matrix: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The largest magnitude in each block of a matrix; NaN is passed over as in :func:`amax_of`.

    Args:
        matrix: float32, [rows, columns].
        height: rows of a block; the last block may have fewer.
        width: columns of a block; the last block may have fewer.

    Returns:
        float32, [rows / height, columns / width], rounded up.
    """
    rows, columns = matrix.shape
    magnitudes = F.pad(matrix.abs(), (0, -columns % width, 0, -rows % height))
    blocks = magnitudes.view(-(-rows // height), height, -(-columns // width), width)
    amaxes = blocks.amax(dim=(1, 3))
    if bool(amaxes.isnan().any()):
        amaxes = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks).amax(dim=(1, 3))
    return amaxes


@torch.no_grad()
def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of ``tensor`` into ``amax`` (float32, shape [1]). See :func:`amax_of`."""
    overwrite(amax, amax_of(tensor).view_as(amax))


def scale_from_amax(
    amax: torch.Tensor,
    fp8_max: float,
    *,
    force_pow_2: bool = False,
    epsilon: float = 0.0,
    largest: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale of current and of FP8 block scaling: the largest FP8 number divided by amax.

    ``common/recipe/recipe_common.cuh``, ``compute_scale_from_amax`` (TE 2.20). amax is raised to epsilon first. An amax
    of 0, infinity or NaN gives 1; a quotient beyond float32 gives ``largest``.

    Args:
        amax: float32, any shape.
        fp8_max: largest number of the format.
        force_pow_2: round the scale down to a power of two.
        epsilon: lower bound of amax.
        largest: in place of infinity; rounded down too with ``force_pow_2``.

    Returns:
        float32, shape of ``amax``.
    """
    bound = torch.full_like(amax, epsilon)
    amax = torch.where(amax < bound, bound, amax)
    scale = torch.full_like(amax, fp8_max) / amax
    scale = torch.where(scale.isinf(), torch.full_like(scale, largest), scale)
    if force_pow_2:
        # Sign and exponent only.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    unusable = amax.isinf() | (amax == 0) | amax.isnan()
    return torch.where(unusable, torch.ones_like(scale), scale)


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: SupportsInt,
    margin: float,
) -> None:
    """Roll the amax histories and renew the scales of delayed scaling, in place.

    ``common/recipe/delayed_scaling.cu``, ``kernel_bulk`` (TE 2.20). For each tensor: the newest amax is that of the
    reduction buffer, or row 0 of the history where that is 0. If it is not 0 the history moves up by one row, the
    newest amax becomes its last row, and row 0 becomes 0. The scale becomes ``fp8_max * 2**-margin / amax`` if amax is
    finite and above 0, at most the largest float32 number; else it stays.

    Args:
        amax_reduction_buffer: float32, the newest amaxes of all modules, concatenated.
        amax_histories: for each module float32 [history length, number of tensors].
        scales: for each module float32 [number of tensors].
        amax_compute_algo: "max" (over the history) or "most_recent".
        fp8_dtype: E4M3 or E5M2.
        margin: the scale is lowered by this power of two.

    Raises:
        ReferenceBackendError: another algorithm, or counts that do not fit.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ReferenceBackendError(
            f'amax_compute_algo={amax_compute_algo!r}: the extension knows "max" and "most_recent".'
        )
    expected = sum(scale.numel() for scale in scales)
    if len(amax_histories) != len(scales) or amax_reduction_buffer.numel() != expected:
        raise ReferenceBackendError(
            f"{len(amax_histories)} amax histories, {len(scales)} scale tensors with {expected} scales and "
            f"{amax_reduction_buffer.numel()} reduced amaxes do not fit together."
        )
    scaled_max = fp8_format(fp8_dtype).max * 2.0**-margin
    reduced = torch.split(amax_reduction_buffer.view(-1), [scale.numel() for scale in scales])
    for newest, history, scale in zip(reduced, amax_histories, scales, strict=True):
        _update(newest, history, scale.view(-1), amax_compute_algo, scaled_max)


def _update(
    newest: torch.Tensor, history: torch.Tensor, scale: torch.Tensor, algorithm: str, scaled_max: float
) -> None:
    newest = torch.where(newest != 0, newest, history[0])
    rolled = torch.cat([history[1:], newest.unsqueeze(0)])
    if algorithm == "most_recent":
        amax = newest
    else:
        # fmaxf: NaN loses against a number. A tensor without a new amax keeps its scale, as if its history were 0.
        amax = torch.where(rolled.isnan(), torch.zeros_like(rolled), rolled).amax(dim=0)
        amax = torch.where(newest != 0, amax, torch.zeros_like(amax))
    rolled[0] = 0.0
    overwrite(history, torch.where(newest != 0, rolled, history))
    usable = amax.isfinite() & (amax > 0)
    renewed = (torch.full_like(amax, scaled_max) / amax).clamp(max=FLOAT32_MAX)
    overwrite(scale, torch.where(usable, renewed, scale.clamp(max=FLOAT32_MAX)))
