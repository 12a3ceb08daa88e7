"""Slots for a step's statistics: ranges of two float64 vectors on each device.

Every watched tensor has segments, such as its moments, its exponents, and one per compared recipe. Each segment has
columns for sums and for maxima. Micro-batches merge in place.

Each GPU stream has its own vectors, which are created, filled and added to only on that stream, so streams never wait
for each other. Vectors that become too short keep their values; later additions go to longer vectors. Reading at the
end of the step waits for all streams and merges their vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from te_precision_callbacks.base.devices import current_stream, follow, raw_stream_of
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    LIMIT_SUMS,
    LOSS_MAXIMA,
    LOSS_SUMS,
    MAXIMA,
    MOMENT_SUMS,
    NOTHING,
    RANGE_MAXIMA,
    RANGE_SUMS,
    SCALE_MAXIMA,
    SCALE_SUMS,
)
from te_precision_callbacks.gemm_error import FORMAT_SUMS, KERNEL_MAXIMA, KERNEL_SUMS
from te_precision_callbacks.statistics.names import Request
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS, StatisticSource

_FIRST_CAPACITY = 1024

ColumnNames: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the summed columns, and of the maximum columns."""

COLUMNS: Mapping[StatisticSource, ColumnNames] = {
    StatisticSource.TENSOR: (MOMENT_SUMS, MAXIMA),
    StatisticSource.EXPONENTS: (EXPONENT_COLUMNS, ()),
    StatisticSource.BLOCKS: ((), ("block_range",)),
    StatisticSource.QUANTIZED: (COMPARISON_SUMS, ()),
    StatisticSource.SCALES: (SCALE_SUMS, SCALE_MAXIMA),
    StatisticSource.SCALE_LIMITS: (LIMIT_SUMS, ()),
    StatisticSource.LOSSES: (LOSS_SUMS, LOSS_MAXIMA),
    StatisticSource.RANGES: (RANGE_SUMS, RANGE_MAXIMA),
    StatisticSource.GEMM: (KERNEL_SUMS, KERNEL_MAXIMA),
    StatisticSource.GEMM_FORMAT: (FORMAT_SUMS, ()),
}


class SegmentKey(NamedTuple):
    """Name of a segment, equal on every rank.

    Attributes:
        kind: the source: ``TENSOR``, ``EXPONENTS``, ``QUANTIZED mxfp8 rowwise``, ...
        shard: index of the shard, for a replicated tensor (a weight); None if each rank has a different part.
    """

    layer: str
    tensor: str
    kind: str
    shard: int | None = None

    @property
    def columns(self) -> ColumnNames:
        return COLUMNS[StatisticSource[self.kind.partition(" ")[0]]]


@dataclass(eq=False)
class SlotRange:
    """A segment's range of the vectors.

    Attributes:
        sum_start, maximum_start: offsets in the vectors of ``device``.
        contributes: whether this rank's values count; False if another rank has the same part.
        outputs: labels of all statistics ever requested, in order.
    """

    key: SegmentKey
    device: torch.device
    sum_start: int
    maximum_start: int
    contributes: bool = True
    outputs: dict[str, None] = field(default_factory=dict)


Asked = Sequence[tuple[SlotRange, Set[str], bool]]
"""Segments, with the labels of the statistics requested of them, and whether values were merged."""


class _Vectors:
    """A vector of sums and one of maxima, on one device and one stream.

    Args:
        handle: of the current stream, which uses the vectors; 0 for a device without streams.
        lengths: of sums and maxima.
    """

    def __init__(self, device: torch.device, handle: int, lengths: tuple[int, int]) -> None:
        self.stream = current_stream(device)
        self.handle = handle
        self.lengths = lengths  # len() of a tensor calls a Python function
        self.sums = torch.full((lengths[0],), 0.0, dtype=torch.float64, device=device)
        self.maxima = torch.full((lengths[1],), NOTHING, dtype=torch.float64, device=device)

    def reset(self, used: tuple[int, int]) -> None:
        self.sums[: used[0]].fill_(0.0)
        self.maxima[: used[1]].fill_(NOTHING)


class DeviceSlots:
    """The vectors of a device, one pair for each stream; longer ones come first.

    Attributes:
        handle_now: returns the handle of the current stream; 0 for a device without streams.
        used: numbers of sums and of maxima that segments have.
        last: the vectors that :meth:`current` returned last; None once a segment was added.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle_now = raw_stream_of(device)
        self.used = (0, 0)
        self.last: _Vectors | None = None
        self._vectors: list[_Vectors] = []

    def current(self) -> _Vectors:
        """Return the vectors of the current stream, valid until a segment is added."""
        handle = self.handle_now()
        sums, maxima = self.used
        for vectors in self._vectors:
            if vectors.handle == handle and vectors.lengths[0] >= sums and vectors.lengths[1] >= maxima:
                self.last = vectors
                return vectors
        lengths = max(_FIRST_CAPACITY, 2 * sums), max(_FIRST_CAPACITY, 2 * maxima)
        self.last = _Vectors(self.device, handle, lengths)
        self._vectors.insert(0, self.last)  # longest first
        return self.last

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums and the maxima, merged over all streams, for use on the current stream."""
        if not self._vectors:
            self.current()
        for vectors in self._vectors:
            follow(vectors.stream, (vectors.sums, vectors.maxima))
        used_sums, used_maxima = self.used
        first, *shorter = self._vectors
        sums = first.sums[:used_sums]
        maxima = first.maxima[:used_maxima]
        if shorter:
            sums = sums.clone()
            maxima = maxima.clone()
        for other in shorter:  # shorter vectors are older than the last segments
            sums[: len(other.sums)].add_(other.sums[:used_sums])
            here = maxima[: len(other.maxima)]
            torch.maximum(here, other.maxima[:used_maxima], out=here)
        return sums, maxima

    def reset(self) -> None:
        """Reset to neutral values.

        The current stream keeps its longest vectors. Vectors of other streams are dropped, since only their own stream
        may reset them.
        """
        handle = self.handle_now()
        self.last = None
        self._vectors = [vectors for vectors in self._vectors if vectors.handle == handle][:1]
        for vectors in self._vectors:
            vectors.reset(self.used)


@dataclass
class Segments:
    """The segments of all tensors. They hold the values of the current step.

    Attributes:
        segments: in the order in which they were first measured.
        version: changes with the layout: a new segment, another contribution, or another requested statistic.
        generation: changes when contributions of segments may change.
        asked: requests since the last reset.
        devices: the vectors of each device.
    """

    segments: dict[SegmentKey, SlotRange] = field(default_factory=dict)
    version: int = 0
    generation: int = 0
    asked: list[Asked] = field(default_factory=list)
    devices: dict[torch.device, DeviceSlots] = field(default_factory=dict)

    def segment(self, key: SegmentKey, device: torch.device, *, contributes: bool) -> SlotRange:
        segment = self.segments.get(key)
        if segment is None:
            device_slots = self.devices.setdefault(device, DeviceSlots(device))
            sum_start, maximum_start = device_slots.used
            sums, maxima = key.columns
            device_slots.used = sum_start + len(sums), maximum_start + len(maxima)
            device_slots.last = None
            segment = SlotRange(key, device, sum_start, maximum_start, contributes)
            self.segments[key] = segment
            self.version += 1
        elif segment.contributes != contributes:
            segment.contributes = contributes
            self.version += 1
        return segment

    def labels(self, segment: SlotRange, requests: Sequence[Request]) -> Set[str]:
        labels = dict.fromkeys([request.label for request in requests])
        if not labels.keys() <= segment.outputs.keys():
            segment.outputs.update(labels)
            self.version += 1
        return labels.keys()

    def request(self, segment: SlotRange, requests: Sequence[Request], *, is_measured: bool = True) -> None:
        self.asked.append([(segment, self.labels(segment, requests), is_measured)])

    def merge(self, segment: SlotRange, sums: torch.Tensor | None, maxima: torch.Tensor | None) -> None:
        vectors = self.devices[segment.device].current()
        if sums is not None:
            vectors.sums.narrow(0, segment.sum_start, len(sums)).add_(sums)
        if maxima is not None:
            merged = vectors.maxima.narrow(0, segment.maximum_start, len(maxima))
            torch.maximum(merged, maxima, out=merged)

    def reset(self) -> None:
        self.asked.clear()
        for device_slots in self.devices.values():
            device_slots.reset()
