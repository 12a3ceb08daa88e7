"""Sudden changes between two steps: of a tensor's largest magnitude, a layer's precision, and the layers that run.

Each tensor is compared with its own last steps. A change is data (:class:`Change`), for the rules of the diagnosis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.flight.rows import BACKWARD, TOKENS, UPDATE, StepRow, TensorSlot
from te_precision_callbacks.statistics.arrays import Mask

HISTORY = 32
LEAST_HISTORY = 16
"""The steps that a tensor is compared with, and how many of them it must have."""

SPIKE_OF_UPDATE = 3.0
LEAST_UPDATE = 0.1
"""Powers of two above the largest of the last :data:`LEAST_HISTORY` updates of a weight, and the least share of its
norm. Updates are largest at the start of a training, so there are no more.
"""

SPIKE = {"activation": 4.0, "input": 4.0, "weight": 2.0, UPDATE: SPIKE_OF_UPDATE, TOKENS: math.inf}
SPIKE_OF_GRADIENT = 8.0
"""Powers of two above the largest magnitude of the last steps; of weights also below the smallest one. The magnitude of
a weight in scaled blocks is doubled where its largest scale, a power of two, is."""

NEARLY_ALL = 0.9
"""The share of the weights that change at once where a script writes them on purpose, such as averages."""

STEADY = 1.0
"""Powers of two within which the largest magnitude of a steady weight stays in the last steps."""

GAP = 8
"""The most steps of a gap in low precision."""

STAYS = 8
"""The steps after its first one in which a spike of the forward stays, so that it is none of a single batch."""

SHARE = 4
"""The least number of steps in low precision for each step in high precision in gaps."""

Kind = Literal["spike", "weights", "precision", "uncalled", "frozen", "unwritten"]


@dataclass(frozen=True)
class Change:
    """A sudden change.

    Attributes:
        slots: the changed tensors or layers, in the order of execution of the step.
        since: the first step with the change.
        until: the last step with it; None if it goes on, or has not ended yet. Layers without a GEMM or gradient are
            reported when they are missed, and again when they are back; a spike when it begins, and again if it has
            stayed for :data:`STAYS` steps.
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
        if self.kind == "unwritten":
            experts = many(len(self.slots), "expert")
            return f"{experts} got no token, and the wgrad is not 0: its largest magnitude is {self.now:.3g}"
        further = len(self.slots) - 1
        earlier_steps = f"in the {LEAST_HISTORY} to {HISTORY} steps before"
        if first.tensor == UPDATE:
            more = f"; also {many(further, 'more weight')}" if further else ""
            usual = f"and by at most {self.before:.2%} in each of the {LEAST_HISTORY} updates before"
            return f"the weight has changed by {self.now:.0%} of its norm, in a sample, {usual}{more}"
        more = f"; {many(further, 'more tensor')} in the same step" if further else ""
        stays = "" if self.until is None else f", and has stayed so in the {STAYS} steps after it"
        return (
            f"the {first.magnitude} of the {first.tensor} is {self.now:.3g}, and was at most {self.before:.3g}"
            f" {earlier_steps}{stays}{more}"
        )


ABSENCES: Mapping[Kind, tuple[str, str]] = {
    "uncalled": ("{} had a GEMM in each step", "none"),
    "frozen": ("the weights of {} got a gradient in each step", "none or only 0"),
}
"""Kinds of changes that end when the layer is back: what it had before, and has no more."""

_ABSENCE_OF: Mapping[str, Kind] = {"activation": "uncalled", "wgrad": "frozen"}


def describe_absences(kind: Kind, spans: Collection[tuple[int, int | None]]) -> str:
    """Describe layers by the first and the last step of each one's absence; None if it goes on."""
    template, none = ABSENCES[kind]
    text = template.format(many(len(spans), "layer"))
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


@dataclass
class _LowPrecision:
    """A layer that runs in low precision.

    Attributes:
        since: the first step, as counted here.
        highs: its steps in high precision since then.
        gap: iteration and step of the first one in high precision, if the last step was in high precision.
    """

    since: int
    highs: int = 0
    gap: tuple[int, int] | None = None


@dataclass
class _Presence:
    """The steps of an activation or a wgrad.

    Attributes:
        since: the first one without an interruption, as counted here; None if it is not expected.
        missing: the first iteration without it, if the last step was without it.
        is_reported: whether it was reported as missing.
        longest: its longest absence that was reported, in iterations.
    """

    since: int | None = None
    missing: int | None = None
    is_reported: bool = False
    longest: int = 0


class _Spike(NamedTuple):
    """A spike that begins in the forward.

    Attributes:
        step: its first one, as counted here.
        number: of its first tensor.
        least: the logarithm of the least magnitude that belongs to it.
    """

    change: Change
    step: int
    number: int
    least: float


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
        # Of the magnitudes of the last steps, in any order; of updates, the last ones in the first rows, in order.
        self._bits = np.full((HISTORY, 0), np.nan, np.float32)
        self._limits = np.empty(0)
        # name of tensors -> whether a slot is one of them
        self._are: dict[str, Mask] = dict.fromkeys(("weight", "wgrad", UPDATE), np.empty(0, bool))
        self._last: tuple[Sequence[int], Set[str], Set[int]] = (), frozenset(), frozenset()
        self._spikes: list[_Spike] = []
        self._numbers: dict[TensorSlot, int] = {}
        self._unwritten: set[TensorSlot] = set()  # that were reported
        self._low: dict[str, _LowPrecision] = {}
        self._presence: dict[TensorSlot, _Presence] = defaultdict(_Presence)
        self._is_open = False  # whether a layer is in a gap, or a tensor missing

    def add(self, row: StepRow) -> Iterator[Change]:
        """Add the next step, and yield its changes."""
        if not row.order:
            return
        self._steps += 1
        yield from self._jumps(row)
        if 0 in row.tokens.values():
            yield from self._unwritten_wgrads(row)
        zeros = frozenset((self._are["wgrad"][: len(row.magnitudes)] & (row.magnitudes == 0)).nonzero()[0].tolist())
        if self._is_open or self._last != (row.order, row.high, zeros):
            self._last = row.order, row.high, zeros
            read = {self._slots[number]: number for number in row.order if number not in zeros}
            changed: _Changed = defaultdict(list)
            is_in_gap = self._compare_precision(row, read, changed)
            self._is_open = self._compare_calls(row, read, changed) or is_in_gap
            for (kind, since, until), slots in changed.items():
                yield Change(kind, tuple(slots), since, until)

    def _jumps(self, row: StepRow) -> Iterator[Change]:
        """Yield jumps of magnitudes, and weights that change far more than in each of the last steps."""
        count = len(row.magnitudes)
        if count > len(self._limits):
            self._grow(count)
        is_number = (row.magnitudes > 0) & (row.magnitudes < np.inf)
        magnitudes = np.full(self._bits.shape[1], np.nan, np.float32)
        np.log2(row.magnitudes, where=is_number, out=magnitudes[:count])
        are_weights = self._are["weight"]
        are_updates = self._are[UPDATE]
        largest = np.fmax.reduce(self._bits)
        smallest = np.fmin.reduce(self._bits)
        fallen = smallest - magnitudes >= self._limits
        fallen[:count] |= (row.magnitudes == 0) & np.isfinite(self._bits[(self._steps - 1) % HISTORY, :count])
        jumps = (magnitudes - largest >= self._limits) | (are_weights & fallen)
        jumps &= ~are_updates | (magnitudes >= math.log2(LEAST_UPDATE))
        if row.first is not None:
            jumps &= are_updates
        if jumps.any():
            jumps &= np.isfinite(self._bits).sum(0) >= LEAST_HISTORY
            are_steady = largest - smallest <= STEADY
            jumps[[number for number in np.flatnonzero(jumps & are_updates).tolist() if self._was_idle(number)]] = False
            groups: tuple[tuple[Kind, Mask], ...] = (
                ("weights", jumps & are_weights & are_steady),
                ("spike", jumps & ~are_weights & ~are_updates),
                ("weights", jumps & are_updates),
            )
            risen = (magnitudes - largest)[are_updates] >= 1  # twice as large, or more
            most_rise = bool(risen.sum() >= max(2.0, NEARLY_ALL * np.isfinite(magnitudes[are_updates]).sum()))
            for kind, group in groups:
                numbers = [number for number in dict.fromkeys(row.order) if group[number]]
                if numbers:
                    first = numbers[0]
                    slots = tuple(self._slots[number] for number in numbers)
                    former_magnitude = float(np.exp2(largest[first]))
                    is_of_all = most_rise and slots[0].tensor == UPDATE
                    change = Change(
                        kind, slots, row.iteration, None, former_magnitude, float(row.magnitudes[first]), is_of_all
                    )
                    yield change
                    if kind == "spike" and slots[0].tensor not in BACKWARD:
                        least = float(largest[first] + self._limits[first] / 2)
                        self._spikes.append(_Spike(change, self._steps, first, least))
        fresh = are_updates & np.isfinite(magnitudes)
        self._bits[: LEAST_HISTORY - 1, fresh] = self._bits[1:LEAST_HISTORY, fresh]
        self._bits[LEAST_HISTORY - 1, fresh] = magnitudes[fresh]
        self._bits[self._steps % HISTORY, ~are_updates] = magnitudes[~are_updates]
        if self._spikes and self._steps - self._spikes[0].step >= STAYS:
            spike = self._spikes.pop(0)
            steps = np.arange(spike.step, self._steps + 1) % HISTORY
            if np.fmin.reduce(self._bits[steps, spike.number]) >= spike.least:
                yield replace(spike.change, until=row.iteration)

    def _unwritten_wgrads(self, row: StepRow) -> Iterator[Change]:
        """Find wgrads of experts without tokens that are not 0, as of a buffer that no kernel has written."""
        found: dict[TensorSlot, float] = {}
        for number, count in row.tokens.items():
            wgrad = self._slots[number]._replace(tensor="wgrad")
            if count == 0 and wgrad in self._numbers and wgrad not in self._unwritten:
                magnitude = float(row.magnitudes[self._numbers[wgrad]])
                if 0 < magnitude < math.inf:
                    found[wgrad] = magnitude
        self._unwritten.update(found)
        if found:
            yield Change("unwritten", tuple(found), row.iteration, now=next(iter(found.values())))

    def _grow(self, count: int) -> None:
        more = np.full((HISTORY, count - self._bits.shape[1]), np.nan, np.float32)
        self._bits = np.concatenate([self._bits, more], axis=1)
        tensors = [slot.tensor for slot in self._slots[:count]]
        self._limits = np.array([SPIKE.get(tensor, SPIKE_OF_GRADIENT) for tensor in tensors])
        self._are = {name: np.array(tensors) == name for name in self._are}
        self._numbers = {slot: number for number, slot in enumerate(self._slots[:count])}

    def _was_idle(self, update: int) -> bool:
        """Return whether an expert had no tokens in one of the last steps: the update after them is far larger."""
        tokens = self._slots[update]._replace(tensor=TOKENS)
        steps = np.arange(self._steps - LEAST_HISTORY, self._steps) % HISTORY
        return tokens in self._numbers and bool(np.isnan(self._bits[steps, self._numbers[tokens]]).any())

    def _compare_precision(self, row: StepRow, read: Iterable[TensorSlot], changed: _Changed) -> bool:
        """Find the ends of gaps in low precision; return whether a layer is in one."""
        is_in_gap = False
        for layer in dict.fromkeys(slot.layer for slot in read if slot.tensor == "activation"):
            low = self._low.get(layer)
            if low is None:
                if layer not in row.high:
                    self._low[layer] = _LowPrecision(self._steps)
            elif layer in row.high:
                if low.gap is None:
                    low.gap = row.iteration, self._steps
                if self._steps - low.gap[1] >= GAP:  # for good
                    del self._low[layer]
                else:
                    is_in_gap = True
            elif low.gap is not None:
                since, step = low.gap
                low.gap = None
                if step - low.since - low.highs >= max(LEAST_HISTORY, SHARE * low.highs):
                    changed["precision", since, row.iteration - 1].append(TensorSlot(layer, "activation"))
                low.highs += self._steps - step
        return is_in_gap

    def _compare_calls(self, row: StepRow, read: Mapping[TensorSlot, int], changed: _Changed) -> bool:
        """Find layers without a GEMM any more, and layers that only have no wgrad; experts without tokens have one.
        Also find layers that are back; they are missed again after twice their longest absence. Return whether a layer
        may be missing.
        """
        may_be_missing = False
        for slot, presence in self._presence.items():
            if presence.since is None or slot in read:
                continue
            if presence.missing is None:
                if self._steps - presence.since < LEAST_PRESENT:
                    presence.since = None
                    continue
                presence.missing = row.iteration
            if row.iteration - presence.missing + 1 < max(LEAST_ABSENT, 2 * presence.longest):
                may_be_missing = True
                continue
            presence.since = None
            forward = read.get(TensorSlot(slot.layer, "activation"))
            if slot.tensor == "activation" or (forward is not None and row.magnitudes[forward] >= 0):
                presence.is_reported = True
                changed[_ABSENCE_OF[slot.tensor], presence.missing, None].append(slot)
        for slot in read:
            if slot.tensor not in _ABSENCE_OF:
                continue
            presence = self._presence[slot]
            if presence.since is None:
                presence.since = self._steps
            if presence.is_reported and presence.missing is not None:
                presence.longest = row.iteration - presence.missing
                changed[_ABSENCE_OF[slot.tensor], presence.missing, row.iteration - 1].append(slot)
            presence.missing = None
            presence.is_reported = False
        return may_be_missing
