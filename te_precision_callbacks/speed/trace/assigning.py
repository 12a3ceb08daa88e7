"""Assign the events of a trace to layers, passes and matrix products.

The ranges that ``profile=`` puts around layers give the layer of each forward, and the GEMM of Transformer Engine's
layers in both passes. A backward node without a range belongs to the layer whose forward created it, which the trace
links.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.events import OUTSIDE, Context, HostCall, Pass, Trace, TraceEvent
from te_precision_callbacks.speed.trace.kinds import NamedKernel, of_kernel, of_operator
from te_precision_callbacks.speed.trace.range_names import module_of, read_iteration, read_layer, read_unended

_NODE = "autograd::engine::evaluate_function: "
_OF_BACKWARD = re.compile(r"Backward\d*$|^torch::autograd::")
_OF_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)")
_BESIDE_A_GEMM = re.compile(
    r"(?i)splitKreduce|reduce_1Block|epilogue::impl|setup_grouped|grouped_tensor_offsets|bias_add"
)
"""Kernels that a GEMM launches after its own."""


class Contexts(NamedTuple):
    """What the ranges and links of a trace say.

    Attributes:
        iterations: number of an iteration -> when its range begins and ends, in microseconds; without iterations that
            the run has left before their end.
        forward_of: the unit of a backward -> the operator of the forward that created its node.
    """

    iterations: Mapping[int, tuple[float, float]]
    forward_of: Mapping[TraceEvent, TraceEvent]


def contexts_of(trace: Trace) -> Contexts:
    """Set the context of each event of the host, and the event around it."""
    iterations: dict[int, tuple[float, float]] = {}
    unended: set[int | None] = set()
    first_at: dict[tuple[int, float], TraceEvent] = {}
    stack: list[TraceEvent] = []
    for event in sorted(trace.host, key=lambda event: (event.lane, event.begin, -event.end)):
        while stack and (stack[-1].lane != event.lane or stack[-1].end <= event.begin):
            stack.pop()
        event.outer = stack[-1] if stack else None
        stack.append(event)
        around = OUTSIDE if event.outer is None else event.outer.context
        if event.what == "call":
            event.context = around
        elif event.what == "range":
            event.context = _in_range(around, event.name)
            if (iteration := read_iteration(event.name)) is not None:
                iterations.setdefault(iteration, (event.begin, event.end))
            unended.add(read_unended(event.name))
        else:
            event.context = _in_operator(around, event)
            first_at.setdefault((event.lane, event.begin), event)
    forward_of = {
        unit: first_at[forward]
        for backward, forward in trace.arrows.items()
        if backward in first_at and forward in first_at and (unit := first_at[backward].context.unit) is not None
    }
    return Contexts({number: span for number, span in iterations.items() if number not in unended}, forward_of)


def _in_range(around: Context, name: str) -> Context:
    found = read_layer(name)
    if found is not None:
        again = around.of_pass in ("backward", "recompute")
        now: Pass = "backward" if found.backward else "recompute" if again else "forward"
        unit = around.unit if now == around.of_pass else None
        return Context(found.layer, found.gemm, now, unit, around.operator)
    return Context(of_pass="optimizer") if _OF_OPTIMIZER.match(name) else around


def _in_operator(around: Context, event: TraceEvent) -> Context:
    layer, gemm, now, unit, _ = around
    if event.name.startswith(_NODE):  # the engine calls a node, also inside of the backward of a checkpoint
        return Context(of_pass="backward", unit=event, operator=event)
    if _OF_BACKWARD.search(event.name):
        now = "backward"
        if around.of_pass != "backward":
            layer, gemm, unit = "", "", None
    elif now == "backward" and event.has_node:  # operators of a backward have no node, unless they run again
        layer, gemm, now, unit = ("", "", "recompute", None)
    elif now == "" and event.has_node:
        now = "forward"
    return Context(layer, gemm, now, event if unit is None else unit, event)


def work_of(trace: Trace) -> list[TraceEvent]:
    """Return the kernels of a trace, or the operators of a trace without a GPU, in the order of their launches."""
    if trace.kernels:
        calls = {event.link: event for event in trace.host if event.what == "call"}
        for kernel in trace.kernels:
            kernel.launch = calls.get(kernel.link)
            kernel.context = OUTSIDE if kernel.launch is None else kernel.launch.context
            kernel.us = kernel.end - kernel.begin
            operator = kernel.context.operator
            kernel.known = of_kernel(kernel.name) or (None if operator is None else of_operator(operator.name))
        return sorted(trace.kernels, key=lambda event: (event.launched, event.begin))
    operators = [event for event in trace.host if event.what == "operator"]
    for event in operators:
        event.known, event.launch = of_operator(event.name) or NamedKernel("host"), event
        event.us += event.end - event.begin
        outer = event.outer
        while outer is not None and outer.what != "operator":
            outer = outer.outer
        if outer is not None:
            outer.us -= event.end - event.begin
    for event in operators:
        event.us = max(0.0, event.us)
    return sorted(operators, key=lambda event: event.launched)


def calls_of(work: Iterable[TraceEvent]) -> list[HostCall]:
    """Group the kernels of matrix products by the calls of the host, in the order of the calls."""
    found: list[HostCall] = []
    by_operator: dict[TraceEvent | None, HostCall] = {}
    last_of_unit: dict[TraceEvent | None, HostCall] = {}
    for event in work:
        if event.known is None or event.known.kind not in ("gemm", "convolution", "attention"):
            continue
        context = event.context
        is_of_torch = context.operator is not None and context.operator.name.startswith("aten::")
        call = by_operator.get(context.operator) if is_of_torch else None
        if call is None and _BESIDE_A_GEMM.search(event.name):
            call = last_of_unit.get(context.unit)
        if call is None:
            call = HostCall([], context, _sizes(context.operator), context.layer, context.gemm)
            found.append(call)
            by_operator[context.operator] = last_of_unit[context.unit] = call
        call.events.append(event)
        event.call = call
    return found


def _sizes(operator: TraceEvent | None) -> tuple[int, frozenset[int]] | None:
    """Return the sizes of a product by the operands of an operator of torch, as :attr:`HostCall.sizes`."""
    if operator is None or operator.shapes is None or not operator.name.startswith("aten::"):
        return None
    shapes = operator.shapes
    if operator.name.startswith(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")):
        shapes = shapes[1:]
    if len(shapes) < 2 or len(shapes[0]) < 2 or len(shapes[1]) < 2 or shapes[0][-1] != shapes[1][-2]:
        return None
    return shapes[0][-1], frozenset((shapes[0][-2], shapes[1][-1]))


def assign(calls: Sequence[HostCall], forward_of: Mapping[TraceEvent, TraceEvent], products: Iterable[Product]) -> None:
    """Set the layer, the GEMM and the product of each call.

    Args:
        calls: all calls of a trace, in order.
        forward_of: as :attr:`Contexts.forward_of`.
        products: the products of the run.
    """
    run = [product for product in products if product.macs and product.gemm != "lookup"]
    by_layer: dict[tuple[str, bool], list[Product]] = defaultdict(list)
    for product in run:
        by_layer[product.layer, product.backward].append(product)
    experts: dict[tuple[str, str, Pass], list[HostCall]] = defaultdict(list)
    matches: Counter[object] = Counter()
    forward_gemms: dict[TraceEvent | None, set[str]] = defaultdict(set)
    for call in sorted(calls, key=lambda call: call.context.of_pass == "backward"):
        context = call.context
        backward = context.of_pass == "backward"
        forward = None if context.unit is None else forward_of.get(context.unit)
        if backward and not call.layer and forward is not None:
            call.layer = _known_layer(forward.context.layer, by_layer, backward=True)
            gemms = forward_gemms[forward]
            if len(gemms) == 1 and "fprop" not in gemms:  # a backward of attention is named as its forward
                (call.gemm,) = gemms
        if call.layer and call.gemm and (call.layer, backward) not in by_layer:
            experts[call.layer, call.gemm, context.of_pass].append(call)
        elif call.layer:
            call.layer = _known_layer(call.layer, by_layer, backward=backward)
            _set_product(call, by_layer.get((call.layer, backward), ()), matches)
        if not backward:
            forward_gemms[context.operator].add(call.gemm)
            forward_gemms[context.unit].add(call.gemm)
    for (module, gemm, _), together in experts.items():
        _set_experts(together, [product for product in run if product.gemm == gemm and is_part(product.layer, module)])


def _set_product(call: HostCall, of_layer: Sequence[Product], matches: Counter[object]) -> None:
    """Set the product of a call of a known layer, and the GEMM if no range gives it: by the sizes of its operands."""
    if call.is_attention:
        call.product = next(iter(of_layer), None)
        return
    candidates = [product for product in of_layer if call.gemm in ("", product.gemm)]
    if not call.gemm and len(candidates) > 1:
        candidates = [p for p in candidates if call.sizes == (p.k, frozenset((p.n, p.m)))]
    if not candidates:
        return
    key = call.layer, call.context.of_pass == "backward", tuple(product.gemm for product in candidates)
    call.product = candidates[matches[key] % len(candidates)]  # of equal sizes: one after the other
    call.gemm = call.product.gemm
    matches[key] += 1


def is_part(layer: str, module: str) -> bool:
    """Return whether a layer is one of several of a module: an expert, or a half of an MLP."""
    return layer.rpartition(".")[0] == module


def _set_experts(calls: Sequence[HostCall], experts: Sequence[Product]) -> None:
    """Give each GEMM of a module its expert: they run one after the other, unless one kernel runs all of them."""
    one_each = bool(experts) and len(calls) % len(experts) == 0
    for number, call in enumerate(calls if experts else ()):
        call.product = experts[number % len(experts) if one_each else 0]
        if one_each:
            call.layer = call.product.layer


def _known_layer(layer: str, known: Mapping[tuple[str, bool], object], *, backward: bool) -> str:
    """Return the layer of the run that a module is, or is inside of; the module where it is neither."""
    inside = layer
    while inside:
        if (inside, backward) in known:
            return inside
        inside = inside.rpartition(".")[0]
    return layer


def layers_of_units(calls: Iterable[HostCall], forward_of: Mapping[TraceEvent, TraceEvent]) -> Mapping[TraceEvent, str]:
    """Return the layer of each unit, for its other kernels: that of its GEMMs, or of the forward that created its node;
    the module where they are of several layers."""
    layers: dict[TraceEvent, dict[str, None]] = defaultdict(dict)
    for call in calls:
        if call.layer and call.context.unit is not None:
            layers[call.context.unit][call.layer] = None
    found = {unit: module_of(tuple(of_unit)) for unit, of_unit in layers.items()}
    for unit, forward in forward_of.items():
        context = forward.context
        layer = context.layer or ("" if context.unit is None else found.get(context.unit, ""))
        if layer:
            found.setdefault(unit, layer)
    return found
