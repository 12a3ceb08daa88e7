"""Matches the GEMMs of a trace to layers and products, by the ranges that ``profile=`` puts around layers.

A range gives the layer of each forward, and the GEMM of Transformer Engine's layers in both passes. A backward node
without a range of its own belongs to the layer whose forward created it, which the trace links.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from te_precision_callbacks.base.vocabulary import LOW_PRECISION
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.calls import HostCall
from te_precision_callbacks.speed.trace.contexts import Contexts, Pass
from te_precision_callbacks.speed.trace.range_names import module_of, read_layer
from te_precision_callbacks.speed.trace.reading import NOTHING, Trace


def assign(calls: Sequence[HostCall], contexts: Contexts, products: Iterable[Product]) -> None:
    """Set the layer, the GEMM and the product of each call.

    Args:
        calls: all calls of a trace, in order.
        contexts: what the events of the host belong to.
        products: the products of the run.
    """
    run = [product for product in products if product.macs and product.gemm != "lookup"]
    by_layer: dict[tuple[str, bool], list[Product]] = defaultdict(list)
    for product in run:
        by_layer[product.layer, product.backward].append(product)
    experts: dict[tuple[str, str, Pass], list[HostCall]] = defaultdict(list)
    matches: Counter[tuple[str, bool, tuple[str, ...]]] = Counter()
    forward_gemms: dict[int, set[str]] = defaultdict(set)
    for backward in (False, True):
        for call in calls:
            if (call.of_pass == "backward") != backward:
                continue
            node = contexts.linked.get(call.unit, NOTHING)
            if not call.layer and backward and node != NOTHING:
                call.layer = _known_layer(contexts.of[node].layer, by_layer, backward=True)
                gemms = forward_gemms[node]
                if len(gemms) == 1 and "fprop" not in gemms:  # a backward of attention is named as its forward
                    (call.gemm,) = gemms
            if call.layer and call.gemm and (call.layer, backward) not in by_layer:
                experts[call.layer, call.gemm, call.of_pass].append(call)
            elif call.layer:
                call.layer = _known_layer(call.layer, by_layer, backward=backward)
                _set_product(call, by_layer.get((call.layer, backward), ()), matches)
            if not backward:
                for place in {call.operator, call.unit}:
                    forward_gemms[place].add(call.gemm)
    for (module, gemm, _), together in experts.items():
        _set_experts(together, [product for product in run if product.gemm == gemm and is_part(product.layer, module)])


def _set_product(
    call: HostCall, of_layer: Sequence[Product], matches: Counter[tuple[str, bool, tuple[str, ...]]]
) -> None:
    """Set the product of a call of a known layer, and the GEMM if no range gives it: by the sizes of its operands."""
    if call.is_attention:
        call.product = next(iter(of_layer), None)
        return
    candidates = [product for product in of_layer if call.gemm in ("", product.gemm)]
    if not call.gemm and len(candidates) > 1:
        candidates = [p for p in candidates if call.sizes == (p.k, frozenset((p.n, p.m)))]
    if not candidates:
        return
    key = call.layer, call.of_pass == "backward", tuple(product.gemm for product in candidates)
    call.product = candidates[matches[key] % len(candidates)]  # of equal sizes: one after the other
    call.gemm = call.product.gemm
    matches[key] += 1


def is_part(layer: str, module: str) -> bool:
    """Whether a layer is one of several of a module: an expert, or a half of an MLP."""
    return layer.rpartition(".")[0] == module


def _set_experts(calls: Sequence[HostCall], experts: Sequence[Product]) -> None:
    """Give each GEMM of a module its expert: they run one after the other, unless one kernel runs all of them."""
    if not experts:
        return
    one_each = len(calls) % len(experts) == 0
    for number, call in enumerate(calls):
        call.product = experts[number % len(experts) if one_each else 0]
        if one_each:
            call.layer = call.product.layer


def _known_layer(layer: str, known: Mapping[tuple[str, bool], object], *, backward: bool) -> str:
    """The layer of the run that a module is, or is inside of; the module where it is neither."""
    inside = layer
    while inside:
        if (inside, backward) in known:
            return inside
        inside = inside.rpartition(".")[0]
    return layer


def layers_of_units(calls: Sequence[HostCall], contexts: Contexts) -> Mapping[int, str]:
    """The layer of each unit, for its other work: that of its GEMMs, or of the forward that has made its node; the
    module where they are of several layers."""
    layers: dict[int, dict[str, None]] = defaultdict(dict)
    for call in calls:
        if call.layer and call.unit != NOTHING:
            layers[call.unit][call.layer] = None
    found = {unit: module_of(tuple(of_unit)) for unit, of_unit in layers.items()}
    for unit, node in contexts.linked.items():
        context = contexts.of[node]
        layer = context.layer or found.get(context.unit)
        if layer:
            found.setdefault(unit, layer)
    return found


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


def is_low(call: HostCall, trace: Trace, quantized: QuantizedGemms) -> bool | None:
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
    """Refuse a trace without ranges of layers, or whose ranges name other layers than those of the run.

    Raises:
        TraceError: it has no ranges, or none of its layers with GEMMs is one of the run's.
    """
    if not any(read_layer(name) for name in trace.names):
        raise TraceError(
            f"{trace.path} has no ranges of layers, so nothing says which kernel belongs to which layer. Record the"
            ' trace with profile=, such as profile="11-13", which adds them.'
        )
    found, own = ranged_layers(trace), {product.layer for product in run}
    if run and found and not found & {*own, *(layer.rpartition(".")[0] for layer in own)}:
        raise TraceError(
            f"{trace.path} is a trace of another run: its ranges name {in_sentence(*sorted(found), most=2)}, and the"
            f" run has {in_sentence(*sorted(own), most=2)}. Give the trace of this run, or the run of this trace."
        )


def require_own_gemms(trace: Trace, calls: Iterable[HostCall], quantized: QuantizedGemms, *, is_own: bool) -> list[str]:
    """Refuse a trace most of whose GEMMs contradict the products of the run.

    Args:
        trace: the trace.
        calls: its GEMMs, with their products.
        quantized: the GEMMs of :func:`quantized_gemms`.
        is_own: whether the trace is known to be of the run: nothing is refused then.

    Returns:
        Notes on what contradicts the run, but does not refuse the trace.

    Raises:
        TraceError: most GEMMs have another format or other shapes than the run's.
    """
    wrong: list[str] = []
    of_run = [call for call in calls if call.product is not None and not call.is_attention]
    formats = sum(_has_other_format(call, trace, quantized) for call in of_run)
    shapes = sum(_has_other_shape(call) for call in of_run)
    if formats:
        wrong.append(
            f"{formats} of {len(of_run)} GEMMs are in low precision in the trace and in high precision at the end of"
            " the run, or the other way round."
        )
    if shapes:
        wrong.append(f"{shapes} of {len(of_run)} GEMMs have other shapes of their weights than the run.")
    if not is_own and 2 * max(formats, shapes) > len(of_run) > 0:
        raise TraceError(
            f"{trace.path} is of another run: {' '.join(wrong)} Give the trace of this run, or the run of this trace."
        )
    return wrong


def _has_other_format(call: HostCall, trace: Trace, quantized: QuantizedGemms) -> bool:
    low = is_low(call, trace, quantized)
    return low is not None and call.product is not None and low != call.product.is_low


def _has_other_shape(call: HostCall) -> bool:
    """Whether the weight has another shape; the number of tokens may differ between steps."""
    if call.sizes is None or call.product is None:
        return False
    (inner, outer), one = call.sizes, call.product
    if one.gemm == "wgrad":
        return outer != {one.n, one.m}
    return one.gemm in ("fprop", "dgrad") and (inner != one.k or one.m not in outer)
