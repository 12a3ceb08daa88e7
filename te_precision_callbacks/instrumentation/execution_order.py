"""Records the execution order of layers: a listener of the tap."""

from __future__ import annotations

from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent


class ExecutionOrder:
    """Layer -> position of its first ``forward`` and ``backward``."""

    def __init__(self) -> None:
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self._has_grown = False

    def __call__(self, event: GemmEvent) -> None:
        places = self.forward if event.gemm == "fprop" else self.backward
        if event.layer not in places and event.kind in (ForwardKind.OBSERVED, ForwardKind.SILENT):
            places[event.layer] = len(places)
            self._has_grown = True

    def take_grown(self) -> bool:
        """Return whether layers were added since the last call."""
        grown, self._has_grown = self._has_grown, False
        return grown
