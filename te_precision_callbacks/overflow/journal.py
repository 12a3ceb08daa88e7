"""The options of a detector, and its state between hooks and checks: events, the current batch, and failures."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import pydantic
import torch
import torch.distributed

from te_precision_callbacks.base.devices import is_capturing, is_lost, lost_message
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.overflow.errors import OverflowOptionError
from te_precision_callbacks.overflow.extreme_slots import Measured, Slots, Values
from te_precision_callbacks.overflow.hooks import WatchedModule

logger = logging.getLogger(__name__)


_Number = Annotated[int, pydantic.Field(strict=True, ge=0)]


class DetectorOptions(pydantic.BaseModel):
    """The keywords of :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`."""

    model_config = pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=True)

    max_frames: Annotated[int, pydantic.Field(strict=True, ge=1)]
    parameters: bool
    abs_min: bool
    trace_batches: tuple[_Number, ...]
    abort_after_batch: _Number | None
    allow_neg_inf: tuple[str, ...]
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None

    @classmethod
    def from_keywords(cls, **keywords: object) -> DetectorOptions:
        try:
            return cls.model_validate(keywords)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            why = problem["msg"].replace("Input should", "It must").replace("valid tuple", "list")
            raise OverflowOptionError(f"{problem['loc'][0]}= has the value {problem['input']!r}. {why}.") from error


class Frame(NamedTuple):
    """A line of a report: ``>`` for an input of a module's forward or backward, ``<`` for an output, else ``=``."""

    sign: str
    place: WatchedModule | None
    role: str
    measured: Measured


@dataclass(slots=True, eq=False)
class TensorEvent:
    """The forward of a module, recorded at its end; a gradient, with the modules that have its tensor as input or
    output; or a tensor passed to ``detect_overflow``.
    """

    kind: Literal["forward", "gradient", "label"]
    batch: int
    frames: Sequence[Frame]


@dataclass(slots=True, eq=False)
class Record:
    """A version of a tensor, by weak reference, with the modules that read or return it, in forward order."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    measured: Measured | None = None
    batch: int | None = None
    readers: list[tuple[WatchedModule, str]] = field(default_factory=list)
    producers: list[tuple[WatchedModule, str]] = field(default_factory=list)

    def gradient_frames(self, measured: Measured) -> list[Frame]:
        """Return the frames of a gradient, in the order of the backward."""
        left = [Frame("<", place, f"grad_{role}", measured) for place, role in reversed(self.readers)]
        return left + [Frame(">", place, f"grad_{role}", measured) for place, role in reversed(self.producers)]


Arrived = Callable[[Record, torch.Tensor | None], None]
"""Called with a gradient; None if an autograd Function, such as DDP's for unused outputs, returns None."""


class Interval:
    """The events since the last check.

    Attributes:
        excused: the slots that may have -inf.
    """

    def __init__(self, *, abs_min: bool) -> None:
        self.slots = Slots(abs_min=abs_min)
        self.events: list[TensorEvent] = []
        self.excused: set[Measured] = set()
        self._loss_scale: torch.Tensor | None = None
        self._records: dict[int, Record] = {}
        self._leaf_hooks: list[torch.utils.hooks.RemovableHandle] = []

    def record(self, tensor: torch.Tensor) -> Record:
        """Return the record of a tensor, shared by all modules until the tensor is changed in place."""
        try:
            version = tensor._version
        except RuntimeError:  # created in inference mode, without a version counter
            return Record(weakref.ref(tensor), -1)
        key = id(tensor)
        known = self._records.get(key)
        if known is not None and known.version == version and known.tensor() is tensor:
            return known
        record = Record(weakref.ref(tensor), version)
        self._records[key] = record
        return record

    def measure(self, tensor: torch.Tensor) -> Record:
        record = self.record(tensor)
        if record.measured is None:
            record.measured = self.slots.measure(tensor)
        return record

    def watch_gradient(self, tensor: torch.Tensor, record: Record, batch: int, arrived: Arrived) -> None:
        """Register ``arrived`` to be called once, with the record and the gradient of a tensor."""
        if record.batch is not None:
            return
        record.batch = batch
        if tensor.dtype.is_floating_point:
            with contextlib.suppress(RuntimeError):  # for example under a transform of torch.func
                handle = tensor.register_hook(functools.partial(arrived, record))  # type: ignore[no-untyped-call]
                if tensor.is_leaf:  # a leaf outlives the graph
                    self._leaf_hooks.append(handle)

    def note_loss_scale(self, scale: torch.Tensor | None) -> None:
        """Note the scale of a loss by a GradScaler, None if unknown; the largest scale is kept."""
        # Copied, since the scaler changes the scale in place.
        now = torch.tensor(math.inf) if scale is None else scale.detach().clone()
        known = self._loss_scale
        self._loss_scale = now if known is None else torch.maximum(known.to(now.device), now)

    def loss_scale(self) -> float | None:
        """Return the largest scale of a loss; None if no loss was scaled. The host waits for the device."""
        if self._loss_scale is None:
            return None
        return self._loss_scale.item()

    def clear(self) -> None:
        self.events = []
        self._loss_scale = None
        self.excused.clear()
        self._records.clear()
        self.slots.reset()
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()


class FrameValues(NamedTuple):
    batch: int
    frame: Frame
    values: Values


def frames_with_values(events: Sequence[TensorEvent], values: Values) -> Iterator[FrameValues]:
    for event in events:
        for frame in event.frames:
            yield FrameValues(event.batch, frame, values)


@dataclass(slots=True, eq=False)
class Pass:
    """An outermost call of a watched module, with all nested calls.

    Attributes:
        frames: whether the call has frames, unlike a recomputed forward.
        gradients: whether its tensors' gradients are watched.
        evaluates: whether it is a forward without gradients, which is checked at its end.
        open: the calls that have not ended, each with its inputs.
    """

    interval: Interval | None
    frames: bool
    gradients: bool
    evaluates: bool
    batch: int = 0
    open: list[tuple[WatchedModule, list[Frame]]] = field(default_factory=list)

    def close(self, place: WatchedModule) -> list[Frame] | None:
        """End a module's call and return its inputs; None if no call of the module is open."""
        if all(opened is not place for opened, _ in reversed(self.open)):
            return None
        while True:  # drop nested calls that never ended
            opened, taken = self.open.pop()
            if opened is place:
                return taken


class Batches:
    """Counts training batches, and the evaluation batches between them, which are forwards without gradients. Before
    training, evaluation batches count as batches.

    Attributes:
        all_checked: whether all events were checked, so that the next forward of any module begins a batch.
    """

    def __init__(self, last: int | None) -> None:
        self.trains = False
        self.all_checked = True
        self._last = last
        self._number = self._evaluation = -1
        self._has_marks = False

    @property
    def number(self) -> int:
        return max(self._number, 0)

    @property
    def evaluation(self) -> int:
        if self.trains:
            return max(self._evaluation, 0)
        return self.number

    @property
    def is_over(self) -> bool:
        return self._last is not None and self._number >= self._last

    def mark_begin(self) -> None:
        self._has_marks = True
        self.train()

    def train(self) -> None:
        if not self.trains:
            self.trains = True
            self._number = -1

    def begins(self, *, is_root: bool, evaluation: bool) -> bool:
        """Return whether an outermost forward, of the model or of a submodule, begins the next batch."""
        if evaluation and self.trains:
            self._evaluation += is_root
            return False
        begins = is_root or self.all_checked
        self.all_checked = False
        return begins and not self._has_marks

    def next(self) -> None:
        self._number += 1
        self._evaluation = -1


class _Thread(threading.local):
    """The current call of each thread: on a GPU, a thread of autograd runs recomputed forwards and gradients."""

    current: Pass | None = None


class Journal:
    """The events between two checks.

    Attributes:
        evaluation: the events of the current forward without gradients.
        due: whether training has run since the last check.
        broken: whether recording is off: after a failure until the check that raises it; after losing the GPU, forever.
        failure: the failure that the next check raises.
    """

    def __init__(self, options: DetectorOptions) -> None:
        self.training = Interval(abs_min=options.abs_min)
        self.evaluation = Interval(abs_min=options.abs_min)
        self.batches = Batches(options.abort_after_batch)
        self.thread = _Thread()
        self.due = False
        self.closed = False
        self.broken = False
        self.failure: Exception | None = None
        self.notices = Notices()

    def label(self, tensor: torch.Tensor, label: str) -> None:
        current = self.thread.current
        if current is None or current.interval is None or not current.frames or self.broken or self.closed:
            return
        try:
            measured = current.interval.slots.measure(tensor)
            current.interval.events.append(TensorEvent("label", current.batch, [Frame("=", None, label, measured)]))
        except Exception as error:
            self.fail(error)

    def note_loss_scale(self, scale: torch.Tensor | None) -> None:
        if self.broken or self.closed or is_capturing():
            return
        try:
            self.training.note_loss_scale(scale)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Stop recording until the next check, which raises the failure.

        The loss of the GPU is not a failure of detection: the next operation of training raises it.
        """
        if self.broken:
            return
        self.broken = True
        if is_lost(error):
            logger.warning("%s", lost_message(error, "Activation overflow detection"))
        else:
            self.failure = error

    def clear(self) -> None:
        self.thread.current = None
        self.due = False
        if self.failure is not None:
            self.broken = False
            self.failure = None
        self.training.clear()
        self.evaluation.clear()
