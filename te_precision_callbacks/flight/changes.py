"""Sudden changes between two steps: of a tensor's largest magnitude, a layer's precision, and the layers that run.

Each tensor is compared with its own last steps. A change is data (:class:`Change`), for the rules of the diagnosis.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.flight.rows import TOKENS, UPDATE, StepRow, TensorSlot

HISTORY = 32
LEAST_HISTORY = 16
"""The steps that a tensor is compared with, and how many of them it must have."""

SPIKE = {"activation": 4.0, "input": 4.0, "weight": 2.0, UPDATE: math.inf, TOKENS: math.inf}
SPIKE_OF_GRADIENT = 8.0
"""Powers of two above the largest magnitude of the last steps; of weights also below the smallest one. The magnitude of
a weight in scaled blocks is doubled where its largest scale, a power of two, is."""

SPIKE_OF_UPDATE = 3.0
LEAST_UPDATE = 0.1
"""Powers of two above the largest of the last :data:`LEAST_HISTORY` updates of a weight, and the least share of its
norm. Updates are largest at the start of a training, so there are no more.
"""

NEARLY_ALL = 0.9
"""The share of the weights that change at once where a script writes them on purpose, such as averages."""

STEADY = 1.0
"""Powers of two within which the largest magnitude of a steady weight stays in the last steps."""

GAP = 8
"""The most steps of a gap in low precision."""

SHARE = 4
"""The least number of steps in low precision for each step in high precision in gaps."""

LARGEST_CODES = (448.0, 57344.0)
"""Magnitudes of an inf in FP8 current scaling: Transformer Engine then sets the scale to 1, and the cast saturates."""

Kind = Literal["spike", "weights", "precision", "uncalled", "frozen"]


@dataclass(frozen=True)
class Change:
    """A sudden change.

    Attributes:
        slots: the changed tensors or layers, in the order of execution of the step.
        since: the first step with the change.
        until: the last step with it; None if it goes on, or has not ended yet. Layers without a GEMM or gradient are
            reported when they are missed, and again when they are back.
        before, now: the magnitude of the first tensor in the steps before, and in ``since``; 0 for other changes.
        of_all: whether nearly all weights have changed, and more than one.
    """

    kind: Kind
    slots: tuple[TensorSlot, ...]
    since: int
    until: int | None = None
    before: float = 0.0
    now: float = 0.0
    of_all: bool = False

    def as_json(self) -> dict[str, Any]:
        """All attributes, as JSON values."""
        return {**asdict(self), "slots": [list(slot) for slot in self.slots]}

    def __str__(self) -> str:
        first = self.slots[0]
        count = many(len(self.slots), "layer")
        if self.kind == "precision":
            if self.until == self.since:
                return f"{count} ran in high precision in step {self.since} alone"
            return f"{count} ran in high precision in the steps {self.since} to {self.until}, and not before and after"
        if self.kind in ABSENCES:
            return describe_absences(self.kind, [(self.since, self.until)] * len(self.slots))
        others = len(self.slots) - 1
        before = f"in the {LEAST_HISTORY} to {HISTORY} steps before"
        if first.tensor == UPDATE:
            more = f"; also {many(others, 'more weight')}" if others else ""
            usual = f"and by at most {self.before:.2%} in each of the {LEAST_HISTORY} updates before"
            return f"the weight has changed by {self.now:.0%} of its norm, in a sample, {usual}{more}"
        more = f"; {many(others, 'more tensor')} in the same step" if others else ""
        if self.now in LARGEST_CODES:
            more += ". That is the largest number of FP8 at scale 1, to which the cast turns an inf"
        return (
            f"the {first.magnitude} of the {first.tensor} is {self.now:.3g}, and was at most {self.before:.3g}"
            f" {before}{more}"
        )


ABSENCES: Mapping[Kind, tuple[str, str]] = {
    "uncalled": ("{} had a GEMM in each step", "none"),
    "frozen": ("the weights of {} got a gradient in each step", "none or only 0"),
}
"""Kinds of changes that end when the layer is back: what it had before, and has no more."""

_ABSENCE_OF: Mapping[str, Kind] = {"activation": "uncalled", "wgrad": "frozen"}


def describe_absences(kind: Kind, spans: Collection[tuple[int, int | None]]) -> str:
    """Describe layers by the first and the last step of each one's absence; None if it goes on."""
    before, none = ABSENCES[kind]
    text = before.format(many(len(spans), "layer"))
    firsts, lasts = zip(*spans, strict=True)
    ends = [last for last in lasts if last is not None]
    if len(ends) == len(spans):
        steps = "the steps"
        if len(set(spans)) > 1:
            steps = "some of the steps"
        return f"{text}, {none} in {steps} {min(firsts)} to {max(ends)}, and again after them"
    text += f", and {none} since step {min(firsts)}"
    if len(set(firsts)) > 1:
        text += " or later"
    if ends:
        text += f"; {many(len(ends), 'layer')} came back"
    return text


class _Begin(NamedTuple):
    """A step: its iteration, and as counted here."""

    iteration: int
    step: int


_Changed = dict[tuple[Kind, int, int | None], list[TensorSlot]]
"""Kind, first and last step of changes -> what has changed."""


class Changes:
    """Compares each step with the ones before.

    Args:
        slots: the tensors, by slot; more may be added.
    """

    def __init__(self, slots: Sequence[TensorSlot]) -> None:
        self._slots = slots
        self._steps = 0
        self._bits = np.full((HISTORY, 0), np.nan, np.float32)  # of the magnitudes of the last steps, in any order
        self._limits = np.empty(0)
        self._are_weights = np.empty(0, bool)
        self._are_wgrads = np.empty(0, bool)
        self._updates = np.empty(0, np.intp)  # their places
        self._update_bits = np.empty((LEAST_HISTORY, 0), np.float32)  # of the last updates, the newest last
        self._last: tuple[Sequence[int], Set[str], Set[int]] = (), frozenset(), frozenset()
        self._low_from: dict[str, int] = {}  # layer -> the step, as counted here
        self._highs: Counter[str] = Counter()  # layer -> its steps in high precision since then
        self._called_from: dict[TensorSlot, int] = {}
        self._high_since: dict[str, _Begin] = {}  # layer -> the first step of the last ones in high precision
        self._uncalled_since: dict[TensorSlot, int] = {}
        self._absent: dict[TensorSlot, int] = {}  # with the first step, if it was reported
        self._longest: dict[TensorSlot, int] = {}  # the longest absence that was reported, in steps

    def add(self, row: StepRow) -> Iterator[Change]:
        """Add the next step, and yield its changes."""
        if not row.order:
            return
        self._steps += 1
        yield from self._magnitudes(row)
        zeros = frozenset((self._are_wgrads[: len(row.magnitudes)] & (row.magnitudes == 0)).nonzero()[0].tolist())
        if self._last != (row.order, row.high, zeros) or self._high_since or self._uncalled_since:
            self._last = row.order, row.high, zeros
            places = {self._slots[place]: place for place in row.order if place not in zeros}
            layers = dict.fromkeys(slot.layer for slot in places if slot.tensor == "activation")
            changed: _Changed = defaultdict(list)
            self._compare_precision(row, layers, changed)
            self._compare_calls(row, places, changed)
            for (kind, since, until), alike in changed.items():
                yield Change(kind, tuple(alike), since, until)

    def _magnitudes(self, row: StepRow) -> Iterator[Change]:
        count = len(row.magnitudes)
        if count > len(self._limits):
            slots = self._slots[:count]
            more = np.full((HISTORY, count - self._bits.shape[1]), np.nan, np.float32)
            self._bits = np.concatenate([self._bits, more], axis=1)
            self._limits = np.array([SPIKE.get(slot.tensor, SPIKE_OF_GRADIENT) for slot in slots])
            tensors = np.array([slot.tensor for slot in slots])
            self._are_weights = tensors == "weight"
            self._are_wgrads = tensors == "wgrad"
            self._updates = np.flatnonzero(tensors == UPDATE)
            new = np.full((LEAST_HISTORY, len(self._updates) - self._update_bits.shape[1]), np.nan, np.float32)
            self._update_bits = np.concatenate([self._update_bits, new], axis=1)
        is_number = (row.magnitudes > 0) & (row.magnitudes < np.inf)
        now = np.full(self._bits.shape[1], np.nan, np.float32)
        np.log2(row.magnitudes, where=is_number, out=now[:count])
        if row.first is None:
            largest = np.fmax.reduce(self._bits)
            smallest = np.fmin.reduce(self._bits)
            fallen = smallest - now >= self._limits
            fallen[:count] |= (row.magnitudes == 0) & np.isfinite(self._bits[(self._steps - 1) % HISTORY, :count])
            jumps = (now - largest >= self._limits) | (self._are_weights & fallen)
            if jumps.any():
                jumps &= np.isfinite(self._bits).sum(0) >= LEAST_HISTORY
                are_steady = largest - smallest <= STEADY
                kinds: dict[Kind, npt.NDArray[np.bool_]] = {
                    "weights": jumps & self._are_weights & are_steady,
                    "spike": jumps & ~self._are_weights,
                }
                for kind, found in kinds.items():
                    if found.any():
                        places = [place for place in dict.fromkeys(row.order) if found[place]]
                        before = float(np.exp2(largest[places[0]]))
                        slots = tuple(self._slots[place] for place in places)
                        yield Change(kind, slots, row.iteration, None, before, float(row.magnitudes[places[0]]))
        self._bits[self._steps % HISTORY] = now
        yield from self._sudden_updates(row, now[self._updates])

    def _sudden_updates(self, row: StepRow, now: npt.NDArray[np.float32]) -> Iterator[Change]:
        """Yield the weights that change far more than in each of the last updates.

        Args:
            now: the logarithms of the updates; nan without an update.
        """
        bits = self._update_bits
        largest = bits.max(axis=0, initial=-np.inf)  # nan where there are fewer updates
        sudden = (now - largest >= SPIKE_OF_UPDATE) & (now >= math.log2(LEAST_UPDATE))
        found = [index for index in np.flatnonzero(sudden).tolist() if not self._was_idle(self._updates[index])]
        if found:
            first = found[0]
            slots = tuple(self._slots[place] for place in self._updates[found].tolist())
            larger = (now - largest >= 1).sum()  # twice as large, or more
            of_all = bool(larger >= max(2.0, NEARLY_ALL * np.isfinite(now).sum()))
            before = float(np.exp2(largest[first]))
            share = float(row.magnitudes[self._updates[first]])
            yield Change("weights", slots, row.iteration, None, before, share, of_all=of_all)
        fresh = np.isfinite(now)
        bits[:-1, fresh] = bits[1:, fresh]
        bits[-1, fresh] = now[fresh]

    def _was_idle(self, update: int) -> bool:
        """Return whether an expert had no tokens in one of the last steps: the update after them is far larger."""
        tokens = self._slots[update]._replace(tensor=TOKENS)
        if tokens not in self._slots:
            return False
        steps = np.arange(self._steps - LEAST_HISTORY, self._steps) % HISTORY
        return bool(np.isnan(self._bits[steps, self._slots.index(tokens)]).any())

    def _compare_precision(self, row: StepRow, layers: Iterable[str], changed: _Changed) -> None:
        for layer in layers:
            began = self._high_since.get(layer)
            if layer not in row.high:
                self._low_from.setdefault(layer, self._steps)
                if began is None:
                    continue
                del self._high_since[layer]
                lows = began.step - self._low_from[layer] - self._highs[layer]
                if lows >= max(LEAST_HISTORY, SHARE * self._highs[layer]):
                    changed["precision", began.iteration, row.iteration - 1].append(TensorSlot(layer, "activation"))
                self._highs[layer] += self._steps - began.step
            elif began is None and layer in self._low_from:
                self._high_since[layer] = _Begin(row.iteration, self._steps)
            elif began is not None and self._steps - began.step >= GAP:  # for good
                del self._high_since[layer], self._low_from[layer], self._highs[layer]

    def _compare_calls(self, row: StepRow, places: Mapping[TensorSlot, int], changed: _Changed) -> None:
        """Find layers without a GEMM any more, and layers that only have no wgrad; experts without tokens have one.
        Also find layers that are back; they are missed again after twice their longest absence.
        """
        for slot in [slot for slot in self._called_from if slot not in places]:
            if slot not in self._uncalled_since:
                if self._steps - self._called_from[slot] < LEAST_PRESENT:
                    del self._called_from[slot]
                    continue
                self._uncalled_since[slot] = row.iteration
            since = self._uncalled_since[slot]
            if row.iteration - since + 1 >= max(LEAST_ABSENT, 2 * self._longest.get(slot, 0)):
                del self._called_from[slot], self._uncalled_since[slot]
                forward = places.get(TensorSlot(slot.layer, "activation"))
                if slot.tensor == "activation" or (forward is not None and row.magnitudes[forward] >= 0):
                    self._absent[slot] = since
                    changed[_ABSENCE_OF[slot.tensor], since, None].append(slot)
        for slot in places:
            if slot.tensor not in _ABSENCE_OF:
                continue
            self._called_from.setdefault(slot, self._steps)
            self._uncalled_since.pop(slot, None)
            if slot in self._absent:
                since = self._absent.pop(slot)
                self._longest[slot] = row.iteration - since
                changed[_ABSENCE_OF[slot.tensor], since, row.iteration - 1].append(slot)
