"""LogFp8TensorStats: statistics of quantized tensors, and of what other recipes would make of the tensors."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class LogFp8TensorStats(StatisticsFeature):
    """Logs statistics of the quantized activations, weights and gradients.

    A statistic is ``[<recipe>_[<element format>_]]<name>[_columnwise]``. With a recipe that the layer does not run,
    also where it runs none, it is what that recipe would give; without one it is of the layer's own.

    Keys: as LogTensorStats, and ``only_quantized``: no statistic without a recipe of a tensor that is not quantized.
    """
