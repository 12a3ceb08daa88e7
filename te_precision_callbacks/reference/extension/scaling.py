"""Measuring amax, and the update of delayed scaling, in place. The arithmetic is in ``base/numerics/scaling.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import SupportsInt

import torch

from te_precision_callbacks.base.numerics.scaling import amax_of, delayed_scaling
from te_precision_callbacks.reference.extension.buffers import overwrite
from te_precision_callbacks.reference.extension.enums import fp8_format


@torch.no_grad()
def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of ``tensor`` into ``amax`` (float32, shape [1]); NaN is skipped."""
    overwrite(amax, amax_of(tensor).view_as(amax))


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: SupportsInt,
    margin: float,
) -> None:
    """Roll the amax histories and renew the scales of delayed scaling, once a step for all modules, in place.

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
        by_length[len(module[1])].append(module)
    for modules in by_length.values():
        newest, histories, own_scales = zip(*modules, strict=True)
        updated = delayed_scaling(
            torch.cat(newest),
            torch.cat(histories, dim=1),
            torch.cat([scale.view(-1) for scale in own_scales]),
            most_recent=amax_compute_algo == "most_recent",
            largest_number=scaled_max,
        )
        counts = [len(amaxes) for amaxes in newest]
        by_module = (torch.split(values, counts, dim=-1) for values in updated)
        for history, scale, new_history, new_scale in zip(histories, own_scales, *by_module, strict=True):
            overwrite(history, new_history)
            overwrite(scale, new_scale.view(scale.shape))
