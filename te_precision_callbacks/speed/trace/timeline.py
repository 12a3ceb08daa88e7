"""What a trace holds, in columns: what the host did, what the device did, and what links the two."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NOTHING = -1
"""A number that an event does not have."""

Shapes = tuple[tuple[int, ...], ...]


class HostKind(enum.IntEnum):
    """What an event of the host is."""

    OPERATOR = 0
    RANGE = 1
    CALL = 2
    """A call of the CUDA or HIP runtime or driver."""


@dataclass(frozen=True)
class Operands:
    """The operands that an operator was given.

    Attributes:
        shapes: the sizes of each; empty for what is no tensor.
        types: the type of each, as torch's profiler names it: ``c10::BFloat16``.
    """

    shapes: Shapes
    types: tuple[str, ...]


@dataclass
class Events:
    """Events in columns, in the order of the file until :meth:`Trace.close`. Times in microseconds.

    Attributes:
        begin, end: when.
        name: the number of the name.
        lane: the number of the thread, or of the stream.
        link: the correlation of calls and kernels; NOTHING without one.
    """

    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("i"))
    lane: array[int] = field(default_factory=lambda: array("i"))
    link: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.begin)


@dataclass
class HostEvents(Events):
    """Operators, ranges and calls of the runtime.

    Attributes:
        kind: a :class:`HostKind`.
        sequence: the number of an operator's node in autograd; NOTHING without one.
        operands: the number of its operands; NOTHING without shapes.
    """

    kind: array[int] = field(default_factory=lambda: array("b"))
    sequence: array[int] = field(default_factory=lambda: array("q"))
    operands: array[int] = field(default_factory=lambda: array("i"))


@dataclass
class DeviceEvents(Events):
    """Kernels, copies and fills of a device.

    Attributes:
        external: the number of the operator that launched it, where the trace says so; NOTHING without one.
        captured: the number of its node in a CUDA graph; 0 outside of graphs.
    """

    external: array[int] = field(default_factory=lambda: array("q"))
    captured: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class Trace:
    """A trace.

    Attributes:
        path: the file.
        device: the name of the device; empty if the trace does not say it.
        rank: the rank of the process; None if the trace does not say it.
        names: the names of events, by number.
        operands: the operands of operators, by number.
        host: what the host did.
        on_device: what the device did.
        forward_of: (lane, begin) of an operator of a backward -> that of the forward whose node it is.
        externals: the number of an operator in the trace -> its place in ``host``.
        has_shapes: whether any operator tells its shapes.
    """

    path: Path
    device: str = ""
    rank: int | None = None
    names: list[str] = field(default_factory=list)
    operands: list[Operands] = field(default_factory=list)
    host: HostEvents = field(default_factory=HostEvents)
    on_device: DeviceEvents = field(default_factory=DeviceEvents)
    forward_of: dict[tuple[int, float], tuple[int, float]] = field(default_factory=dict)
    externals: dict[int, int] = field(default_factory=dict)

    @property
    def has_shapes(self) -> bool:
        return bool(self.operands)

    @property
    def has_device(self) -> bool:
        """Whether a device did anything; else operators of the host take the place of kernels."""
        return len(self.on_device) > 0


def column(values: Sequence[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """A column as an array."""
    return np.frombuffer(values, dtype=kind) if len(values) else np.empty(0, dtype=kind)  # type: ignore[call-overload]


def nested(events: HostEvents) -> tuple[list[int], list[int]]:
    """Which event of the host runs inside of which.

    Returns:
        The places of the events in the order of their threads and begins, an outer one first; and of each place that of
        the event around it, NOTHING without one.
    """
    begin, end, lane = column(events.begin, np.float64), column(events.end, np.float64), column(events.lane, np.int32)
    order = np.lexsort((-end, begin, lane)).tolist()
    outer = [NOTHING] * len(order)
    begins, ends, lanes = begin.tolist(), end.tolist(), lane.tolist()
    stack: list[int] = []
    now = NOTHING
    for place in order:
        if lanes[place] != now:
            now, stack = lanes[place], []
        while stack and ends[stack[-1]] <= begins[place]:
            stack.pop()
        if stack:
            outer[place] = stack[-1]
        stack.append(place)
    return order, outer
