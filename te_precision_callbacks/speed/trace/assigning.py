"""Which product of which layer each GEMM of a trace is: by the ranges of a session, or else by order and shape.

What ranges do not say is inferred from the products of the run, in the order in which they ran first: the GEMMs of a
forward come in that order, once for each micro-batch. The node of a backward belongs to the layer of the operator of
the forward that has made it, which the trace tells. A forward that a checkpoint runs again is a stretch of the same
order. What fits nothing stays without a layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from te_precision_callbacks.base.vocabulary import LOW_PRECISION
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.calls import Call, aligned, may_be
from te_precision_callbacks.speed.trace.contexts import Contexts, Pass
from te_precision_callbacks.speed.trace.range_names import module_of, read_layer
from te_precision_callbacks.speed.trace.reading import NOTHING, Trace

_WITH_A_WEIGHT = ("fprop", "dgrad", "wgrad")


def assign(calls: Sequence[Call], contexts: Contexts, products: Iterable[Product]) -> None:
    """Give calls their layer and their GEMM, as far as anything says them.

    Args:
        calls: all calls of a trace, in order.
        contexts: what the events of the host belong to.
        products: those of the run.
    """
    run = [product for product in products if product.macs and product.gemm != "lookup"]
    batches = _micro_batches(run)
    forward = [product for product in run if not product.backward]
    backward = [product for product in run if product.backward]
    _within_ranges(calls, run, batches)
    left = [call for call in calls if call.of_pass in ("forward", "") and not call.layer]
    _in_order(left, _without(forward, calls), batches)
    _again(calls, forward, batches)
    _by_link(calls, contexts, backward, batches)
    left = [call for call in calls if call.of_pass == "backward" and not call.layer]
    _in_order(left, _without(backward, calls), batches)


def _without(products: Sequence[Product], calls: Sequence[Call]) -> list[Product]:
    """The products of layers that no call is known to be of, in the pass of the products."""
    known = {(call.layer, call.of_pass == "backward") for call in calls}
    return [product for product in products if (product.layer, product.backward) not in known]


def _take(call: Call, product: Product, *, inferred: bool = True) -> None:
    call.layer, call.gemm, call.product = product.layer, "" if call.is_attention else product.gemm, product
    call.inferred = inferred


def _within_ranges(calls: Sequence[Call], run: Sequence[Product], batches: int) -> None:
    """Find the products of calls whose layer a range says, and the GEMM of those whose range says the layer alone."""
    by_layer: dict[tuple[str, bool], list[Product]] = defaultdict(list)
    for product in run:
        by_layer[product.layer, product.backward].append(product)
    alone: dict[tuple[str, Pass], list[Call]] = defaultdict(list)
    of_experts: dict[tuple[str, str, Pass], list[Call]] = defaultdict(list)
    for call in calls:
        if not call.layer:
            continue
        if call.gemm and (call.layer, call.of_pass == "backward") not in by_layer:
            of_experts[call.layer, call.gemm, call.of_pass].append(call)
            continue
        backward = call.of_pass == "backward"
        call.layer = _known_layer(call.layer, by_layer, backward=backward)
        of_layer = by_layer[call.layer, backward]
        if call.is_attention:
            call.product = next(iter(of_layer), None)
        elif call.gemm:
            call.product = next((product for product in of_layer if product.gemm == call.gemm), None)
        elif len(of_layer) == 1:
            call.product, call.gemm = of_layer[0], of_layer[0].gemm
        elif of_layer:
            alone[call.layer, call.of_pass].append(call)
    for (layer, of_pass), of_layer_alone in alone.items():
        _in_order(of_layer_alone, by_layer[layer, of_pass == "backward"], batches)
    for (layer, gemm, _), together in of_experts.items():
        _of_experts(together, [product for product in run if product.gemm == gemm and is_part(product.layer, layer)])


def is_part(layer: str, module: str) -> bool:
    """Whether a layer is one of several of a module: an expert, or a half of an MLP."""
    return layer.rpartition(".")[0] == module


def _of_experts(calls: Sequence[Call], experts: Sequence[Product]) -> None:
    """Give each GEMM of a module its expert: they run one after the other, unless one kernel runs all of them."""
    if not experts:
        return
    one_each = len(calls) % len(experts) == 0
    for number, call in enumerate(calls):
        if one_each:
            _take(call, experts[number % len(experts)])
        else:
            call.product = experts[0]


def _known_layer(layer: str, known: Mapping[tuple[str, bool], object], *, backward: bool) -> str:
    """The layer of the run that a module is, or is inside of; the module where it is neither."""
    inside = layer
    while inside:
        if (inside, backward) in known:
            return inside
        inside = inside.rpartition(".")[0]
    return layer


def _align(calls: Sequence[Call], expected: Sequence[Product], *, inferred: bool = True) -> None:
    for call, place in zip(calls, aligned(calls, expected), strict=True):
        if place != NOTHING:
            _take(call, expected[place], inferred=inferred)


def _micro_batches(run: Sequence[Product]) -> int:
    """How many micro-batches a step has: how often it calls most products with a weight."""
    counts = Counter(product.calls for product in run if product.gemm in _WITH_A_WEIGHT)
    return counts.most_common(1)[0][0] if counts else min((product.calls for product in run), default=1)


def _each_call(products: Sequence[Product], batches: int, calls: Sequence[Call]) -> list[Product]:
    """The products in the order of the calls of one micro-batch; those of attention once where a kernel runs all."""
    in_one = any(call.is_attention for call in calls)
    found: list[Product] = []
    for product in products:
        if in_one and product.family == "attention":
            if not found or found[-1].layer != product.layer:
                found.append(product)
        else:
            found += [product] * max(1, round(product.calls / batches))
    return found


def _in_order(calls: Sequence[Call], products: Sequence[Product], batches: int) -> None:
    expected = _each_call(products, batches, calls)
    if calls and expected:
        times = max(1, round(len(calls) / len(expected)))
        _align(calls, expected * times)


def _again(calls: Sequence[Call], forward: Sequence[Product], batches: int) -> None:
    """The forwards that are run again: each is a stretch of the forward, before the one that was run again last."""
    expected = _each_call(forward, batches, calls)
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


def _by_link(calls: Sequence[Call], contexts: Contexts, backward: Sequence[Product], batches: int) -> None:
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
            by_order = any(call.inferred for call in at_node) or any(call.sizes is None for call in of_unit)
            _align(of_unit, _each_call(expected, batches, of_unit), inferred=by_order)
        if len({call.layer for call in at_node}) == 1:  # what the run has not counted, or a kernel of two products
            for call in of_unit:
                if not call.layer:
                    call.layer, call.inferred = at_node[0].layer, at_node[0].inferred


def _is_backward_of(product: Product, forward: set[tuple[str, str]]) -> bool:
    of_forward = "fprop" if product.gemm in _WITH_A_WEIGHT else product.gemm
    return (product.layer, of_forward) in forward or (product.family == "attention" and (product.layer, "") in forward)


class UnitLayer(NamedTuple):
    """The layer of a unit.

    Attributes:
        layer: the layer, or the module of several.
        inferred: whether it was inferred from order and shape.
    """

    layer: str
    inferred: bool


def layers_of_units(calls: Sequence[Call], contexts: Contexts) -> Mapping[int, UnitLayer]:
    """The layer of each unit, for its other work: that of its GEMMs, or of the forward that has made its node; the
    module where they are of several layers."""
    calls_of_unit: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.layer and call.unit != NOTHING:
            calls_of_unit[call.unit].append(call)
    found = {
        unit: UnitLayer(
            module_of(tuple(dict.fromkeys(call.layer for call in of_unit))), any(call.inferred for call in of_unit)
        )
        for unit, of_unit in calls_of_unit.items()
    }
    for unit, node in contexts.linked.items():
        context = contexts.of[node]
        made_by = UnitLayer(context.layer, False) if context.layer else found.get(context.unit)
        if made_by is not None:
            found.setdefault(unit, made_by)
    return found


_LEAST_FIT = 0.2
"""Of the GEMMs that tell their sizes, the share that must be products of the run."""
_KEPT_IN_BYTES = "unsigned char"

QuantizedGemms = frozenset[tuple[str, str, str]]
"""Layer, GEMM and pass of those whose operands are quantized."""


def quantized_gemms(trace: Trace, contexts: Contexts) -> QuantizedGemms:
    """The GEMMs of a CPU's trace that read quantized operands, which Transformer Engine keeps as bytes."""
    host = trace.host
    return frozenset(
        (context.layer, context.gemm, context.of_pass)
        for place, context in enumerate(contexts.of)
        if context.gemm and host.operands[place] != NOTHING
        if _KEPT_IN_BYTES in trace.operands[host.operands[place]].types
    )


def is_low(call: Call, trace: Trace, quantized: QuantizedGemms) -> bool | None:
    """Whether a trace says that a GEMM is in low precision; None where it does not say it."""
    known, context = call.work[0].known, call.work[0].context
    if known is not None and known.format:
        return known.format in LOW_PRECISION["quantized"]
    if trace.has_device or not trace.has_shapes or not context.gemm:
        return None
    return (context.layer, context.gemm, context.of_pass) in quantized


def ranged_layers(trace: Trace) -> set[str]:
    """The layers, or modules of experts, whose GEMMs have ranges."""
    return {read.layer for name in trace.names if (read := read_layer(name)) is not None and read.gemm}


def require_own_layers(trace: Trace, run: Sequence[Product]) -> None:
    """Refuse a trace whose ranges name other layers than those of the run.

    Raises:
        TraceError: none of its layers with GEMMs is one of the run's.
    """
    found, own = ranged_layers(trace), {product.layer for product in run}
    if run and found and not found & {*own, *(layer.rpartition(".")[0] for layer in own)}:
        raise TraceError(
            f"{trace.path} is a trace of another run: its ranges name {in_sentence(*sorted(found), most=2)}, and the"
            f" run has {in_sentence(*sorted(own), most=2)}. Give the trace of this run, or the run of this trace."
        )


def require_own_gemms(
    trace: Trace, calls: Iterable[Call], run: Sequence[Product], quantized: QuantizedGemms, *, is_own: bool
) -> list[str]:
    """Refuse a trace most of whose GEMMs contradict the products of the run.

    Args:
        trace: the trace.
        calls: its GEMMs, with their products.
        run: the products of the run.
        quantized: the GEMMs of :func:`quantized_gemms`.
        is_own: whether the trace is known to be of the run: nothing is refused then.

    Returns:
        Notes on what contradicts the run, but does not refuse the trace.

    Raises:
        TraceError: most GEMMs have another format or other shapes than the run's, or few of them fit a product.
    """
    gemms = [call for call in calls if not call.is_attention]
    wrong: list[str] = []
    of_run = [call for call in gemms if call.product is not None]
    formats = sum(_has_other_format(call, trace, quantized) for call in of_run)
    shapes = sum(_has_other_shape(call) for call in of_run)
    fitting = [call for call in gemms if call.sizes is not None or call.among is not None]
    fit = sum(bool(call.layer) for call in fitting)
    if formats:
        wrong.append(
            f"{formats} of {len(of_run)} GEMMs are in low precision in the trace and in high precision at the end of"
            " the run, or the other way round."
        )
    if shapes:
        wrong.append(f"{shapes} of {len(of_run)} GEMMs have other shapes of their weights than the run.")
    few = bool(run and fitting) and fit < _LEAST_FIT * len(fitting)
    if not is_own and (few or 2 * max(formats, shapes) > len(of_run) > 0):
        text = " ".join(wrong)
        if few:
            text = f"{fit} of {len(fitting)} GEMMs fit a product of the run. {text}".rstrip()
        raise TraceError(
            f"{trace.path} is of another run: {text} Give the trace of this run, or the run of this trace. If it is of"
            " this run with batches of another size, profile with profile=, whose ranges name the layers."
        )
    return wrong


def _has_other_format(call: Call, trace: Trace, quantized: QuantizedGemms) -> bool:
    low = is_low(call, trace, quantized)
    return low is not None and call.product is not None and low != call.product.is_low


def _has_other_shape(call: Call) -> bool:
    """Whether the weight has another shape; the number of tokens may differ between steps."""
    if call.sizes is None or call.product is None:
        return False
    (inner, outer), one = call.sizes, call.product
    if one.gemm == "wgrad":
        return outer != {one.n, one.m}
    return one.gemm in ("fprop", "dgrad") and (inner != one.k or one.m not in outer)
