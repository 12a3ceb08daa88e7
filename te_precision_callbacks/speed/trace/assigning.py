"""Which product of which layer each GEMM of a trace is: by the ranges of a session, or else by order and shape.

What ranges do not say is inferred from the products of the run, in the order in which they ran first: the GEMMs of a
forward come in that order, once for each micro-batch. The node of a backward belongs to the layer of the operator of
the forward that has made it, which the trace tells. A forward that a checkpoint runs again is a stretch of the same
order. What fits nothing stays without a layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.calls import Call, aligned, may_be
from te_precision_callbacks.speed.trace.contexts import Contexts
from te_precision_callbacks.speed.trace.range_names import module_of
from te_precision_callbacks.speed.trace.timeline import NOTHING

_WITH_A_WEIGHT = ("fprop", "dgrad", "wgrad")


def assign(calls: Sequence[Call], contexts: Contexts, products: Iterable[Product]) -> None:
    """Give calls their layer and their GEMM, as far as anything says them.

    Args:
        calls: all calls of a trace, in order.
        contexts: what the events of the host belong to.
        products: those of the run.
    """
    run = [product for product in products if product.macs and product.gemm != "lookup"]
    forward = [product for product in run if not product.backward]
    backward = [product for product in run if product.backward]
    _within_ranges(calls, run)
    _in_order([call for call in calls if call.of_pass in ("forward", "") and not call.layer], forward)
    _again(calls, forward)
    _by_link(calls, contexts, backward)
    _in_order([call for call in calls if call.of_pass == "backward" and not call.layer], backward)


def _take(call: Call, product: Product) -> None:
    call.layer, call.gemm, call.product = product.layer, product.gemm, product
    call.inferred = True


def _within_ranges(calls: Sequence[Call], run: Sequence[Product]) -> None:
    """Find the products of calls whose layer a range says, and the GEMM of those whose range says the layer alone."""
    by_layer: dict[tuple[str, bool], list[Product]] = defaultdict(list)
    for product in run:
        by_layer[product.layer, product.backward].append(product)
    units: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in calls:
        if not call.layer:
            continue
        of_layer = by_layer[call.layer, call.of_pass == "backward"]
        if call.gemm:
            call.product = next((product for product in of_layer if product.gemm == call.gemm), None)
        elif len(of_layer) == 1:
            call.product, call.gemm = of_layer[0], of_layer[0].gemm
        elif of_layer:
            units[call.unit, call.layer].append(call)
    for (_, layer), of_unit in units.items():
        _align(of_unit, _each_call(by_layer[layer, of_unit[0].of_pass == "backward"]))


def _align(calls: Sequence[Call], expected: Sequence[Product]) -> None:
    for call, place in zip(calls, aligned(calls, expected), strict=True):
        if place != NOTHING:
            _take(call, expected[place])


def _once(products: Sequence[Product]) -> int:
    """How often a step calls most products of a pass: the number of its micro-batches."""
    counts = Counter(product.calls for product in products if product.gemm in _WITH_A_WEIGHT)
    counts = counts or Counter(product.calls for product in products)
    return max(1, counts.most_common(1)[0][0]) if counts else 1


def _each_call(products: Sequence[Product]) -> list[Product]:
    """The products in the order of the calls of one micro-batch."""
    once = _once(products)
    return [product for product in products for _ in range(max(1, round(product.calls / once)))]


def _in_order(calls: Sequence[Call], products: Sequence[Product]) -> None:
    expected = _each_call(products)
    if calls and expected:
        times = max(1, round(len(calls) / len(expected)))
        _align(calls, expected * times)


def _again(calls: Sequence[Call], forward: Sequence[Product]) -> None:
    """The forwards that are run again: each is a stretch of the forward, before the one that was run again last."""
    expected = _each_call(forward)
    limit = len(expected)
    for stretch in _stretches(calls):
        length = len(stretch)
        begins = [*range(limit - length, -1, -1), *range(len(expected) - length, max(limit - length, -1), -1)]
        fits = (at for at in begins if all(map(may_be, stretch, expected[at : at + length])))
        begin = next(fits, None)
        if begin is None:
            continue
        limit = begin
        for call, product in zip(stretch, expected[begin:], strict=False):
            _take(call, product)


def _stretches(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls of forwards that are run again, up to the backward that follows each."""
    found: list[list[Call]] = [[]]
    for call in calls:
        if call.of_pass != "recompute":
            found.append([])
        elif not call.layer:
            found[-1].append(call)
    return [stretch for stretch in found if stretch]


def _by_link(calls: Sequence[Call], contexts: Contexts, backward: Sequence[Product]) -> None:
    """The calls of a backward: those of the products whose forward has made its node."""
    forward_of_unit: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.of_pass != "backward" and call.layer:
            forward_of_unit[call.unit].append(call)
    units: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.of_pass == "backward" and not call.layer:
            units[call.unit].append(call)
    for unit, of_unit in units.items():
        node = contexts.linked.get(unit, NOTHING)
        made_by = [] if node == NOTHING else forward_of_unit.get(contexts.of[node].unit, [])
        at_node = [call for call in made_by if node in (call.operator, call.unit)] or made_by
        wanted = {(call.layer, call.gemm) for call in at_node}
        expected = [product for product in backward if _is_backward_of(product, wanted)]
        if expected:
            _align(of_unit, _each_call(expected))


def _is_backward_of(product: Product, forward: set[tuple[str, str]]) -> bool:
    of_forward = "fprop" if product.gemm in _WITH_A_WEIGHT else product.gemm
    return (product.layer, of_forward) in forward


def layers_of_units(calls: Sequence[Call], contexts: Contexts) -> Mapping[int, str]:
    """The layer of each unit, for its other work: that of its GEMMs, or of the forward that has made its node; the
    module where they are of several layers."""
    layers: dict[int, dict[str, None]] = defaultdict(dict)
    for call in calls:
        if call.layer and call.unit != NOTHING:
            layers[call.unit][call.layer] = None
    found = {unit: module_of(tuple(names)) for unit, names in layers.items()}
    for unit, node in contexts.linked.items():
        context = contexts.of[node]
        layer = context.layer or found.get(context.unit, "")
        if layer:
            found.setdefault(unit, layer)
    return found
