"""LogTensorStats: statistics of high-precision tensors."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class LogTensorStats(StatisticsFeature):
    """Logs statistics of activations, weights, gradients, outputs, wgrads and dgrads in high precision."""
