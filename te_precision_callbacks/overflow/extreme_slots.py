"""Slots in device memory for the extremes of tensors; the host reads all slots at once.

A slot has the dtype of its tensor, so torch's ``aminmax`` reads the tensor and writes the slot in one call. It keeps
inf and nan: a nan makes both extremes nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from te_precision_callbacks.base.devices import current_stream, follow, is_capturing
from te_precision_callbacks.statistics.arrays import Floats
from te_precision_callbacks.te.tensors import has_scale

_FIRST_CHUNK = 256
_LARGEST_CHUNK = 8192


class Unmeasured(NamedTuple):
    """Placeholder for a tensor without extremes; ``why`` is one word for the report."""

    why: str


@dataclass(slots=True, eq=False)
class Slot:
    """The extremes of one tensor, in a row of a store. ``least`` is only written with ``abs_min``."""

    store: _Store
    index: int
    low: torch.Tensor
    high: torch.Tensor
    least: torch.Tensor


Measured = Slot | Unmeasured

_Place = tuple[torch.dtype, torch.device, torch.cuda.Stream | None]


class _Store:
    """The slots of one dtype on one device, in chunks that one stream allocates and writes."""

    def __init__(self, dtype: torch.dtype, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.dtype = dtype
        self.device = device
        self._stream = stream
        self._chunks: list[torch.Tensor] = []
        self.slots: list[Slot] = []
        self.free: list[Slot] = []

    def allocate(self) -> Slot:
        if not self.free:
            self._grow()
        return self.free.pop()

    @property
    def used(self) -> int:
        return len(self.slots) - len(self.free)

    def content(self) -> torch.Tensor:
        """Return the used rows as float64, for the current stream; float32 if the device has no float64."""
        follow(self._stream, self._chunks)
        rows = torch.cat(self._chunks)[: self.used] if len(self._chunks) > 1 else self._chunks[0][: self.used]
        return rows.to(torch.float32 if self.device.type == "mps" else torch.float64)

    def _grow(self) -> None:
        size = min(_LARGEST_CHUNK, max(_FIRST_CHUNK, len(self.slots)))
        # Tensors allocated in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            chunk = torch.empty((size, 3), dtype=self.dtype, device=self.device)
            cells = iter(chunk.view(-1).unbind())
        self._chunks.append(chunk)
        first = len(self.slots)
        new = [Slot(self, first + i, next(cells), next(cells), next(cells)) for i in range(size)]
        self.slots += new
        self.free = new[::-1] + self.free


class Values:
    """The values that :meth:`Slots.read` copied to the host; they stay valid when the slots are reused."""

    def __init__(self, rows: Mapping[_Store, Floats]) -> None:
        self._rows = rows

    def not_finite(self) -> set[Measured]:
        bad: set[Measured] = set()
        for store, rows in self._rows.items():
            is_finite = np.isfinite(rows[:, :2]).all(1)
            bad.update(store.slots[index] for index in np.flatnonzero(~is_finite))
        return bad

    def extremes(self, slot: Slot) -> tuple[float, float]:
        """Return the smallest and the largest element; both nan if there is a nan."""
        row = self._rows[slot.store][slot.index]
        return float(row[0]), float(row[1])

    def least(self, slot: Slot) -> float:
        return float(self._rows[slot.store][slot.index][2])


class Slots:
    """Largest and smallest magnitudes of tensors, measured into slots on their device and read together."""

    def __init__(self, *, abs_min: bool) -> None:
        self._abs_min = abs_min
        self._stores: dict[_Place, _Store] = {}

    @property
    def used(self) -> int:
        return sum(store.used for store in self._stores.values())

    def measure(self, tensor: torch.Tensor) -> Measured:
        """Write the extremes of a tensor to a slot; accepts any tensor, and never raises."""
        try:
            values = _plain_values(tensor)
            if isinstance(values, Unmeasured):
                return values
            if values.is_meta:
                return Unmeasured("meta")
            if values.is_cuda and is_capturing():
                return Unmeasured("captured")
            stream = current_stream(values.device)
            place = values.dtype, values.device, stream
            store = self._stores.get(place)
            if store is None:
                store = _Store(values.dtype, values.device, stream)
                self._stores[place] = store
            slot = store.allocate()
            torch.aminmax(values, out=(slot.low, slot.high))
            if self._abs_min:
                slot.least.copy_((values if values.dtype is torch.bool else values.abs()).amin())
        except (RuntimeError, NotImplementedError, TypeError):
            # A tensor class or a transform (vmap) without this operation. The slot stays unused.
            return Unmeasured("unknown")
        return slot

    def read(self) -> Values:
        by_device: dict[torch.device, list[_Store]] = {}
        for store in self._stores.values():
            if store.used:
                by_device.setdefault(store.device, []).append(store)
        rows: dict[_Store, Floats] = {}
        for stores in by_device.values():
            with torch.no_grad():
                contents = [store.content() for store in stores]
                # Only here does the host wait for the device.
                host = to_host(contents[0] if len(contents) == 1 else torch.cat(contents))
            start = 0
            for store, content in zip(stores, contents, strict=True):
                rows[store] = host[start : start + len(content)]
                start += len(content)
        return Values(rows)

    def reset(self) -> None:
        for store in self._stores.values():
            store.free = store.slots[::-1]


def to_host(rows: torch.Tensor) -> Floats:
    # Copied even on the CPU, where numpy would otherwise share the memory.
    copied = torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
    return copied.numpy().astype(np.float64, copy=False)


_DIRECT = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


def _plain_values(tensor: torch.Tensor) -> torch.Tensor | Unmeasured:
    tensor = tensor.detach()
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if plain and tensor.dtype in _DIRECT and tensor.is_contiguous() and tensor.numel():
        return tensor
    if hasattr(tensor, "to_local"):  # DTensor: this rank's part
        return _plain_values(tensor.to_local())
    if tensor.layout is not torch.strided:
        return _plain_values(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
    if tensor.is_quantized or (not plain and has_scale(tensor)):  # torch's, or Transformer Engine's
        tensor = tensor.dequantize()
    if tensor.numel() == 0:
        return Unmeasured("empty")
    if tensor.dtype.is_complex:
        return tensor.abs()
    if tensor.dtype in _DIRECT:
        return tensor
    return tensor.to(torch.float32)
