"""Assign the events of a trace to layers, GEMMs and passes.

Ranges that ``profile=`` puts around layers name the layer of each forward, and the GEMM in both passes of Transformer
Engine's layers. A backward node without a range belongs to the layer of the linked forward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from te_precision_callbacks.speed.trace.range_names import parse_range
from te_precision_callbacks.speed.trace.reading import Context, Pass, Trace, TraceEvent

_NODE = "autograd::engine::evaluate_function: "
_OF_BACKWARD = re.compile(r"Backward\d*$|^torch::autograd::")
_OF_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)")


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
        outer = stack[-1].context if stack else Context()
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
                event.context = _in_layer(outer, kind, *rest.split("|", 1))
            elif _OF_OPTIMIZER.match(event.name):
                event.context = Context(of_pass="optimizer", operator=outer.operator)
        elif event.what == "operator":
            event.context = _in_operator(outer, event)
            first_at.setdefault((event.lane, event.begin), event)
            if outer.operator is not None:
                outer.operator.us -= event.end - event.begin
    calls = {event.link: event for event in trace.host if event.what == "call"}
    for kernel in trace.kernels:
        if (call := calls.get(kernel.link)) is not None:
            kernel.context, kernel.launched = call.context, call.begin
    layer_of_unit = {
        first_at[backward].context.unit: first_at[forward].context.layer
        for backward, forward in trace.arrows.items()
        if backward in first_at and forward in first_at
    }
    for event in (*trace.host, *trace.kernels):
        if not event.context.layer and event.context.unit is not None:
            event.context = event.context._replace(layer=layer_of_unit.get(event.context.unit, ""))
    return {number: span for number, span in iterations.items() if number not in unended}


def _in_layer(outer: Context, direction: str, gemm: str, layer: str) -> Context:
    again = outer.of_pass in ("backward", "recompute")
    now: Pass = "backward" if direction == "backward" else "recompute" if again else "forward"
    return Context(layer, gemm, now, outer.unit if now == outer.of_pass else None, outer.operator)


def _in_operator(outer: Context, event: TraceEvent) -> Context:
    layer, gemm, now, unit, _ = outer
    if event.name.startswith(_NODE):  # the engine calls a node, also inside the backward of a checkpoint
        return Context(of_pass="backward", unit=event, operator=event)
    if _OF_BACKWARD.search(event.name):
        now = "backward"
        if outer.of_pass != "backward":
            layer, gemm, unit = "", "", None
    elif now == "backward" and event.has_node:  # operators of a backward have no node, unless they run again
        layer, gemm, now, unit = ("", "", "recompute", None)
    elif now == "" and event.has_node:
        now = "forward"
    return Context(layer, gemm, now, event if unit is None else unit, event)
