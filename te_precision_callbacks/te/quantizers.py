"""Quantizers of FP8 with one scale per tensor. Importing this module imports Transformer Engine.

Read from 2.20.2: ``pytorch/quantization.py`` and ``pytorch/tensor/float8_tensor.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.quantization import _default_sf_compute
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from te_precision_callbacks.base.numerics.formats import E4M3, E5M2
from te_precision_callbacks.te.tensors import fp8_format


def quantizer_of_amax(values: torch.Tensor, margin: int, *, e5m2: bool) -> Any:
    """Return a quantizer of delayed scaling, with the scale that it derives from the amax of the values."""
    amax = values.abs().amax().float().reshape(1)
    scale = _default_sf_compute(amax, torch.ones_like(amax), E5M2.max if e5m2 else E4M3.max, margin)
    return Float8Quantizer(scale, amax, DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3)


def current_scaling(values: torch.Tensor, default: Any, margin: int) -> Any:
    """Return a current-scaling quantizer in the format of ``default``; with a margin, :func:`quantizer_of_amax`."""
    if margin == 0 or not values.numel():
        return Float8CurrentScalingQuantizer(default.dtype, device=values.device)
    return quantizer_of_amax(values, margin, e5m2=fp8_format(default) is E5M2)
