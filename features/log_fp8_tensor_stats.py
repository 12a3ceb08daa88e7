"""LogFp8TensorStats: statistics of quantized tensors, by the layer's recipe or a simulated recipe."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class LogFp8TensorStats(StatisticsFeature):
    """Logs statistics of the quantized activations, weights and gradients.

    A statistic is ``[<recipe>_[<element format>_]]<name>[_columnwise]``. Without a recipe it is of the layer's own
    quantization; a recipe that the layer does not run is simulated.
    """
