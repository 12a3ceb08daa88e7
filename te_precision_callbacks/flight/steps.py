"""The last steps on the host, and the origin of inf and nan in them."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from te_precision_callbacks.base.counts import many, some_of
from te_precision_callbacks.base.ranks import world_size
from te_precision_callbacks.flight.rows import BACKWARD, FINITE_AGAIN, TOKENS, StepRow, TensorSlot

KEPT_STEPS = 64

_EXPERT = re.compile(r"\.gemm_\d+$")


@dataclass(frozen=True)
class Origin:
    """The first tensor with inf or nan, in the order of execution.

    Attributes:
        layer, tensor: the tensor.
        micro_batch: the tensor's micro-batch, from 0; -1 if it is not known, or for a weight.
        micro_batches: how many micro-batches the step had.
        magnitude: its largest magnitude in the last step before; None without one.
        before: layer and tensor of the last one before it in the micro-batch, which was finite, without weights; empty
            if it was the first.
        before_magnitude: the largest magnitude of that tensor.
        tensors: the number of tensors with inf or nan in the step.
        weights: the number of weights among them.
        in_backward: whether all of them are tensors of the backward.
        since: the first step that was watched.
        ranks: the number of ranks.
        unwatched: what the step has that was not watched, where they may have begun.
        place: its place in the order of the step.
        after_update: whether an optimizer had stepped parameters of the model in the step before it was read.
        stepped: True if an optimizer stepped them in the step, and it had no other micro-batch.
    """

    iteration: int
    layer: str
    tensor: str
    micro_batch: int
    micro_batches: int
    magnitude: float | None
    before: tuple[str, str] | tuple[()]
    before_magnitude: float | None
    tensors: int
    weights: int
    in_backward: bool
    since: int
    ranks: int
    unwatched: tuple[str, ...] = ()
    place: int = 0
    after_update: bool = False
    stepped: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        step = f"step {self.iteration}"
        if self.tensor == "weight" and self.weights > 1:
            when = f"after a step of an optimizer in {step}" if self.after_update else f"as {step} begins"
            text = f"the weights of {self.weights} layers have inf or nan {when}"
            if self.iteration > self.since and not self.after_update:
                text += f": the optimizer wrote them in step {self.iteration - 1}, whose GEMMs read finite numbers"
                if self.ranks > 1:
                    text += " on this rank: the gradients of another rank may have brought them"
            return text + self._limits
        batch_text = f"micro-batch {self.micro_batch} of " if self.micro_batch >= 0 and self.micro_batches > 1 else ""
        text = f"inf or nan appear in {batch_text}{step}"
        if self.magnitude is not None:
            text += f", after at most {self.magnitude:.3g} in the step before"
        if self.before:
            layer, tensor = self.before
            which = "the watched" if self.unwatched else "the"
            size = "" if self.before_magnitude is None else f" (at most {self.before_magnitude:.3g})"
            text += f"; all that {which} GEMMs before it read is finite, last the {tensor} of {layer}{size}"
        further = self.tensors - 1
        if further:
            text += f"; {many(further, 'more tensor')} in this step"
        return text + self._limits

    @property
    def _limits(self) -> str:
        if not self.unwatched:
            return ""
        return f"; they may have begun earlier, in what is not watched: {some_of(self.unwatched)}"


class LastSteps:
    """The last steps of a run.

    Attributes:
        slots: the tensors, by slot.
        rows: the last :data:`KEPT_STEPS` steps.
        last: inf and nan in the last step that had any; None without one.
    """

    def __init__(self, slots: Sequence[TensorSlot]) -> None:
        self.slots = slots
        self.rows: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self._since: int | None = None
        self._told: set[bool] = set()
        self._open: Origin | None = None
        self._finite = 0  # steps of optimizers since the last inf or nan
        self.last: Origin | None = None

    def add(self, row: StepRow) -> Origin | None:
        """Add a step; return where inf and nan began, once for the run and once for steps with it in backwards only."""
        if not row.order:
            return None
        if self._since is None:
            self._since = row.iteration
        former_row = self.rows[-1] if self.rows else None
        self.rows.append(row)
        if row.first is None:
            self._finite += row.updated_at is not None
            return None
        self._finite = 0
        origin = self._origin(row, row.first, former_row, self._since)
        if origin.weights:
            self._open = None
        self.last = origin
        if origin.in_backward in self._told:
            return None
        self._told.add(origin.in_backward)
        if origin.ranks == 1 and not origin.weights:
            self._open = origin
        return origin

    def take_ended(self) -> Origin | None:
        """Return the last origin once, if the steps of optimizers after it had only finite tensors. The next inf or nan
        then has an origin again.
        """
        ended = self._open
        if ended is None or self._finite < FINITE_AGAIN:
            return None
        self._open = None
        self._told.clear()
        return ended

    def as_json(self) -> dict[str, Any]:
        """The steps as JSON values.

        ``tensors``: layer and tensor, in the order of execution; ``iterations``; ``magnitudes``: for each tensor and
        iteration the largest magnitude, rounded to three digits, ``"inf"`` or ``"nan"``, or None if it was not read;
        ``first``: the place of the first tensor with inf or nan, and its iteration, or None.
        """
        order = dict.fromkeys(itertools.chain.from_iterable(row.order for row in reversed(self.rows)))
        broken = next((row for row in self.rows if row.first is not None), None)
        first = None
        if broken is not None and broken.first is not None:
            first = [list(order).index(broken.order[broken.first]), broken.iteration]
        return {
            "tensors": [list(self.slots[slot]) for slot in order],
            "iterations": [row.iteration for row in self.rows],
            "magnitudes": [[_shown(row, slot) for row in self.rows] for slot in order],
            "first": first,
        }

    def _origin(self, row: StepRow, first: int, former_row: StepRow | None, since: int) -> Origin:
        slot = row.order[first]
        is_backward = self.slots[slot].tensor in BACKWARD
        last = None
        for other in reversed(row.order[:first]):
            slot_before = self.slots[other]
            if not is_backward and slot_before.tensor in BACKWARD:
                break  # of the micro-batch before
            if slot_before.tensor not in ("weight", TOKENS) and _side_by_side(slot_before) != _side_by_side(
                self.slots[slot]
            ):
                last = other
                break
        broken = [self.slots[slot_number] for slot_number in (~(row.magnitudes < float("inf"))).nonzero()[0].tolist()]
        broken_weights = sum(other.tensor == "weight" for other in broken)
        return Origin(
            row.iteration,
            *self.slots[slot],
            micro_batch=-1 if self.slots[slot].tensor == "weight" else row.micro_batch_of(first),
            micro_batches=row.micro_batches,
            magnitude=None if former_row is None else _magnitude(former_row, slot),
            before=() if last is None else (self.slots[last].layer, self.slots[last].tensor),
            before_magnitude=None if last is None else _magnitude(row, last),
            tensors=len(broken),
            weights=broken_weights,
            in_backward=all(other.tensor in BACKWARD for other in broken),
            since=since,
            ranks=world_size(),
            unwatched=tuple(row.unwatched),
            place=first,
            after_update=row.updated_at is not None and first >= row.updated_at,
            stepped=row.updated_at is not None and row.micro_batches <= 1,
        )


def _side_by_side(slot: TensorSlot) -> tuple[str, str]:
    """Return a name that a tensor shares with the same tensors of a module's other experts."""
    return _EXPERT.sub("", slot.layer), slot.tensor


def _shown(row: StepRow, slot: int) -> float | str | None:
    value = float(row.magnitudes[slot]) if slot < len(row.magnitudes) else -1.0
    if value < 0:
        return None
    if value < float("inf"):
        return float(f"{value:.3g}")
    return str(value)


def _magnitude(row: StepRow, slot: int) -> float | None:
    """The largest magnitude of a slot; None where it was not read, or has inf or nan."""
    value = float(row.magnitudes[slot]) if slot < len(row.magnitudes) else -1.0
    if 0 <= value < float("inf"):
        return value
    return None
