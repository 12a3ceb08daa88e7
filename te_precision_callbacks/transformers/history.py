"""What ``state.log_history`` gets of the statistics: the worst of a few, each with its layer.

{"loss": 2.31, ..., "step": 20, "te/worst_underflows%": 3.5, "te/worst_underflows%_layer": "model.layers.0.mlp.fc2",
 "te/worst_underflows%_tensor": "gradient", "te/worst_sqnr_db": 28.1, ..., "te/nonfinite_num": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from te_precision_callbacks.records import Row, StepRecords
from te_precision_callbacks.records.metrics import badness

_SUMMARIES = {"worst_underflows%": "underflows%", "worst_sqnr_db": "sqnr_db", "nonfinite_num": "nonfinite_num"}
"""Key, and a part of the statistic's name, which also has a recipe and a direction."""

_TRAINING_METRICS = ("loss", "train_loss")


class HistorySummary:
    """The worst values since the last logging event; at most nine keys.

    Args:
        prefix: first part of every key.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._worst: dict[str, tuple[float, Row]] = {}
        self._local = False

    def add(self, records: StepRecords) -> None:
        """Take the statistics of a step."""
        self._local |= records.local
        for row in records:
            for key, part in _SUMMARIES.items():
                if part not in row.statistic or row.value == math.inf:
                    continue  # an SQNR of inf: the quantized tensor is exact
                bad = badness(row.statistic, row.value)
                if key not in self._worst or bad > self._worst[key][0]:
                    self._worst[key] = (bad, row)

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
        prefix = f"{self._prefix}local/" if self._local else self._prefix  # of one rank alone
        for name, (_, row) in self._worst.items():
            keys[f"{prefix}{name}"] = row.value
            if row.value:  # no tensor is the worst where all have no underflow, or no inf and nan
                keys[f"{prefix}{name}_layer"] = row.layer
                keys[f"{prefix}{name}_tensor"] = row.tensor
        return keys
