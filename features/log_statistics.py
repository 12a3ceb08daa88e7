"""LogTensorStats, LogFp8TensorStats and LogNvfp4TensorStats: statistics of tensors, and of their quantized form."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature()
class LogTensorStats(StatisticsFeature):
    """Logs statistics of activations, weights, gradients, outputs, wgrads and dgrads in high precision."""


@own_feature()
class LogFp8TensorStats(StatisticsFeature):
    """Logs statistics of the quantized activations, weights and gradients.

    A statistic is ``[<recipe>_[<element format>_]]<name>[_columnwise]``. Without a recipe it is of the layer's own
    quantization; a recipe that the layer does not run is simulated.
    """


@own_feature()
class LogNvfp4TensorStats(StatisticsFeature):
    """Logs statistics of NVFP4 tensors as ``nvfp4_<name>``; NVFP4 is simulated under another recipe."""
