"""LogNvfp4TensorStats: what quantization to NVFP4 makes of tensors, or would make of them."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.statistics.names import Request, quantized_request


@own_feature()
class LogNvfp4TensorStats(StatisticsFeature):
    """Logs statistics of NVFP4 tensors as ``nvfp4_<name>``; of a layer that runs another recipe, what NVFP4 would give.

    Keys: as LogTensorStats.
    """

    def request(self, entry: object, tensor_name: str) -> Request:
        """One of the statistics of a quantized tensor, under NVFP4."""
        return quantized_request(entry, default_recipe="nvfp4")
