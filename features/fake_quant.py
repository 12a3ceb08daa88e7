"""FakeQuant: chosen tensors are rounded to a format, and the GEMM runs in high precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.base.vocabulary import COLUMNWISE
from te_precision_callbacks.config.keys import Quantization
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.engine.simulation import round_to_mxfp8
from te_precision_callbacks.features.base import HighPrecisionFeature, ModifyingFeature
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.te.quantizers import quantizer_of_amax


@own_feature()
class FakeQuant(HighPrecisionFeature, ModifyingFeature):
    """Rounds tensors to FP8 (with a scale from their amax) or MXFP8 and back; their GEMMs run in high precision."""

    def options_for(self, options: FeatureSchema, tensor: str | None, gemm: str | None) -> Sequence[object]:
        """Return the options of a call; for a GEMM, the options of each tensor, since their steps may differ."""
        if tensor is not None:
            options_of_call: Sequence[object] = super().options_for(options, tensor, gemm)
            return options_of_call
        return [target.options for target in options.targets if target.gemm in (gemm, None)]

    @api_method
    def modify_tensor(
        self,
        config: Quantization,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Return the rounded tensor, in ``dtype`` or the tensor's dtype; None if written to ``out``."""
        rounded = self._round(config, tensor, columnwise=gemm == COLUMNWISE[tensor_name])
        if out is not None:
            out.copy_(rounded)
            return None
        if dtype is None:
            return rounded
        return rounded.to(dtype)

    def _round(self, config: Quantization, tensor: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
        if not tensor.numel():
            return tensor.clone()  # an expert without tokens
        quant_format = str(config.quant_format)
        e5m2 = quant_format.endswith("E5M2")
        if quant_format.startswith("MX"):
            return round_to_mxfp8(tensor, e5m2=e5m2, columnwise=columnwise).to(tensor.dtype)
        rounded: torch.Tensor = quantizer_of_amax(tensor, config.margin, e5m2=e5m2)(tensor).dequantize()
        return rounded
