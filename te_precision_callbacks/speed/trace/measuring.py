"""From a trace to the time of a step, by layer, pass, GEMM and kind of kernel."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.assigning import (
    QuantizedGemms,
    assign,
    is_low,
    is_part,
    layers_of_units,
    quantized_gemms,
    ranged_layers,
    require_own_gemms,
    require_own_layers,
)
from te_precision_callbacks.speed.trace.calls import HostCall, Work, calls_of, union, work_of
from te_precision_callbacks.speed.trace.contexts import Pass, contexts_of
from te_precision_callbacks.speed.trace.kinds import KernelKind, format_of_types
from te_precision_callbacks.speed.trace.reading import NOTHING, Trace

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class MeasuredProduct:
    """What kernels of one kind took for a layer in a pass, in a step.

    Attributes:
        layer: the layer of a GEMM; of other kernels its module, where several layers share one; empty where no layer is
            known.
        gemm: as ``Product.gemm``; empty for kernels of other kinds, for attention in one kernel, and where it is not
            known.
        of_pass: the pass; empty outside of forward, backward and optimizer.
        kind: what the kernels do; None if their names are unknown.
        format: the format of a GEMM's operands; empty for other kinds, and where nothing says it.
        ms: milliseconds of a step, the mean of the iterations in the trace; kernels that ran at the same time count
            fully.
        calls: kernels, or operators of the host, of a step.
    """

    layer: str
    gemm: str
    of_pass: Pass
    kind: KernelKind | None
    format: str
    ms: float
    calls: float


class Unassigned(NamedTuple):
    """A kernel whose kind nobody knows.

    Attributes:
        name: its name.
        ms: milliseconds of a step.
    """

    name: str
    ms: float


@dataclass(frozen=True)
class MeasuredStep:
    """What a step really took: the mean of the iterations in a trace.

    ``sum(row.ms for row in products) - overlap_ms + idle_ms`` is ``wall_ms``.

    Attributes:
        device: the name of the device, or ``CPU``.
        on_device: whether kernels of a device were measured; else operators of the host.
        rank: the rank that the trace is of; None if it does not say it.
        iterations: the iterations in the trace; empty if no range says them, and the whole trace counts as one step.
        wall_ms: milliseconds from the first kernel of a step to that of the next one, or to the last kernel.
        busy_ms: milliseconds in which any kernel ran.
        idle_ms: the others.
        overlap_ms: milliseconds that kernels ran while another kernel ran.
        products: the rows, by time.
        unassigned: the kernels whose kind nobody knows, by time.
        notes: what is uncertain of the measurement, in words.
    """

    device: str
    on_device: bool
    rank: int | None
    iterations: tuple[int, ...]
    wall_ms: float
    busy_ms: float
    idle_ms: float
    overlap_ms: float
    products: tuple[MeasuredProduct, ...]
    unassigned: tuple[Unassigned, ...]
    notes: tuple[str, ...]

    @property
    def work_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(row.ms for row in self.products)

    @property
    def busy_share(self) -> float:
        """The share of the step in which any kernel ran, from 0 to 1; nan without a time."""
        return self.busy_ms / self.wall_ms if self.wall_ms else float("nan")

    @property
    def unassigned_share(self) -> float:
        """The share of the kernels' time of which nobody knows the kind; nan without a kernel."""
        work = self.work_ms
        return sum(row.ms for row in self.unassigned) / work if work else float("nan")

    @property
    def without_layer_share(self) -> float:
        """The share of the GEMMs' time without a layer; nan without a GEMM."""
        gemms = [row for row in self.products if row.kind in ("gemm", "convolution")]
        whole = sum(row.ms for row in gemms)
        return sum(row.ms for row in gemms if not row.layer) / whole if whole else float("nan")

    def by_kind(self) -> dict[tuple[str, str], float]:
        """Kind and format -> milliseconds, by time; the kind ``unknown`` of kernels that nobody knows."""
        return self._sums(lambda row: (row.kind or "unknown", row.format))

    def by_pass(self) -> dict[str, float]:
        """Pass -> milliseconds, by time; ``other`` outside of all passes."""
        return self._sums(lambda row: row.of_pass or "other")

    def by_layer(self) -> dict[str, float]:
        """Layer -> milliseconds, by time; empty for all without a layer."""
        return self._sums(lambda row: row.layer)

    def _sums(self, key: Callable[[MeasuredProduct], KeyT]) -> dict[KeyT, float]:
        sums: dict[KeyT, float] = defaultdict(float)
        for row in self.products:
            sums[key(row)] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def measure(trace: Trace, products: Iterable[Product] = (), *, is_own: bool = False) -> MeasuredStep:
    """Measure a step.

    Args:
        trace: a trace with a whole step or several.
        products: those of the run that the trace is of, as ``session.coverage()`` or ``run.coverage`` has them.
        is_own: whether the trace is known to be of the run, as one in the folder of the run is. Its GEMMs may then
            contradict the products, which may be those of another step: a note says it.

    Raises:
        TraceError: the trace has no ranges of layers, is of another run, or nothing in it has a time.
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
    against = require_own_gemms(trace, calls, quantized, is_own=is_own)
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


_Key = tuple[str, str, Pass, KernelKind | None, str]


def _rows(
    trace: Trace,
    work: Sequence[Work],
    calls: Sequence[HostCall],
    units: Mapping[int, str],
    steps: int,
    quantized: QuantizedGemms,
) -> tuple[MeasuredProduct, ...]:
    call_of = {id(each): call for call in calls for each in call.work}
    sums: dict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in work:
        call, context = call_of.get(id(each)), each.context
        kind = None if each.known is None else each.known.kind
        if call is not None:
            key: _Key = (call.layer, call.gemm, call.of_pass, kind, _format(trace, each, call, quantized))
        else:
            layer = context.layer or units.get(context.unit, "")
            if context.of_pass == "optimizer" and kind in _OF_AN_OPTIMIZER:
                kind = "optimizer"
            key = (layer, "", context.of_pass, kind, "")
        entry = sums[key]
        entry[0] += each.us / 1e3 / steps
        entry[1] += 1 / steps
    rows = (
        MeasuredProduct(layer, gemm, of_pass, kind, form, ms, count)
        for (layer, gemm, of_pass, kind, form), (ms, count) in sums.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer, row.gemm)))


_OF_AN_OPTIMIZER = frozenset({"elementwise", "reduction", "norm", "host"})


def _format(trace: Trace, each: Work, call: HostCall, quantized: QuantizedGemms) -> str:
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


def _is_in_bytes(trace: Trace, call: HostCall, quantized: QuantizedGemms) -> bool:
    """Whether a GEMM that fits no product of a run has quantized operands, of a format that the trace does not name."""
    known = call.work[0].known
    return call.product is None and not (known and known.format) and bool(is_low(call, trace, quantized))


def _notes(
    trace: Trace,
    work: Sequence[Work],
    calls: Sequence[HostCall],
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
        yield "The trace has no shapes (record_shapes=False): dgrad and wgrad of layers of torch are not told apart."
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
    if without:
        yield f"{without} of {len(calls)} GEMMs and attentions ran outside of all ranges: their layer is unknown."
    own = {product.layer for product in run}
    other = sorted(layer for layer in ranged_layers(trace) - own if not any(is_part(part, layer) for part in own))
    if run and other:
        yield f"The run has no layer {in_sentence(*other, most=2)}, which the trace has ranges of."
