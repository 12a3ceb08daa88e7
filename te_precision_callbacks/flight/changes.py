"""Sudden changes between two steps: of a tensor's largest magnitude, of a layer's precision, and of what runs.

Each tensor is compared with its own last steps. What is found is data (:class:`Change`), for rules of the diagnosis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.flight.ring import Slot, StepRow

HISTORY = 32
LEAST_HISTORY = 16
"""The steps that a tensor is compared with, and how many of them it must have."""

SPIKE = {"activation": 4.0, "weight": 1.0}
SPIKE_OF_GRADIENT = 8.0
"""Powers of two above the largest magnitude of the last steps; of weights also below the smallest one."""

STEADY = 0.25
"""Powers of two by which a steady weight's largest magnitude changes in a step."""

GAP = 8
"""The most steps of a gap in low precision; the steps after which a layer is not called any more."""

Kind = Literal["spike", "weights", "precision", "uncalled"]


@dataclass(frozen=True)
class Change:
    """A sudden change.

    Attributes:
        slots: what has changed, in the order of execution of the step.
        since: the first step with the change.
        until: the last step with it; None if it goes on, or has not ended yet.
        before, now: the magnitude of the first tensor in the steps before, and in ``since``; 0 for other changes.
    """

    kind: Kind
    slots: tuple[Slot, ...]
    since: int
    until: int | None = None
    before: float = 0.0
    now: float = 0.0


class Changes:
    """Compares each step with the ones before.

    Args:
        slots: the tensors, by slot; more may be added.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._rows: deque[npt.NDArray[np.float32]] = deque(maxlen=HISTORY)
        self._low_for: dict[str, int] = {}
        self._high_since: dict[str, int] = {}
        self._uncalled_since: dict[str, int] = {}
        self._called_for: dict[str, int] = {}

    def add(self, row: StepRow) -> Iterator[Change]:
        """Add the next step, and yield its changes."""
        if not len(row.magnitudes) or not row.order:
            return
        yield from self._magnitudes(row)
        yield from self._precision(row)
        yield from self._calls(row)

    def _magnitudes(self, row: StepRow) -> Iterator[Change]:
        now = np.where(row.magnitudes > 0, row.magnitudes, np.nan)
        count = len(now)
        enough = len(self._rows) >= LEAST_HISTORY
        if enough and row.first is None:
            past = np.full((len(self._rows), count), np.nan, np.float32)
            for place, old in enumerate(self._rows):
                past[place, : len(old)] = old[:count]
            known = np.isfinite(past).sum(0) >= LEAST_HISTORY
            bits = np.log2(past, where=np.isfinite(past), out=np.full_like(past, np.nan))
            bits_now = np.log2(now)
            above = bits_now - np.fmax.reduce(bits)
            limits = np.array([SPIKE.get(slot.tensor, SPIKE_OF_GRADIENT) for slot in self._slots[:count]])
            weights = np.array([slot.tensor == "weight" for slot in self._slots[:count]])
            with np.errstate(invalid="ignore"):
                high = known & (above >= limits)
                low = known & weights & (np.fmin.reduce(bits) - bits_now >= limits)
                steps = np.abs(np.diff(bits, axis=0))
                steady = np.fmax.reduce(np.where(np.isfinite(steps), steps, 0.0)) <= STEADY
            written = weights & steady & (high | low)
            for kind, found in (("weights", written), ("spike", high & ~weights)):
                if found.any():
                    yield self._change(kind, row, found, np.fmax.reduce(past), now)
        self._rows.append(now)

    def _change(
        self, kind: Kind, row: StepRow, found: npt.NDArray[np.bool_], before: npt.NDArray[np.float32], now: npt.NDArray[np.float32]
    ) -> Change:
        places = [place for place in dict.fromkeys(row.order) if found[place]]
        first = places[0]
        slots = tuple(self._slots[place] for place in places)
        return Change(kind, slots, row.iteration, None, float(before[first]), float(now[first]))

    def _precision(self, row: StepRow) -> Iterator[Change]:
        returned: dict[tuple[int, int], list[Slot]] = {}
        for layer in self._layers(row):
            since = self._high_since.get(layer)
            if layer in row.high:
                if since is None and self._low_for.get(layer, 0) >= LEAST_HISTORY:
                    self._high_since[layer] = row.iteration
                self._low_for[layer] = 0
                continue
            self._low_for[layer] = self._low_for.get(layer, 0) + 1
            if since is not None:
                del self._high_since[layer]
                if row.iteration - since <= GAP:
                    returned.setdefault((since, row.iteration - 1), []).append(Slot(layer, "activation"))
        for (since, until), slots in returned.items():
            yield Change("precision", tuple(slots), since, until)

    def _calls(self, row: StepRow) -> Iterator[Change]:
        called = dict.fromkeys(self._layers(row))
        missing: dict[int, list[Slot]] = {}
        for layer in called:
            self._called_for[layer] = self._called_for.get(layer, 0) + 1
            self._uncalled_since.pop(layer, None)
        for layer, steps in self._called_for.items():
            if layer in called:
                continue
            if steps >= LEAST_HISTORY:
                since = self._uncalled_since.setdefault(layer, row.iteration)
                if row.iteration - since + 1 == GAP:
                    missing.setdefault(since, []).append(Slot(layer, ""))
            else:
                self._called_for[layer] = 0
        for since, slots in missing.items():
            yield Change("uncalled", tuple(slots), since)

    def _layers(self, row: StepRow) -> Set[str]:
        return {slot.layer: None for slot in map(self._slots.__getitem__, row.order) if slot.tensor == "activation"}.keys()
