"""From a trace to what a step took, by layer, pass, GEMM and kind."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.trace.assigning import UnitLayer, assign, is_part, layers_of_units
from te_precision_callbacks.speed.trace.belonging import (
    QuantizedGemms,
    is_low,
    quantized_gemms,
    ranged_layers,
    require_own_gemms,
    require_own_layers,
)
from te_precision_callbacks.speed.trace.calls import Call, calls_of
from te_precision_callbacks.speed.trace.contexts import Pass, contexts_of
from te_precision_callbacks.speed.trace.errors import TraceError
from te_precision_callbacks.speed.trace.idling import launches_of
from te_precision_callbacks.speed.trace.kinds import KernelKind, format_of_types
from te_precision_callbacks.speed.trace.measured import MeasuredProduct, MeasuredStep, Unassigned
from te_precision_callbacks.speed.trace.timeline import NOTHING, Trace
from te_precision_callbacks.speed.trace.work import Work, union, work_of

_NOWHERE = UnitLayer("", False)


def measure(trace: Trace, products: Iterable[Product] = (), *, is_own: bool = False) -> MeasuredStep:
    """Measure a step.

    Args:
        trace: a trace with a whole step or several.
        products: those of the run that the trace is of, as ``session.coverage()`` or ``run.coverage`` has them; without
            them only ranges say layers.
        is_own: whether the trace is known to be of the run, as one in the folder of the run is. Its GEMMs may then
            contradict the products, which may be those of another step: a note says it.

    Raises:
        TraceError: the trace is of another run, or nothing in it has a time.
    """
    run = tuple(products)
    contexts = contexts_of(trace)
    work, iterations = _within(work_of(trace, contexts), contexts.iterations)
    if not work:
        raise TraceError(
            f"{trace.path} has no work of a device, and none of an operator. Profile a step of the training with the"
            " activities CPU and CUDA."
        )
    calls = calls_of(work, trace, contexts)
    require_own_layers(trace, run)
    assign(calls, contexts, run)
    quantized = quantized_gemms(trace, contexts)
    against = require_own_gemms(trace, calls, run, quantized, is_own=is_own)
    units = layers_of_units(calls, contexts)
    steps = max(1, len(iterations))
    rows = _rows(trace, work, calls, units, steps, quantized)
    wall, busy = _times(trace, work, contexts.iterations)
    total = sum(each.us for each in work)
    unknown: dict[str, float] = defaultdict(float)
    for each in work:
        if each.known is None:
            unknown[each.name] += each.us / 1e3 / steps
    return MeasuredStep(
        device=(trace.device or "a GPU that the trace does not name") if trace.has_device else "CPU",
        on_device=trace.has_device,
        rank=trace.rank,
        iterations=iterations,
        wall_ms=wall / 1e3 / steps,
        busy_ms=busy / 1e3 / steps,
        idle_ms=(wall - busy) / 1e3 / steps,
        overlap_ms=(total - busy) / 1e3 / steps,
        products=rows,
        unassigned=tuple(Unassigned(name, ms) for name, ms in sorted(unknown.items(), key=lambda item: -item[1])),
        launches=launches_of(trace, work, wall, steps) if trace.has_device else None,
        notes=(*_notes(trace, work, calls, run, iterations, quantized), *against),
    )


def _within(work: Sequence[Work], iterations: Mapping[int, tuple[float, float]]) -> tuple[list[Work], tuple[int, ...]]:
    """The work that was launched in an iteration; all of it if no range says them."""
    if not iterations:
        return list(work), ()
    linked = min((each.begin for each in work if each.launched_at != NOTHING), default=float("-inf"))
    # What the host launched before the trace began has no launch in it, and is of no step in it.
    work = [each for each in work if each.launched_at != NOTHING or each.begin >= linked]
    numbers = sorted(iterations, key=lambda number: iterations[number])
    begins = [iterations[number][0] for number in numbers]
    found: dict[int, list[Work]] = {}
    for each in work:
        place = bisect.bisect_right(begins, each.launched) - 1
        if place >= 0 and each.launched <= iterations[numbers[place]][1]:
            found.setdefault(numbers[place], []).append(each)
    return [each for number in sorted(found) for each in found[number]], tuple(sorted(found))


def _times(trace: Trace, work: Sequence[Work], iterations: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """The microseconds of all steps, and of those in which any kernel ran."""
    stretches = union([(each.begin, each.end) for each in work])
    begin, end = stretches[0][0], stretches[-1][1]
    if not trace.has_device:
        own = sum(each.us for each in work)  # what operators of several threads do at the same time counts twice
        busy = min(own, sum(last - first for first, last in stretches))
        inside = [span for span in iterations.values() if span[0] <= end and span[1] >= begin]
        return max(busy, sum(last - first for first, last in inside) if inside else end - begin), busy
    return end - begin, sum(last - first for first, last in stretches)


_Key = tuple[str, str, Pass, KernelKind | None, str, bool]


def _rows(
    trace: Trace,
    work: Sequence[Work],
    calls: Sequence[Call],
    units: Mapping[int, UnitLayer],
    steps: int,
    quantized: QuantizedGemms,
) -> tuple[MeasuredProduct, ...]:
    call_of = {id(each): call for call in calls for each in call.work}
    sums: dict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in work:
        call, context = call_of.get(id(each)), each.context
        kind = None if each.known is None else each.known.kind
        if call is not None:
            key: _Key = (
                call.layer,
                call.gemm,
                call.of_pass,
                kind,
                _format(trace, each, call, quantized),
                call.inferred,
            )
        else:
            unit = UnitLayer(context.layer, False) if context.layer else units.get(context.unit, _NOWHERE)
            key = (unit.layer, "", context.of_pass, _in_pass(kind, context.of_pass), "", unit.inferred)
        entry = sums[key]
        entry[0] += each.us / 1e3 / steps
        entry[1] += 1 / steps
    rows = (
        MeasuredProduct(layer, gemm, of_pass, kind, form, ms, count, inferred)
        for (layer, gemm, of_pass, kind, form, inferred), (ms, count) in sums.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer, row.gemm)))


_OF_AN_OPTIMIZER = frozenset({"elementwise", "reduction", "norm", "host"})


def _in_pass(kind: KernelKind | None, of_pass: Pass) -> KernelKind | None:
    """The kind of a kernel in a pass: what an optimizer computes is its own."""
    return "optimizer" if of_pass == "optimizer" and kind in _OF_AN_OPTIMIZER else kind


def _format(trace: Trace, each: Work, call: Call, quantized: QuantizedGemms) -> str:
    """The format of a product's operands: by the kernel's name, by the types of its operands, or by the run."""
    if each.known is not None and each.known.format:
        return each.known.format
    number = NOTHING if call.operator == NOTHING else trace.host.operands[call.operator]
    by_run = "" if call.product is None else call.product.precision
    if call.product is not None and call.product.family in ("te", "te_ops"):
        low = is_low(call, trace, quantized)
        if low is None or low == call.product.is_low:
            return by_run  # a backend without the device's types computes with others
        if low:
            return ""  # operands in bytes, of a format that nothing says
    elif _is_in_bytes(trace, call, quantized):
        return ""
    return (format_of_types(trace.operands[number].types) if number != NOTHING else "") or by_run


def _is_in_bytes(trace: Trace, call: Call, quantized: QuantizedGemms) -> bool:
    """Whether a GEMM that fits no product of a run has quantized operands, of a format that the trace does not name."""
    known = call.work[0].known
    return call.product is None and not (known and known.format) and bool(is_low(call, trace, quantized))


def _notes(
    trace: Trace,
    work: Sequence[Work],
    calls: Sequence[Call],
    run: Sequence[Product],
    iterations: tuple[int, ...],
    quantized: QuantizedGemms,
) -> Iterable[str]:
    if not iterations:
        yield (
            "No range says where a step begins, so the whole trace counts as one step. Profile with profile=, or call"
            " step() of torch.profiler once a step."
        )
    if not trace.has_device:
        yield "The trace has no event of a GPU. The times are those of operators on the host."
    if not trace.has_shapes:
        yield "The trace has no shapes (record_shapes=False). Without ranges, the order alone says which GEMM is which."
    if any(each.captured for each in work):
        yield "Kernels of CUDA graphs have the layer of the replay, if any: a graph does not say what launched them."
    unlinked = sum(each.launched_at == NOTHING for each in work) if trace.has_device else 0
    if unlinked:
        yield f"{unlinked} of {len(work)} kernels are not linked to the host (no CPU activity): their pass is unknown."
    in_bytes = sum(_is_in_bytes(trace, call, quantized) for call in calls)
    if in_bytes:
        yield (
            f"{in_bytes} of {len(calls)} GEMMs and attentions have quantized operands, in a format that the trace does"
            " not name. Give the run, which names it."
        )
    without = sum(not call.layer for call in calls)
    if without and run:
        yield f"{without} of {len(calls)} GEMMs and attentions fit no product of the run: their layer is unknown."
    elif without:
        yield f"{without} of {len(calls)} GEMMs and attentions have no layer. Give the run, or profile with ranges."
    own = {product.layer for product in run}
    other = sorted(layer for layer in ranged_layers(trace) - own if not any(is_part(part, layer) for part in own))
    if run and other:
        yield f"The run has no layer {in_sentence(*other, most=2)}, which the trace has ranges of."
