"""The events between two looks, with their slots."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from te_precision_callbacks.overflow.extreme_slots import Measured, Slots, Values
from te_precision_callbacks.overflow.hooks import WatchedModule


class Frame(NamedTuple):
    """A line of a report: ``>`` for an input of a module's forward or backward, ``<`` for an output, else ``=``."""

    sign: str
    place: WatchedModule | None
    role: str
    measured: Measured


@dataclass(slots=True, eq=False)
class TensorEvent:
    """The forward of a module, recorded when it ends; a gradient, with the modules that have its tensor as an input or
    output; or a tensor given to ``detect_overflow`` inside a forward.
    """

    kind: Literal["forward", "gradient", "label"]
    batch: int
    frames: Sequence[Frame]


@dataclass(slots=True, eq=False)
class Record:
    """A version of a tensor, by weak reference, with the modules that take or make it, in the order of the forward."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    measured: Measured | None = None
    batch: int | None = None
    takers: list[tuple[WatchedModule, str]] = field(default_factory=list)
    makers: list[tuple[WatchedModule, str]] = field(default_factory=list)

    def gradient_frames(self, measured: Measured) -> list[Frame]:
        """Return the frames of a gradient: inner modules end first, and begin last."""
        left = [Frame("<", place, f"grad_{role}", measured) for place, role in reversed(self.takers)]
        return left + [Frame(">", place, f"grad_{role}", measured) for place, role in reversed(self.makers)]


Arrived = Callable[[Record, torch.Tensor | None], None]
"""Called with a gradient; None if an autograd Function, such as DDP's for unused outputs, returns None."""


class Interval:
    """The events since the last look.

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
        except RuntimeError:  # made in inference mode, without a version counter
            return Record(weakref.ref(tensor), -1)
        key = id(tensor)
        known = self._records.get(key)
        if known is not None and known.version == version and known.tensor() is tensor:
            return known
        record = self._records[key] = Record(weakref.ref(tensor), version)
        return record

    def measure(self, tensor: torch.Tensor) -> Record:
        record = self.record(tensor)
        if record.measured is None:
            record.measured = self.slots.measure(tensor)
        return record

    def watch_gradient(self, tensor: torch.Tensor, record: Record, batch: int, arrived: Arrived) -> None:
        """Let ``arrived`` be called with a tensor's record and gradient, once."""
        if record.batch is not None:
            return
        record.batch = batch
        if tensor.dtype.is_floating_point:
            with contextlib.suppress(RuntimeError):  # such as under a transform of torch.func
                handle = tensor.register_hook(functools.partial(arrived, record))  # type: ignore[no-untyped-call]
                if tensor.is_leaf:  # a leaf outlives the graph
                    self._leaf_hooks.append(handle)

    def note_loss_scale(self, scale: torch.Tensor | None) -> None:
        """Note the scale of a loss, unknown if None, by a scaler that can skip the step. The largest scale counts."""
        # Copied, since the scaler changes the scale in place.
        now = torch.tensor(math.inf) if scale is None else scale.detach().clone()
        known = self._loss_scale
        self._loss_scale = now if known is None else torch.maximum(known.to(now.device), now)

    def loss_scale(self) -> float | None:
        """Return the largest scale of a loss, if one was scaled. The host waits for the device."""
        return None if self._loss_scale is None else self._loss_scale.item()

    def clear(self) -> None:
        self.events = []
        self._loss_scale = None
        self.excused.clear()
        self._records.clear()
        self.slots.reset()
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()


class Seen(NamedTuple):
    batch: int
    frame: Frame
    values: Values


def seen(events: Sequence[TensorEvent], values: Values) -> Iterator[Seen]:
    for event in events:
        for frame in event.frames:
            yield Seen(event.batch, frame, values)
