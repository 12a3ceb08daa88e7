"""PerTensorScaling: chosen tensors of a delayed-scaling layer are cast with a scale from their own amax."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.config.keys import Margin
from te_precision_callbacks.features.base import ModifyingFeature
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.te.quantizers import Float8Quantizer, current_scaling


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
        quantizer = current_scaling(values, default_quantizer, config.margin)
        if out is not None:
            quantizer.update_quantized(values, out)
            return None
        return quantizer(values)
