"""Slots that gather a step's statistics: ranges of two float64 vectors on each device.

Every watched tensor has segments: its moments, its exponents, one for each recipe that the tensor is compared with, and
so on. A segment has columns that are added, and columns of which the maximum is kept; micro-batches merge in place, and
nothing is copied to the host before the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.statistics.names import Request

_FIRST_CAPACITY = 1024


class SegmentKey(NamedTuple):
    """Names a segment, alike on every rank.

    Attributes:
        layer, tensor: what is watched.
        kind: what is measured: ``TENSOR``, ``EXPONENTS``, ``QUANTIZED mxfp8 rowwise``, ...
        shard: which shard, for a tensor that replicas hold alike (a weight); None if every rank's part differs.
    """

    layer: str
    tensor: str
    kind: str
    shard: int | None = None


Parts = tuple[int, torch.Tensor, torch.Tensor]
"""A version, sums and maxima."""


@dataclass
class Segment:
    """A range of the vectors.

    Attributes:
        key: its name.
        sums, maxima: names of the columns that are added, and of those of which the maximum is kept.
        sum_start, maximum_start: where they begin in the vectors of ``device``.
        contributes: whether this rank's part counts; False if another rank has the same.
        outputs: the labels of all statistics that were ever asked for, in the order of asking.
        due: the labels that were asked for since the last flush.
        measured: whether anything was merged into the segment since the last flush.
        asked: what was asked for last since the last flush; None: nothing.
        parts: the range of each vector, and the version of the vectors in which it is that.
    """

    key: SegmentKey
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    device: torch.device
    sum_start: int
    maximum_start: int
    contributes: bool = True
    outputs: dict[str, None] = field(default_factory=dict)
    due: set[str] = field(default_factory=set)
    measured: bool = False
    asked: Sequence[Request] | None = None
    parts: Parts | None = None


class _Vector:
    """A growing float64 vector with a neutral value."""

    def __init__(self, device: torch.device, neutral: float) -> None:
        self._neutral = neutral
        self.storage = torch.full((_FIRST_CAPACITY,), neutral, dtype=torch.float64, device=device)
        self.used = 0

    def reserve(self, width: int) -> int:
        start, self.used = self.used, self.used + width
        if self.used > len(self.storage):
            larger = self.storage.new_full((2 * self.used,), self._neutral)
            larger[:start] = self.storage[:start]
            self.storage = larger
        return start

    @property
    def content(self) -> torch.Tensor:
        return self.storage[: self.used]

    def part(self, start: int, width: int) -> torch.Tensor:
        return self.storage.narrow(0, start, width)

    def reset(self) -> None:
        self.content.fill_(self._neutral)


@dataclass
class _Device:
    sums: _Vector
    maxima: _Vector


@dataclass
class Segments:
    """All segments of this rank.

    Attributes:
        segments: by name, in the order of their first use.
        version: grows with each new segment, each new output of a segment, and each change of who contributes.
        moves: how often a segment was moved to another device; in between each stays where it is in the vectors.
    """

    segments: dict[SegmentKey, Segment] = field(default_factory=dict)
    version: int = 0
    moves: int = 0
    _devices: dict[torch.device, _Device] = field(default_factory=dict)

    def segment(
        self,
        key: SegmentKey,
        sums: tuple[str, ...],
        maxima: tuple[str, ...],
        device: torch.device,
        *,
        contributes: bool,
    ) -> Segment:
        """The segment of a name, made at its first use."""
        found = self.segments.get(key)
        if found is None or (found.device != device and not found.measured):
            on = self._devices.get(device)
            if on is None:
                on = self._devices[device] = _Device(_Vector(device, 0.0), _Vector(device, NOTHING))
            sum_start, maximum_start = on.sums.reserve(len(sums)), on.maxima.reserve(len(maxima))
            if found is None:
                found = Segment(key, sums, maxima, device, sum_start, maximum_start, contributes)
                self.segments[key] = found
            else:  # the layer was moved to another device: what was asked for stays
                found.device, found.sum_start, found.maximum_start = device, sum_start, maximum_start
                found.contributes = contributes
                self.moves += 1
            self.version += 1
        elif found.contributes != contributes:
            found.contributes = contributes
            self.version += 1
        return found

    def ask(self, segment: Segment, requests: Sequence[Request]) -> None:
        """Note that statistics of a segment are wanted at the next flush."""
        if segment.asked is requests:
            return
        segment.asked = requests
        for request in requests:
            if request.label not in segment.outputs:
                segment.outputs[request.label] = None
                self.version += 1
            segment.due.add(request.label)

    def merge(self, segment: Segment, sums: torch.Tensor | None, maxima: torch.Tensor | None) -> None:
        """Add a measurement to a segment. Tensors on another device are moved to the segment's."""
        segment.measured = True
        _, kept_sums, kept_maxima = self._parts(segment)
        # Asking where a tensor is costs less than a call of torch that has nothing to do.
        if sums is not None:
            kept_sums.add_(sums if sums.device == segment.device else sums.to(segment.device))
        if maxima is not None:
            maxima = maxima if maxima.device == segment.device else maxima.to(segment.device)
            torch.maximum(kept_maxima, maxima, out=kept_maxima)

    def _parts(self, segment: Segment) -> Parts:
        parts = segment.parts
        if parts is None or parts[0] != self.version:
            on = self._devices[segment.device]
            sums = on.sums.part(segment.sum_start, len(segment.sums))
            maxima = on.maxima.part(segment.maximum_start, len(segment.maxima))
            parts = segment.parts = (self.version, sums, maxima)
        return parts

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums and the maxima on a device that has segments, and room for more; until there is another segment."""
        found = self._devices[device]
        return found.sums.storage, found.maxima.storage

    def vectors(self) -> Iterator[tuple[torch.device, torch.Tensor, torch.Tensor]]:
        """Device, sums and maxima of each device."""
        for device, on in self._devices.items():
            yield device, on.sums.content, on.maxima.content

    def reset(self) -> None:
        """Make everything neutral again, for the next step."""
        for on in self._devices.values():
            on.sums.reset()
            on.maxima.reset()
        for segment in self.segments.values():
            segment.due.clear()
            segment.asked = None
            segment.measured = False
