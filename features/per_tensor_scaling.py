"""PerTensorScaling: chosen tensors of a delayed-scaling layer are cast with a scale from their own amax."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.registry import api_method
from transformer_engine.pytorch.quantization import _default_sf_compute
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.base.numerics.layouts import fp8_format
from te_precision_callbacks.config.keys import Margin
from te_precision_callbacks.features.base import ModifyingFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class PerTensorScaling(ModifyingFeature):
    """Casts selected tensors to FP8 with current scaling in a layer with delayed scaling."""

    @api_method
    def modify_tensor(
        self,
        config: Margin,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        default_quantizer: Any,
        out: Any = None,
    ) -> Any:
        """Return the tensor in the recipe's FP8 format; None if written to ``out``.

        Raises:
            FeatureError: the layer's recipe is not delayed scaling.
        """
        if not isinstance(default_quantizer, Float8Quantizer):
            runs = "no FP8 recipe" if default_quantizer is None else type(default_quantizer).__name__
            raise FeatureError(
                f"PerTensorScaling on {tensor_name} of {layer_name!r} needs the recipe DelayedScaling, and the layer"
                f" runs {runs}. Under current scaling every tensor has its own scale already."
            )
        values = tensor.contiguous()
        quantizer = _quantizer(values, default_quantizer, config.margin)
        if out is not None:
            quantizer.update_quantized(values, out)
            return None
        return quantizer(values)


def _quantizer(values: torch.Tensor, default: Any, margin: int) -> Any:
    """Transformer Engine's current-scaling quantizer; with a margin, its delayed-scaling quantizer with that scale."""
    if margin == 0 or not values.numel():
        return Float8CurrentScalingQuantizer(default.dtype, device=values.device)
    amax = values.abs().amax().float().reshape(1)
    scale = _default_sf_compute(amax, torch.ones_like(amax), fp8_format(default).max, margin)
    return Float8Quantizer(scale, amax, default.dtype)
