"""What ``state.log_history`` gets of the statistics: the worst of a few, each with its layer.

{"loss": 2.31, ..., "step": 20, "te/worst_underflows%": 3.5, "te/worst_underflows%_layer": "model.layers.0.mlp.fc2",
 "te/worst_underflows%_tensor": "gradient", "te/worst_sqnr_db": 28.1, ..., "te/nonfinite_num": 0.0}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_precision_callbacks.records import Row, StepRecords
from te_precision_callbacks.records.metrics import overall_name, prefix_of
from te_precision_callbacks.records.worst import badness, by_family, judged, worst_of_all

_TRAINING_METRICS = ("loss", "train_loss")


class HistorySummary:
    """The worst values since the last logging event; at most twelve keys.

    Args:
        prefix: first part of every key.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._worst: dict[str, Row] = {}
        self._local = False

    def add(self, records: StepRecords) -> None:
        """Take the statistics of a step."""
        self._local |= records.local
        for key, row in worst_of_all(judged(by_family(records), records.unscaled)).items():
            known = self._worst.get(key)
            if known is None or badness(*row[3:]) > badness(*known[3:]):
                self._worst[key] = row

    def update(self, entry: dict[str, Any]) -> None:
        """Put the summary into the entry of a logging event of the training, and begin anew.

        The entry of an evaluation, or of what a user logs, is left as it is; so is one where nothing was collected.
        """
        if not any(name in entry for name in _TRAINING_METRICS):
            return
        entry.update(self._keys())
        self._worst.clear()

    def _keys(self) -> Mapping[str, float | str]:
        keys: dict[str, float | str] = {}
        for name, row in self._worst.items():
            key = overall_name(prefix_of(self._prefix, local=self._local), name)
            keys[key] = row.value
            if row.value:  # no tensor is the worst where all have no underflow, or no inf and nan
                keys[f"{key}_layer"] = row.layer
                keys[f"{key}_tensor"] = row.tensor
        return keys
