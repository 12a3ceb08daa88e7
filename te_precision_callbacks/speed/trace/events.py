"""The events of a trace, and what they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.kinds import NamedKernel

Pass = Literal["forward", "backward", "recompute", "optimizer", ""]
"""The part of a step: ``recompute`` is a forward that an activation checkpoint runs again in the backward; empty for
what is none of these, such as the loading of a batch."""

EventType = Literal["operator", "range", "call", "kernel"]


class Context(NamedTuple):
    """What an event belongs to.

    Attributes:
        layer, gemm: by the innermost range of a session; empty outside of them.
        of_pass: the pass.
        unit: the outermost operator of the pass: a call of a Function of autograd, or of an operator, or the backward
            of either.
        operator: the innermost operator.
    """

    layer: str = ""
    gemm: str = ""
    of_pass: Pass = ""
    unit: TraceEvent | None = None
    operator: TraceEvent | None = None


OUTSIDE = Context()
"""The context of an event outside of all ranges and operators."""


@dataclass(eq=False, slots=True)
class HostCall:
    """A GEMM, a convolution, or attention in one kernel, as the host called it.

    Attributes:
        events: its kernels.
        context: the context of the first one.
        sizes: the elements that each sum has, and the rows and columns of the result, by the operands of an operator of
            torch; None where they are unknown.
        layer, gemm: by its range, or by that of the forward of a backward; empty where neither is known.
        product: the product of the run.
    """

    events: list[TraceEvent]
    context: Context
    sizes: tuple[int, frozenset[int]] | None
    layer: str
    gemm: str
    product: Product | None = field(default=None)

    @property
    def is_attention(self) -> bool:
        """Whether it is attention in one kernel, which computes all products of it."""
        known = self.events[0].known
        return known is not None and known.kind == "attention"


@dataclass(slots=True, eq=False)
class TraceEvent:
    """An operator, a range or a call of the CUDA runtime on the host, or a kernel, copy or fill on the device.

    Attributes:
        name: its name.
        what: which of these it is.
        begin, end: in microseconds.
        lane: the number of its thread or stream.
        link: the correlation of a call and the kernels that it launches.
        has_node: whether it is an operator with a node in autograd.
        shapes: the sizes of an operator's operands; None in a trace without shapes.
        outer: the event of the host around it.
        context: the layer, the pass and the operator that it belongs to.
        us: the time that counts, in microseconds: of an operator without the operators inside.
        launch: the call of the host that launched it; an operator itself; None where the trace does not have it.
        known: its kind and format by its name; None if the name is unknown.
        call: the matrix product that it is a part of.
    """

    name: str
    what: EventType
    begin: float
    end: float
    lane: int
    link: int | None
    has_node: bool
    shapes: list[list[int]] | None
    outer: TraceEvent | None = None
    context: Context = OUTSIDE
    us: float = 0.0
    launch: TraceEvent | None = None
    known: NamedKernel | None = None
    call: HostCall | None = None

    @property
    def launched(self) -> float:
        """When the host launched it, in microseconds; when it began where that is unknown."""
        return self.begin if self.launch is None else self.launch.begin


@dataclass
class Trace:
    """A trace.

    Attributes:
        path: the file.
        device: the name of the GPU; empty if the trace does not have it.
        rank: the rank of the process; None if the trace does not have it.
        host: operators, ranges and calls.
        kernels: kernels, copies and fills; empty without a GPU, where operators take their place.
        arrows: (lane, begin) of an operator of a backward -> those of the forward that created its node.
    """

    path: Path
    device: str = ""
    rank: int | None = None
    host: list[TraceEvent] = field(default_factory=list)
    kernels: list[TraceEvent] = field(default_factory=list)
    arrows: dict[tuple[int, float], tuple[int, float]] = field(default_factory=dict)
