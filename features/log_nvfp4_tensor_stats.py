"""LogNvfp4TensorStats: statistics of tensors that are, or would be, quantized to NVFP4."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class LogNvfp4TensorStats(StatisticsFeature):
    """Logs statistics of NVFP4 tensors as ``nvfp4_<name>``; NVFP4 is simulated under another recipe."""
