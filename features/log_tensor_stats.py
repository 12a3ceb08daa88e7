"""LogTensorStats: statistics of high-precision tensors."""

from __future__ import annotations

from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.statistics.names import Request, tensor_request


@own_feature()
class LogTensorStats(StatisticsFeature):
    """Logs statistics of activations, weights, gradients, outputs, wgrads and dgrads in high precision.

    Keys: ``tensors`` or ``tensors_struct``, ``stats``, ``freq``, ``start_step``, ``end_step``, ``start_end_list``.
    """

    def request(self, entry: object, tensor_name: str) -> Request:
        """One of the statistics of a tensor."""
        return tensor_request(entry, tensor_name)
