"""Read a trace of torch.profiler: Kineto's JSON in the Chrome trace event format, plain or compressed with gzip.

Ranges that ``profile=`` puts around layers name the layer of each forward, and the GEMM in both passes of Transformer
Engine's layers. A backward node without a range belongs to the layer of the linked forward.

Categories and arguments come from Kineto's ``output_json.cpp`` and torch's ``profiler_kineto.cpp``. Events become
:class:`TraceEvent` objects during parsing, so that unused arguments take no memory.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.speed.trace.range_names import parse_range

Pass = Literal["forward", "backward", "recompute", "optimizer", ""]
"""Part of a step. ``recompute`` is a forward that an activation checkpoint repeats in the backward; empty for anything
else, such as loading a batch.
"""

EventType = Literal["operator", "range", "call", "kernel"]

_CATEGORIES: Mapping[str, EventType] = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
}


_NODE = "autograd::engine::evaluate_function: "
_OF_BACKWARD = re.compile(r"Backward\d*$|^torch::autograd::")
_OF_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)")


class TraceError(PrecisionDebugError, ValueError):
    """A file is not a trace of torch.profiler, is truncated, or has no layer ranges."""


class Context(NamedTuple):
    """Position of an event in the training step.

    Attributes:
        layer, gemm: from the innermost range; empty outside of ranges.
        of_pass: the pass.
        unit: the outermost operator of the pass: a call of an autograd Function or operator, or its backward node.
        operator: the innermost operator.
    """

    layer: str = ""
    gemm: str = ""
    of_pass: Pass = ""
    unit: TraceEvent | None = None
    operator: TraceEvent | None = None


OUTSIDE = Context()


@dataclass(slots=True, eq=False)
class TraceEvent:
    """An operator, range or CUDA runtime call on the host, or a kernel, copy or fill on the device.

    Attributes:
        begin, end: in microseconds.
        lane: the index of its thread or stream.
        link: the correlation ID shared by a call and the kernels it launches.
        has_node: whether the operator has an autograd node.
        us: microseconds, for an operator without nested operators.
        launched: when the host launched it; None if the launch is not in the trace.
    """

    name: str
    what: EventType
    begin: float
    end: float
    lane: int
    link: int | None
    has_node: bool
    context: Context = OUTSIDE
    us: float = 0.0
    launched: float | None = None


@dataclass
class Trace:
    """A trace.

    Attributes:
        device: empty if unknown.
        rank: None if unknown.
        kernels: kernels, copies and fills; empty without a GPU.
        arrows: (lane, begin) of a backward operator -> (lane, begin) of the forward that created its node.
    """

    path: Path
    device: str = ""
    rank: int | None = None
    host: list[TraceEvent] = field(default_factory=list)
    kernels: list[TraceEvent] = field(default_factory=list)
    arrows: dict[tuple[int, float], tuple[int, float]] = field(default_factory=dict)


_TOO_LARGE = (MemoryError, OverflowError, RecursionError)


def read_trace(path: str | Path) -> Trace:
    """Read a ``.json`` or ``.json.gz`` file of torch.profiler; raises TraceError for another or a truncated file."""
    path = Path(path)
    trace = Trace(path)
    reader = _TraceReader(trace)
    try:
        data = regular_file(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        facts = json.loads(data, object_hook=reader.read)
        if isinstance(facts, Mapping):
            trace.device = str((facts.get("deviceProperties") or [{}])[0].get("name", ""))
            trace.rank = (facts.get("distributedInfo") or {}).get("rank")
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError, *_TOO_LARGE) as error:
        raise TraceError(
            f"{path} cannot be read: {error!r}. Give a file that torch.profiler has written to its end."
        ) from error
    if not trace.host and not trace.kernels:
        raise TraceError(
            f"{path} is not a trace of torch.profiler: it has no operator, kernel or range. Give a file written by"
            " torch.profiler's export_chrome_trace() or tensorboard_trace_handler()."
        )
    trace.arrows = {at: reader.forwards[key] for key, at in reader.backwards if key in reader.forwards}
    return trace


class _TraceReader:
    """Collects the events that the analysis needs from a profiler trace, object by object.

    Attributes:
        forwards: number that links a forward and its backward -> lane and time of the forward.
        backwards: such numbers, with lane and time of the backward.
    """

    def __init__(self, trace: Trace) -> None:
        self.forwards: dict[Any, tuple[int, float]] = {}
        self.backwards: list[tuple[Any, tuple[int, float]]] = []
        self._trace = trace
        self._lanes: dict[tuple[Any, Any], int] = {}

    def read(self, event: dict[str, Any]) -> object:
        """Receive a parsed JSON object: an event is added to the trace if needed, and dropped from the JSON."""
        phase = event.get("ph")
        if phase is None:
            return event
        what = _CATEGORIES.get(event.get("cat", ""))
        lane = self._lanes.setdefault((event.get("pid"), event.get("tid")), len(self._lanes))
        if phase == "X" and what is not None:
            arguments = event.get("args") or {}
            begin = float(event["ts"])
            us = float(event.get("dur", 0))
            link = None
            if what in ("call", "kernel"):
                link = arguments.get("correlation")
            has_node = "Sequence number" in arguments
            events = self._trace.host
            if what == "kernel":
                events = self._trace.kernels
            events.append(TraceEvent(sys.intern(event["name"]), what, begin, begin + us, lane, link, has_node, us=us))
        elif phase == "s" and event.get("cat") == "fwdbwd":
            self.forwards[event["id"]] = lane, float(event["ts"])
        elif phase == "f" and event.get("cat") == "fwdbwd":
            self.backwards.append((event["id"], (lane, float(event["ts"]))))
        return None


def set_contexts(trace: Trace) -> Mapping[int, tuple[float, float]]:
    """Set the context of all events, and the time that counts for each.

    Returns:
        Iteration -> begin and end of its range, in microseconds; without incomplete iterations.
    """
    iterations: dict[int, tuple[float, float]] = {}
    unended: set[int] = set()
    first_at: dict[tuple[int, float], TraceEvent] = {}
    stack: list[TraceEvent] = []
    for event in sorted(trace.host, key=lambda event: (event.lane, event.begin, -event.end)):
        while stack and (stack[-1].lane != event.lane or stack[-1].end <= event.begin):
            stack.pop()
        outer = Context()
        if stack:
            outer = stack[-1].context
        stack.append(event)
        event.context = outer
        event.launched = event.begin
        if event.what == "range":
            kind, rest = parse_range(event.name)
            if kind == "iteration":
                iterations.setdefault(int(rest), (event.begin, event.end))
            elif kind == "unended":
                unended.add(int(rest))
            elif kind:
                event.context = _enter_layer_range(outer, kind, *rest.split("|", 1))
            elif _OF_OPTIMIZER.match(event.name):
                event.context = Context(of_pass="optimizer", operator=outer.operator)
        elif event.what == "operator":
            event.context = _enter_operator(outer, event)
            first_at.setdefault((event.lane, event.begin), event)
            if outer.operator is not None:
                outer.operator.us -= event.end - event.begin
    calls = {event.link: event for event in trace.host if event.what == "call"}
    for kernel in trace.kernels:
        if (call := calls.get(kernel.link)) is not None:
            kernel.context = call.context
            kernel.launched = call.begin
    layer_of_unit = {}
    for arrow in trace.arrows.items():
        backward, forward = map(first_at.get, arrow)
        if backward is not None and forward is not None:
            layer_of_unit[backward.context.unit] = forward.context.layer
    for event in (*trace.host, *trace.kernels):
        if not event.context.layer and event.context.unit is not None:
            event.context = event.context._replace(layer=layer_of_unit.get(event.context.unit, ""))
    return {number: span for number, span in iterations.items() if number not in unended}


def _enter_layer_range(outer: Context, direction: str, gemm: str, layer: str) -> Context:
    now: Pass = "forward"
    if direction == "backward":
        now = "backward"
    elif outer.of_pass in ("backward", "recompute"):
        now = "recompute"
    unit = None
    if now == outer.of_pass:
        unit = outer.unit
    return Context(layer, gemm, now, unit, outer.operator)


def _enter_operator(outer: Context, event: TraceEvent) -> Context:
    layer, gemm, now, unit, _ = outer
    if event.name.startswith(_NODE):  # autograd's engine calls a node, also inside the backward of a checkpoint
        return Context(of_pass="backward", unit=event, operator=event)
    if _OF_BACKWARD.search(event.name):
        now = "backward"
        if outer.of_pass != "backward":
            layer = ""
            gemm = ""
            unit = None
    elif now == "backward" and event.has_node:  # in a backward, only recomputed operators have a node
        layer = ""
        gemm = ""
        now = "recompute"
        unit = None
    elif now == "" and event.has_node:
        now = "forward"
    return Context(layer, gemm, now, unit or event, event)
