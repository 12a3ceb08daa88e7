"""The worst values of a few statistics, each with its layer, for ``state.log_history``.

{"loss": 2.31, ..., "step": 20, "te/worst_underflows%": 3.5, "te/worst_underflows%_layer": "model.layers.0.mlp.fc2",
 "te/worst_underflows%_tensor": "gradient", "te/worst_sqnr_db": 28.1, ..., "te/nonfinite_num": 0.0}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_precision_callbacks.sinks import StepRecords
from te_precision_callbacks.sinks.metrics import overall_name, prefix_of
from te_precision_callbacks.sinks.worst import judged, worst_of_all
from te_precision_callbacks.statistics.series import Series

_TRAINING_METRICS = ("loss", "train_loss")


class HistorySummary:
    """The worst values since the last logging event; at most twelve keys.

    Args:
        prefix: first part of every key.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._worst: dict[str, tuple[Series, float]] = {}
        self._local = False

    def add(self, records: StepRecords) -> None:
        """Take the statistics of a step."""
        self._local |= records.local
        for key, (series, value) in worst_of_all(judged(records)).items():
            known, worst = self._worst.get(key, (None, 0.0))
            if known is None or series.family.badness(value) > known.family.badness(worst):
                self._worst[key] = (series, value)

    def update(self, entry: dict[str, Any]) -> None:
        """Put the summary into the entry of a logging event of the training, and start a new summary.

        Entries of evaluations, entries that a user logs, and entries without collected statistics stay unchanged.
        """
        if not any(name in entry for name in _TRAINING_METRICS):
            return
        entry.update(self._keys())
        self._worst.clear()

    def _keys(self) -> Mapping[str, float | str]:
        keys: dict[str, float | str] = {}
        for name, (series, value) in self._worst.items():
            key = overall_name(prefix_of(self._prefix, local=self._local), name)
            keys[key] = value
            if value:  # no tensor is the worst where all have no underflow, or no inf and nan
                keys[f"{key}_layer"] = series.layer
                keys[f"{key}_tensor"] = series.tensor
        return keys
