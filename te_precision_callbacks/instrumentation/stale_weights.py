"""Detects forwards that use low-precision copies of outdated weights.

A forward with ``is_first_microbatch=False`` uses weights cached by an earlier forward. If a script never passes True
again, these are the first step's. Read from Transformer Engine 2.20.2: ``_fp8_workspaces`` of the modules, and
``rowwise_gemm_tensor`` of ``DebugQuantizedTensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import name_of_format
from te_precision_callbacks.statistics.names import STALE
from te_precision_callbacks.statistics.series import log_name

_ROUNDING = {"FP8": 2.0**-3, "MXFP8": 2.0**-3, "NVFP4": 2.0**-1}
"""First word of the format -> twice the largest rounding error, relative to the element."""

_SMALL = {"FP8": 2.0**-16, "MXFP8": 2.0**-10, "NVFP4": 2.0**-4}
"""The same for small elements, relative to the tensor's largest element."""


def stale_shares(module: Any, layers: tuple[str, ...], frame: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield log name and :data:`STALE` of each weight that the forward in ``frame`` reads from the cache."""
    cached = module.__dict__.get("_fp8_workspaces")
    if not cached or frame is None or frame.f_locals.get("is_first_microbatch") is not False:
        return
    for key, held in cached.items():
        weight, codes = getattr(module, key, None), getattr(held, "rowwise_gemm_tensor", held)
        if isinstance(weight, torch.Tensor) and codes is not None:
            share = _share(weight.detach(), codes)
            if share is not None:
                layer = layers[1] if key.startswith("fc2") and len(layers) > 1 else layers[0]
                yield log_name(layer, "weight", STALE), share


@torch.no_grad()
def _share(weight: torch.Tensor, codes: Any) -> torch.Tensor | None:
    """Return a number on the weight's device; None if the weight is not in low precision."""
    name = (name_of_format(codes) or "").partition(" ")[0]
    weight = getattr(weight, "_local_tensor", weight)
    if name not in _ROUNDING or name_of_format(weight) is not None:
        return None
    now, then = weight.float(), codes.dequantize(dtype=torch.float32)
    if now.shape != then.shape:
        return None
    size = now.abs()
    share: torch.Tensor = 100 * ((then - now).abs() > _ROUNDING[name] * size + _SMALL[name] * size.max()).float().mean()
    return share
