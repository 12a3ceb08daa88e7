"""The FP8 scale under which a Transformer Engine module quantizes what enters its first GEMM.

Read from Transformer Engine 2.20.2 (``pytorch/module/base.py``, ``pytorch/quantization.py``): a module keeps
``fp8_meta`` and ``quantizers``, and sets ``fp8`` in each forward.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_precision_callbacks.debug_utils.slots import Slot, Slots
from te_precision_callbacks.engine.quantization import is_e5m2
from te_precision_callbacks.formats import E4M3, E5M2


def fp8_scale(module: Any, direction: Literal["scaling_fwd", "scaling_bwd"], slots: Slots) -> Slot | float | None:
    """The scale of now, without waiting for the device.

    Args:
        module: any module.
        direction: ``scaling_fwd`` for the input, ``scaling_bwd`` for the gradient of the output.
        slots: where a scale that is in device memory is kept.

    Returns:
        Under delayed scaling a slot; under current scaling, where the scale follows from the tensor's amax, the number
        that the amax is scaled to; None for any other module, recipe and precision, and where another version of
        Transformer Engine keeps its quantizers otherwise.
    """
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict) or not getattr(module, "fp8", False):
        return None
    scale = getattr(meta.get(direction), "scale", None)
    if isinstance(scale, torch.Tensor) and scale.numel():
        return slots.note(scale.reshape(-1)[0])
    try:
        return _current_scaling(module, direction)
    except (AttributeError, LookupError, TypeError):
        return None


def _current_scaling(module: Any, direction: Literal["scaling_fwd", "scaling_bwd"]) -> float | None:
    quantizers = module.quantizers.get(direction) or [None]
    quantizer = quantizers[0]
    # A module that normalizes its input first quantizes another tensor than the one that enters.
    enters_gemm = direction == "scaling_bwd" or type(module).__name__ == "Linear"
    if type(quantizer).__name__ != "Float8CurrentScalingQuantizer" or not enters_gemm:
        return None
    if quantizer.with_amax_reduction or quantizer.force_pow_2_scales or quantizer.amax_epsilon:
        return None
    return E5M2.max if is_e5m2(quantizer) else E4M3.max
