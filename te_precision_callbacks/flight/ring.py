"""The ring: the largest magnitude of each tensor in each step, on the device, read without waiting for it.

A device has rows for two batches of steps (:mod:`te_precision_callbacks.engine.kernels.largest`). While one batch is
filled, the other is copied to the host; a copy is read in a later step, when it has arrived. On a CPU, a batch is one
step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from te_precision_callbacks.base.devices import current_stream, follow, raw_stream_of
from te_precision_callbacks.engine.kernels import largest
from te_precision_callbacks.engine.kernels.columns import FIRST, MAGNITUDE, NEVER, LargestOf
from te_precision_callbacks.flight.rows import BACKWARD, TOKENS, StepRow, TensorSlot

_STEPS_PER_COPY = 8
_FIRST_SLOTS = 256


class Ring:
    """The rows of all devices.

    Attributes:
        slots: all tensors so far; their places are their slots.
        devices: the rows of each device.
        places: layer and tensor -> slot.
        order, high, unwatched, tokens, turns, updated_at: of the current step; see :class:`StepRow`.
        called: the micro-batch of the last call of the model; -1 if it is not known.
        turn: the micro-batch of the last turn.
        is_late: whether a call of the model began before the backward of the call before, as in a pipeline.
    """

    def __init__(self) -> None:
        self.slots: list[TensorSlot] = []
        self.places: dict[tuple[str, str], int] = {}
        self.devices: dict[torch.device, _OnDevice] = {}
        self._waiting: list[StepRow] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self.order: list[int] = []
        self.high: set[str] = set()
        self.unwatched: Counter[str] = Counter()
        self.tokens: Counter[int] = Counter()
        self.turns: list[tuple[int, int]] = []
        self.updated_at: int | None = None
        self.called = -1
        self.turn = -1
        self.is_late = False
        self._calls: Counter[int] = Counter()  # of each model of the session, by its id

    def slot(self, layer: str, tensor: str) -> int:
        slot_number = self.places.get((layer, tensor))
        if slot_number is None:
            slot_number = len(self.slots)
            self.places[layer, tensor] = slot_number
            self.slots.append(TensorSlot(layer, tensor))
        return slot_number

    def begin_call(self, model: int) -> None:
        """Note that a call of a model with gradients begins, given its id."""
        self.is_late |= bool(self.order) and self.slots[self.order[-1]].tensor not in BACKWARD
        self.called = self._calls[model]
        self._calls[model] += 1

    def forget_calls(self) -> None:
        """Forget the calls of the step, since further ones are not noted."""
        self._calls.clear()
        self.called = -1

    def turn_to(self, micro_batch: int) -> None:
        """Note the micro-batch of the next slots of :attr:`order`."""
        self.turn = micro_batch
        self.turns.append((len(self.order), micro_batch))

    def add(self, tensors: Sequence[LargestOf]) -> None:
        """Add tensors on one device. The caller has added their slots to :attr:`order`."""
        device = tensors[0][0].device
        if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
            self.unwatched["GEMMs in CUDA graphs"] += 1
            return
        if device not in self.devices:
            self.devices[device] = _OnDevice(device)
        largest.add(tensors, self.devices[device].row(len(self.slots)))

    def add_tokens(self, layer: str, count: int) -> None:
        """Add the number of tokens of an expert in a forward. The host knows it."""
        slot = self.slot(layer, TOKENS)
        if slot not in self.tokens:
            self.order.append(slot)
        self.tokens[slot] += count

    def put(self, slots: Sequence[int], slot_numbers: torch.Tensor, numbers: torch.Tensor) -> None:
        """Add a number to each of ``slots``, which are also on the device; numbers that are not finite are left out.

        Args:
            slot_numbers: int64, [slots].
            numbers: float32, [slots], at least 0.
        """
        device_ring = self.devices.get(numbers.device)
        if device_ring is not None:
            self.order += slots
            bits = numbers.nan_to_num(nan=-1.0, posinf=-1.0).view(torch.int32)
            device_ring.row(len(self.slots))[:, MAGNITUDE].scatter_reduce_(0, slot_numbers, bits, "amax")

    def is_broken(self) -> bool:
        """Return whether the step has inf or nan so far. Waits for the devices."""
        return any(device_ring.is_broken() for device_ring in self.devices.values())

    def end_step(self, iteration: int) -> list[StepRow]:
        """End a step; return the steps that the host has now, in order."""
        row = StepRow(
            iteration,
            self.order,
            self.high,
            self.unwatched,
            tokens=self.tokens,
            updated_at=self.updated_at,
            turns=self.turns,
            micro_batches=max(self._calls.values(), default=0),
        )
        self._waiting.append(row)
        self._begin_step()
        for device_ring in self.devices.values():
            device_ring.end_step(row)
        return self._take()

    def take(self) -> list[StepRow]:
        """Wait for the devices, and return all steps that :meth:`end_step` has not returned."""
        for device_ring in self.devices.values():
            device_ring.copy()
            device_ring.read()
        return self._take()

    def _take(self) -> list[StepRow]:
        missing = {id(step) for device_ring in self.devices.values() for step in device_ring.missing}
        read_steps = list(itertools.takewhile(lambda step: id(step) not in missing, self._waiting))
        del self._waiting[: len(read_steps)]
        for step in read_steps:
            step.magnitudes = step.magnitudes[: len(self.slots)]
            counted = [slot for slot in step.tokens if slot < len(step.magnitudes)]
            step.magnitudes[counted] = [step.tokens[slot] for slot in counted]
        return read_steps


class _OnDevice:
    """The rows of a device.

    Attributes:
        slots: length of a row.
        now: the row of the step, for operations on the streams of :attr:`streams`.
        handle_now: returns the handle of the current stream.
        captures: returns whether the current stream is captured in a CUDA graph.
        streams: handle of a stream -> the stream, if it has operations on the rows.
        missing: the steps that the host does not have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch = 1 if device.type == "cpu" else _STEPS_PER_COPY
        self.handle_now = raw_stream_of(device)
        self.captures: Callable[[], bool] = bool if device.type == "cpu" else torch._C._cuda_isCurrentStreamCapturing
        self.streams: dict[int, torch.cuda.Stream | None] = {}
        self._half = 0
        self._filled: list[StepRow] = []
        self._make(_FIRST_SLOTS)
        self._copied: tuple[list[StepRow], torch.Tensor, torch.cuda.Event | None] | None = None

    @property
    def missing(self) -> list[StepRow]:
        copied = self._copied[0] if self._copied is not None else []
        return copied + self._filled

    def _make(self, slots: int) -> None:
        self.slots = slots
        self._rows = largest.new_rows(2 * self._batch, slots, self._device)
        self._go_on()

    def _go_on(self) -> None:
        self.now = self._rows[self._half * self._batch + len(self._filled)]

    def row(self, slots: int) -> torch.Tensor:
        """Return the row of the step, for operations on the current stream."""
        handle = self.handle_now()
        if handle not in self.streams:
            self.streams[handle] = current_stream(self._device)
        if slots > self.slots:
            former_rows = self._rows
            self._make(2 * slots)
            self._rows[:, : former_rows.shape[1]] = former_rows
        return self.now

    def is_broken(self) -> bool:
        for stream in self.streams.values():
            follow(stream, (self._rows,))
        return int(self.now[:, FIRST].min()) != NEVER

    def end_step(self, step: StepRow) -> None:
        self._filled.append(step)
        if len(self._filled) == self._batch:
            self.copy()
        else:
            self._go_on()
        if self._copied is not None:
            arrived = self._copied[2]
            if arrived is None or arrived.query():  # type: ignore[no-untyped-call]
                self.read()

    def copy(self) -> None:
        """Copy the filled rows to the host, and go on with the other half."""
        if not self._filled:
            return
        if self._copied is not None:
            self.read()
        for stream in self.streams.values():
            follow(stream, (self._rows,))
        begin = self._half * self._batch
        rows = self._rows[begin : begin + len(self._filled)]
        arrived = None
        if self._device.type == "cuda":
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        else:
            host = rows.to("cpu", copy=True)
        largest.reset(rows)
        self._copied = self._filled, host, arrived
        self._filled = []
        self._half = 1 - self._half
        self._go_on()

    def read(self) -> None:
        """Give the copied rows to their steps, after waiting for the copy."""
        if self._copied is None:
            return
        steps, host, arrived = self._copied
        self._copied = None
        if arrived is not None:
            arrived.synchronize()
        for step, row in zip(steps, host.numpy(), strict=True):
            step.add(row)
