"""From a trace to the time of a step, by layer, pass, GEMM and kind of kernel."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.assigning import (
    assign,
    calls_of,
    contexts_of,
    is_part,
    layers_of_units,
    work_of,
)
from te_precision_callbacks.speed.trace.events import HostCall, Pass, Trace, TraceEvent
from te_precision_callbacks.speed.trace.kinds import KernelKind
from te_precision_callbacks.speed.trace.range_names import read_layer

_OF_AN_OPTIMIZER = ("elementwise", "reduction", "norm", "host")
_MOST_UNKNOWN = 5


@dataclass(frozen=True)
class MeasuredProduct:
    """The time of kernels of one kind for a layer in a pass, in a step.

    Attributes:
        layer: the layer of a GEMM; of other kernels its module, where several layers share one; empty where no layer is
            known.
        gemm: as ``Product.gemm``; empty for kernels of other kinds, for attention in one kernel, and where it is not
            known.
        of_pass: the pass; empty outside of forward, backward and optimizer.
        kind: what the kernels do; None if their names are unknown.
        format: the format of a GEMM's operands, by the name of its kernel or by the run; empty for other kinds.
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


@dataclass(frozen=True)
class MeasuredStep:
    """The time of a step in a trace: the mean of the iterations.

    Attributes:
        device: the name of the device, or ``CPU``.
        on_device: whether kernels of a device were measured; else operators of the host.
        rank: the rank that the trace is of; None if the trace does not have it.
        iterations: the iterations in the trace; empty without their ranges, when the whole trace counts as one step.
        wall_ms: milliseconds of a step, from the first kernel of the first one to the last kernel of the last one; of a
            CPU those of the iterations.
        products: the rows, by time.
        notes: what is uncertain.
    """

    device: str
    on_device: bool
    rank: int | None
    iterations: tuple[int, ...]
    wall_ms: float
    products: tuple[MeasuredProduct, ...]
    notes: tuple[str, ...]

    @property
    def work_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(row.ms for row in self.products)

    def by_kind(self) -> dict[tuple[str, str], float]:
        """Return kind and format -> milliseconds, by time; the kind ``unknown`` for unknown kernels."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for row in self.products:
            sums[row.kind or "unknown", row.format] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def measure(trace: Trace, products: Iterable[Product] = ()) -> MeasuredStep:
    """Measure a step.

    Args:
        trace: a trace with a whole step or several.
        products: those of the run that the trace is of, as ``session.coverage()`` or ``run.coverage`` has them.

    Raises:
        TraceError: the trace has no ranges of layers, is of another run, or nothing in it has a time.
    """
    run = tuple(products)
    contexts = contexts_of(trace)
    work, iterations = _within(work_of(trace), contexts.iterations)
    if not work:
        raise TraceError(
            f"{trace.path} has no kernels and no operators. Profile a step of the training with the activities CPU and"
            " CUDA."
        )
    calls = calls_of(work)
    ranges = [found for event in trace.host if (found := read_layer(event.name)) is not None]
    _check_layers(trace, {found.layer for found in ranges if found.gemm}, run, has_ranges=bool(ranges))
    assign(calls, contexts.forward_of, run)
    layers = layers_of_units(calls, contexts.forward_of)
    steps = max(1, len(iterations))
    wall = max(event.end for event in work) - min(event.begin for event in work)
    if not trace.kernels and iterations:
        wall = sum(end - begin for begin, end in (contexts.iterations[number] for number in iterations))
    return MeasuredStep(
        device=(trace.device or "a GPU that the trace does not name") if trace.kernels else "CPU",
        on_device=bool(trace.kernels),
        rank=trace.rank,
        iterations=iterations,
        wall_ms=wall / 1e3 / steps,
        products=_rows(work, layers, steps),
        notes=tuple(_notes(trace, work, calls, iterations)),
    )


def _within(
    work: Sequence[TraceEvent], iterations: Mapping[int, tuple[float, float]]
) -> tuple[Sequence[TraceEvent], tuple[int, ...]]:
    """Return the work that was launched in an iteration; all of it without ranges of iterations."""
    if not iterations:
        return work, ()
    linked = min((event.begin for event in work if event.launch is not None), default=float("-inf"))
    # What the host launched before the trace began has no launch in it, and is of no step in it.
    work = [event for event in work if event.launch is not None or event.begin >= linked]
    numbers = sorted(iterations, key=lambda number: iterations[number])
    begins = [iterations[number][0] for number in numbers]
    found: dict[int, list[TraceEvent]] = {}
    for event in work:
        place = bisect.bisect_right(begins, event.launched) - 1
        if place >= 0 and event.launched <= iterations[numbers[place]][1]:
            found.setdefault(numbers[place], []).append(event)
    return [event for number in sorted(found) for event in found[number]], tuple(sorted(found))


def _check_layers(trace: Trace, layers: set[str], run: Sequence[Product], *, has_ranges: bool) -> None:
    """Refuse a trace without ranges of layers, or whose ranges name other layers than those of the run.

    Raises:
        TraceError: it has no ranges, or none of its layers with GEMMs is one of the run's.
    """
    if not has_ranges:
        raise TraceError(
            f"{trace.path} has no ranges of layers, so nothing says which kernel belongs to which layer. Record the"
            ' trace with profile=, such as profile="11-13", which adds them.'
        )
    own = {product.layer for product in run}
    if own and layers and not any(layer in own or any(is_part(part, layer) for part in own) for layer in layers):
        raise TraceError(
            f"{trace.path} is a trace of another run: its ranges name {in_sentence(*sorted(layers), most=2)}, and the"
            f" run has {in_sentence(*sorted(own), most=2)}. Give the trace of this run, or the run of this trace."
        )


def _rows(work: Iterable[TraceEvent], layers: Mapping[TraceEvent, str], steps: int) -> tuple[MeasuredProduct, ...]:
    sums: dict[tuple[str, str, Pass, KernelKind | None, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in work:
        call, context = event.call, event.context
        kind = None if event.known is None else event.known.kind
        if call is not None:
            by_run = "" if call.product is None else call.product.precision
            form = (event.known.format if event.known is not None else "") or by_run
            entry = sums[call.layer, call.gemm, call.context.of_pass, kind, form]
        else:
            layer = context.layer or ("" if context.unit is None else layers.get(context.unit, ""))
            if context.of_pass == "optimizer" and kind in _OF_AN_OPTIMIZER:
                kind = "optimizer"
            entry = sums[layer, "", context.of_pass, kind, ""]
        entry[0] += event.us / 1e3 / steps
        entry[1] += 1 / steps
    rows = (MeasuredProduct(*key, ms, count) for key, (ms, count) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer, row.gemm)))


def _notes(
    trace: Trace, work: Sequence[TraceEvent], calls: Sequence[HostCall], iterations: tuple[int, ...]
) -> Iterable[str]:
    if not iterations:
        yield (
            "The trace does not mark steps, so all of it counts as one step. Profile with profile=, or call step() of"
            " torch.profiler once per step."
        )
    if not trace.kernels:
        yield "The trace has no event of a GPU. The times are those of operators on the host."
    if all(event.shapes is None for event in trace.host):
        yield "The trace has no shapes (record_shapes=False): dgrad and wgrad of torch layers cannot be separated."
    without = sum(not call.layer for call in calls)
    if without:
        yield f"{without} of {len(calls)} GEMMs and attentions ran outside of all ranges: their layer is unknown."
    unknown: dict[str, float] = defaultdict(float)
    for event in work:
        if event.known is None:
            unknown[event.name] += event.us
    if unknown:
        share = 100 * sum(unknown.values()) / sum(event.us for event in work)
        names = in_sentence(*sorted(unknown, key=lambda name: -unknown[name]), most=_MOST_UNKNOWN)
        yield f"Kernels of unknown kind take {share:.1f} % of the kernels' time: {names}."
