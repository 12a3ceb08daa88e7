"""What each event of the host belongs to: a layer by the ranges around it, a pass, and the operator that runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from te_precision_callbacks.speed.trace.range_names import read_iteration, read_layer, read_unended
from te_precision_callbacks.speed.trace.reading import NOTHING, HostEvents, HostKind, Trace, column

Pass = Literal["forward", "backward", "recompute", "optimizer", ""]
"""The part of a step: ``recompute`` is a forward that an activation checkpoint runs again in the backward; empty for
what is none of these, such as the loading of a batch."""

_NODE = "autograd::engine::evaluate_function: "
_OF_BACKWARD = re.compile(r"Backward\d*$|^torch::autograd::")
_OF_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)")


class Context(NamedTuple):
    """What an event belongs to.

    Attributes:
        layer, gemm: what the innermost range of a session says; empty outside of them.
        of_pass: the pass.
        unit: the place of the outermost operator of the pass: a call of a Function of autograd, or of an operator, or
            the backward of either.
        operator: the place of the innermost operator.
    """

    layer: str = ""
    gemm: str = ""
    of_pass: Pass = ""
    unit: int = NOTHING
    operator: int = NOTHING


_OUTSIDE = Context()


@dataclass
class Contexts:
    """The contexts of a trace.

    Attributes:
        of: the context of each event of the host.
        outer: the place of the event around each event; NOTHING without one.
        iterations: number of an iteration -> when its ranges begin and end, in microseconds. Without those that the
            run has left before their end.
        linked: the unit of a backward -> the place of the operator of the forward whose node it is.
    """

    of: list[Context]
    outer: list[int]
    iterations: Mapping[int, tuple[float, float]]
    linked: Mapping[int, int]


def contexts_of(trace: Trace) -> Contexts:
    """Find what the events of the host belong to."""
    order, outer = _nested(trace.host)
    host, names = trace.host, trace.names
    of = [_OUTSIDE] * len(order)
    iterations: dict[int, tuple[float, float]] = {}
    unended: set[int | None] = set()
    first_at: dict[tuple[int, float], int] = {}
    for place in order:
        around = of[outer[place]] if outer[place] != NOTHING else _OUTSIDE
        kind, name = host.kind[place], names[host.name[place]]
        if kind == HostKind.CALL:
            of[place] = around
        elif kind == HostKind.RANGE:
            of[place] = _in_range(around, name)
            if (iteration := read_iteration(name)) is not None:
                iterations.setdefault(iteration, (host.begin[place], host.end[place]))
            unended.add(read_unended(name))
        else:
            of[place] = _in_operator(around, place, name, has_node=host.sequence[place] != NOTHING)
            first_at.setdefault((host.lane[place], host.begin[place]), place)
    linked = {
        of[first_at[backward]].unit: first_at[forward]
        for backward, forward in trace.forward_of.items()
        if backward in first_at and forward in first_at
    }
    ended = {number: span for number, span in sorted(iterations.items()) if number not in unended}
    return Contexts(of, outer, ended, linked or _by_sequence(trace, of, order))


def _nested(events: HostEvents) -> tuple[list[int], list[int]]:
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


def _in_range(around: Context, name: str) -> Context:
    found = read_layer(name)
    if found is not None:
        again = around.of_pass in ("backward", "recompute")
        now: Pass = "backward" if found.backward else "recompute" if again else "forward"
        unit = around.unit if now == around.of_pass else NOTHING
        return Context(found.layer, found.gemm, now, unit, around.operator)
    return Context(of_pass="optimizer") if _OF_OPTIMIZER.match(name) else around


def _in_operator(around: Context, place: int, name: str, *, has_node: bool) -> Context:
    layer, gemm, now, unit, _ = around
    if name.startswith(_NODE):  # the engine calls a node, also inside of the backward of a checkpoint
        return Context(of_pass="backward", unit=place, operator=place)
    if _OF_BACKWARD.search(name):
        now = "backward"
        if around.of_pass != "backward":
            layer, gemm, unit = "", "", NOTHING
    elif now == "backward" and has_node:  # operators of a backward have no node of their own, unless they run again
        layer, gemm, now, unit = ("", "", "recompute", NOTHING)
    elif now == "" and has_node:
        now = "forward"
    return Context(layer, gemm, now, place if unit == NOTHING else unit, place)


def _by_sequence(trace: Trace, of: list[Context], order: list[int]) -> dict[int, int]:
    """The links of a trace without arrows between forward and backward: by the numbers of nodes, which each thread of
    a forward counts on its own. With recomputed forwards they are not unique, and there are no links."""
    host = trace.host
    if any(context.of_pass == "recompute" for context in of):
        return {}
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for place in order:
        number = host.sequence[place]
        if number != NOTHING and host.kind[place] == HostKind.OPERATOR:
            if of[place].of_pass == "backward":
                backward.setdefault(number, place)
            else:
                forward[number] = place  # the last one has taken the number; those before have only looked at it
    return {of[place].unit: forward[number] for number, place in backward.items() if number in forward}
