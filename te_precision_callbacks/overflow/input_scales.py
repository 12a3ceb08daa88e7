"""The FP8 scale under which a Transformer Engine module quantizes the input of its first GEMM.

Read from Transformer Engine 2.20.2 (``pytorch/module/base.py``, ``pytorch/quantization.py``): a module keeps
``fp8_meta`` and ``quantizers``, and sets ``fp8`` in each forward. So does DotProductAttention, whose scales are those
of tensors inside the module, and GroupedLinear, which splits its input and has a scale for each part.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.numerics.layouts import fp8_format
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.overflow.extreme_slots import Slot, Slots


def fp8_scale(module: Any, direction: Literal["scaling_fwd", "scaling_bwd"], slots: Slots) -> Slot | float | None:
    """The current scale, without waiting for the device.

    Args:
        module: any module.
        direction: ``scaling_fwd`` for the input, ``scaling_bwd`` for the gradient of the output.
        slots: keep a scale that is in device memory.

    Returns:
        Under delayed scaling a slot; under current scaling, where the scale follows from the tensor's amax, the number
        to which the amax is scaled; None for any other module, recipe and precision, and if another version of
        Transformer Engine keeps its quantizers elsewhere.
    """
    meta = getattr(module, "fp8_meta", None)
    name = _name_in_transformer_engine(module)
    if not isinstance(meta, dict) or name is None or not getattr(module, "fp8", False):
        return None
    index = _GRADIENT_OF_OUTPUT[name] if direction == "scaling_bwd" else 0
    scale = getattr(meta.get(direction), "scale", None)
    if isinstance(scale, torch.Tensor) and scale.numel() > index:
        if is_capturing():
            return None
        return slots.note(scale.reshape(-1)[index])
    try:
        quantizer = module.quantizers[direction][index]
        # A module that normalizes its input first does not quantize the tensor that enters.
        return _current_scaling(quantizer) if direction == "scaling_bwd" or name == "Linear" else None
    except (AttributeError, LookupError, TypeError):
        return None


_GRADIENT_OF_OUTPUT = {"Linear": 0, "LayerNormLinear": 0, "LayerNormMLP": 2}
"""The index of the gradient of the output in each module's scales of ``scaling_bwd`` (``FP8BwdTensors``)."""


def _name_in_transformer_engine(module: Any) -> str | None:
    """The name of the module's class in Transformer Engine, or of the base class there."""
    return next((base.__name__ for base in type(module).__mro__ if base.__name__ in _GRADIENT_OF_OUTPUT), None)


def _current_scaling(quantizer: Any) -> float | None:
    if recipe_of(quantizer) != "fp8_current_scaling":
        return None
    if quantizer.with_amax_reduction or quantizer.force_pow_2_scales or quantizer.amax_epsilon:
        return None
    return fp8_format(quantizer).max
